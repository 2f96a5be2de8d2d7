"""Each family against logits that transformers computed (see tests/golden/make_golden.py)."""

import json

import numpy as np
import pytest

from npmoe.config import KV_FORMATS, KVCacheConfig, KVWindows
from tests.golden.golden_cases import CASES
from tests.helpers import (
    GOLDEN,
    Session,
    golden_arrays,
    golden_model,
    logits_in_chunks,
    relative_error,
)

MAX_ERROR = 1e-5
PLUS = KVCacheConfig("fp4", "fp4", rotated=True, windows=KVWindows(3, 9, "fp32"))
every_case = pytest.mark.parametrize("name", CASES)


def worst_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Largest absolute difference of each position, `[T]`."""
    return np.abs(a - b).max(axis=-1)


def test_every_golden_case_is_there() -> None:
    assert {p.parent.name for p in GOLDEN.glob("*/golden.npz")} == set(CASES)
    for name, config in CASES.items():
        assert json.loads((GOLDEN / name / "config.json").read_text()) == config


@every_case
@pytest.mark.parametrize("chunk", [200, 64, 1])
def test_logits_are_those_of_transformers(name: str, chunk: int) -> None:
    golden = golden_arrays(name)
    logits = logits_in_chunks(golden_model(name), golden["input_ids"], chunk)
    assert logits.dtype == np.float32
    assert relative_error(logits, golden["logits"]) < MAX_ERROR
    top_two = np.sort(golden["logits"], axis=-1)[:, -2:]
    clear = top_two[:, 1] - top_two[:, 0] > 2 * worst_difference(logits, golden["logits"])
    assert clear.mean() > 0.9
    greedy, expected = logits.argmax(axis=-1), golden["logits"].argmax(axis=-1)
    np.testing.assert_array_equal(greedy[clear], expected[clear])


@every_case
def test_chunks_of_any_size_agree(name: str) -> None:
    model, ids = golden_model(name), golden_arrays(name)["input_ids"]
    whole, chunks, single = (logits_in_chunks(model, ids, n) for n in (200, 64, 1))
    assert relative_error(chunks, whole) < MAX_ERROR
    assert relative_error(single, whole) < MAX_ERROR


def test_longrope_takes_the_short_factors_for_a_short_sequence() -> None:
    golden, model = golden_arrays("llama_longrope"), golden_model("llama_longrope")
    for chunk in (50, 1):
        logits = logits_in_chunks(model, golden["input_ids_short"], chunk)
        assert relative_error(logits, golden["logits_short"]) < MAX_ERROR
    assert relative_error(golden["logits"][:50], golden["logits_short"]) > 0.01


@every_case
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    golden, session = golden_arrays(name), Session(golden_model(name))
    logits = session.step(it=golden["input_ids"])["it"]
    for expected, margin in zip(golden["generated"], golden["margin"], strict=True):
        assert margin > 2 * MAX_ERROR * np.abs(logits[-1]).max(), "the case decides nothing"
        token = logits[-1].argmax()
        assert token == expected
        logits = session.step(it=np.array([token]))["it"]


@every_case
def test_sequences_batched_together_give_what_each_gives_alone(name: str) -> None:
    model, ids = golden_model(name), golden_arrays(name)["input_ids"]
    prompts = {"a": ids[:37], "b": ids[80:180], "c": ids[60:61]}
    new_tokens = {"a": ids[37:38], "b": ids[180:183], "c": ids[61:62]}
    together = Session(model)
    first, second = together.step(**prompts), together.step(**new_tokens)
    for s in prompts:
        alone = Session(model)
        assert relative_error(first[s], alone.step(**{s: prompts[s]})[s]) < MAX_ERROR
        assert relative_error(second[s], alone.step(**{s: new_tokens[s]})[s]) < MAX_ERROR


@every_case
@pytest.mark.parametrize("kv", ["fp32", "fp4"])
def test_up_to_eight_tokens_give_the_same_bits_together_and_alone(name: str, kv: str) -> None:
    model, ids = golden_model(name), golden_arrays(name)["input_ids"]
    steps = [{"a": ids[:4], "b": ids[10:13], "c": ids[20:21]}, {"c": ids[21:22], "a": ids[4:5]}]
    together = Session(model, kv)
    for step in steps:
        batched = together.step(**step)
        for s, logits in batched.items():
            alone = Session(model, kv)
            for before in steps[: steps.index(step)]:
                alone.step(**{s: before[s]})
            np.testing.assert_array_equal(logits, alone.step(**{s: step[s]})[s])


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_a_quantised_cache_stays_near_the_exact_one(kv: str) -> None:
    golden = golden_arrays("qwen3_moe_window")
    logits = logits_in_chunks(golden_model("qwen3_moe_window"), golden["input_ids"], 64, kv)
    typical = np.median(worst_difference(logits, golden["logits"]))
    spread = golden["logits"].std()
    share = {"fp32": 1e-5, "bf16": 0.05, "int8": 0.1, "fp8": 0.5}.get(kv, 2.0)
    assert typical < share * spread


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp4"])
def test_a_quantised_cache_gives_the_same_in_chunks_of_any_size(kv: str) -> None:
    model, ids = golden_model("llama_yarn"), golden_arrays("llama_yarn")["input_ids"][:60]
    whole, chunks, single = (logits_in_chunks(model, ids, n, kv) for n in (60, 23, 1))
    # A value on the edge between two codes may fall either way, so a few positions differ more.
    for other in (chunks, single):
        error = worst_difference(other, whole) / np.abs(whole).max(axis=-1)
        assert np.median(error) < 1e-4
        assert error.max() < 0.05


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if "kv_lora_rank" not in c])
def test_windows_are_of_positions_whatever_the_chunks(name: str) -> None:
    """Up to eight tokens at a time: the same bits; all at once: within rounding."""
    model, ids = golden_model(name), golden_arrays(name)["input_ids"][:40]
    single, some, many, whole = (logits_in_chunks(model, ids, n, PLUS) for n in (1, 5, 8, 40))
    np.testing.assert_array_equal(some, single)
    np.testing.assert_array_equal(many, single)
    error = worst_difference(whole, single) / np.abs(single).max(axis=-1)
    assert np.median(error) < 1e-5
