"""SamplingParams: legal ranges, and what comes from generation_config."""

from typing import Any

import numpy as np
import pytest

from npmoe.sampling import MAX_LOGPROBS, SamplingParams

ILLEGAL: dict[str, tuple[str, list[Any]]] = {
    "n": ("1 to 1024", [0, -1, 1025, 1.0, True, "1", None]),
    "temperature": ("[0, infinity)", [-0.1, float("nan"), float("inf"), "1", True]),
    "top_k": (">= 0", [-1, 1.5, True]),
    "top_p": ("(0, 1]", [0, -0.1, 1.01, float("nan")]),
    "min_p": ("[0, 1]", [-0.1, 1.01]),
    "repetition_penalty": ("(0, infinity)", [0, -1, float("inf")]),
    "presence_penalty": ("[-2, 2]", [-2.1, 2.1, None]),
    "frequency_penalty": ("[-2, 2]", [-2.1, 2.1, None]),
    "seed": ("0 to 18446744073709551615", [-1, 2**64, 0.5]),
    "max_tokens": (">= 1", [0, -5, 2.0]),
    "min_tokens": (">= 0", [-1, 2.0]),
    "logprobs": (f"0 to {MAX_LOGPROBS}", [-1, MAX_LOGPROBS + 1, True]),
    "prompt_logprobs": (f"0 to {MAX_LOGPROBS}", [-1, MAX_LOGPROBS + 1]),
    "stop": ("non-empty strings", ["", ["a", ""], [1], 5, b"ab", None]),
    "stop_token_ids": ("", [[-1], [1.5], 5, ["a"]]),
    "logit_bias": ("", [{-1: 1.0}, {1: 101}, {1: -101}, {1: float("nan")}, {"a": 1.0}, [1], None]),
    "ignore_eos": ("True and False", [1, "no", None]),
    "skip_special_tokens": ("True and False", [0, None]),
}
CASES = [(name, legal, value) for name, (legal, values) in ILLEGAL.items() for value in values]


@pytest.mark.parametrize(("name", "legal", "value"), CASES)
def test_an_illegal_value_is_named_with_its_range(name: str, legal: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    assert legal in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("n", 1), ("n", 1024), ("temperature", 0), ("temperature", 1e9), ("top_k", 0)],
        *[("top_k", 10**9), ("top_p", 1), ("top_p", 1e-9), ("min_p", 0), ("min_p", 1)],
        *[("repetition_penalty", 1e-3), ("presence_penalty", -2), ("frequency_penalty", 2)],
        *[("seed", 0), ("seed", 2**64 - 1), ("max_tokens", 1), ("min_tokens", 0)],
        *[("logprobs", 0), ("logprobs", MAX_LOGPROBS), ("stop_token_ids", (0, 5))],
    ],
)
def test_the_ends_of_a_range_are_legal(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"min_tokens = 5: .* 0 to 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_numpy_scalars_become_python_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        seed=np.int32(7),  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 4]),
        logit_bias={np.int64(2): np.float32(1)},  # type: ignore[dict-item]
    )
    assert (params.temperature, params.seed) == (0.5, 7)
    assert type(params.seed) is int
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == {2: 1.0}


def test_one_stop_string_is_a_tuple_of_one() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")


def test_a_silent_generation_config_is_greedy_without_filters() -> None:
    p = SamplingParams().resolve({})
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty) == (0, 0, 1, 0, 1)
    assert (p.max_tokens, p.min_tokens) == (256, 0)


FULL = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.1,
    "repetition_penalty": 1.05,
    "max_new_tokens": 99,
    "min_new_tokens": 3,
}


def test_unset_fields_come_from_generation_config() -> None:
    p = SamplingParams().resolve(FULL)
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty) == (
        0.6,
        20,
        0.95,
        0.1,
        1.05,
    )
    assert (p.max_tokens, p.min_tokens) == (99, 3)


def test_what_the_caller_sets_wins() -> None:
    mine = SamplingParams(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        max_tokens=5,
        min_tokens=0,
    )
    assert mine.resolve(FULL) == mine
    assert mine.resolve(FULL | {"do_sample": False}) == mine


@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        ({"do_sample": True}, 1.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": None, "temperature": None}, 0.0),
        ({"temperature": 0.7}, 0.7),
    ],
)
def test_do_sample(config: dict[str, Any], temperature: float) -> None:
    assert SamplingParams().resolve(config).temperature == temperature
    assert SamplingParams(temperature=0.3).resolve(config).temperature == 0.3


def test_min_and_max_tokens_agree_after_resolving() -> None:
    assert SamplingParams(max_tokens=2).resolve({"min_new_tokens": 5}).min_tokens == 2
    p = SamplingParams(min_tokens=300).resolve({})
    assert (p.min_tokens, p.max_tokens) == (300, 300)


def test_an_illegal_generation_config_is_found() -> None:
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams().resolve({"top_p": 2})
