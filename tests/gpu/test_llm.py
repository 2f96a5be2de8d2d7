"""The shipped model on the GPU against itself on the CPU."""

import numpy as np
import pytest

import npmoe
from tests.helpers import GOLDEN, golden_arrays

pytestmark = pytest.mark.gpu

PROMPT = "Once upon a time there was a king who had three daughters, and the youngest"
GREEDY = npmoe.SamplingParams(temperature=0, repetition_penalty=1, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=["bf16", "fp4"])
def pair(request: pytest.FixtureRequest):
    """(on the CPU, on the GPU), with the same KV format."""
    options = {"kv_cache": request.param, "progress": False, "max_seq_len": 512}
    with npmoe.LLM(device="cpu", **options) as cpu, npmoe.LLM(device="cuda", **options) as gpu:
        yield cpu, gpu


def test_logits_agree_at_every_position(pair) -> None:
    cpu, gpu = pair
    ids = cpu.tokenizer.encode(PROMPT * 8)[:150]
    expected, found = cpu.forward(ids), gpu.forward(ids)
    error = np.abs(found - expected).max(axis=1)
    relative = error / np.abs(expected).max(axis=1)
    assert np.median(relative) < 5e-3
    assert relative.max() < 3e-2  # a key or a value whose rounding falls the other way
    top = np.sort(expected, axis=1)
    clear = top[:, -1] - top[:, -2] > 2 * error
    assert clear.mean() > 0.8
    assert (found.argmax(axis=1) == expected.argmax(axis=1))[clear].all()


def test_greedy_text_agrees_token_for_token(pair) -> None:
    cpu, gpu = pair
    answer = gpu.generate(PROMPT, GREEDY)
    logits = cpu.forward(answer.prompt_token_ids + answer.token_ids)
    start = len(answer.prompt_token_ids) - 1
    for i, token in enumerate(answer.token_ids):  # teacher-forced
        row = logits[start + i]
        assert row.max() - row[token] < 0.02 * np.abs(row).max()


def test_a_batch_gives_what_each_prompt_gives_alone(pair) -> None:
    _, gpu = pair
    prompts = [PROMPT, "The cat", "In the middle of the forest", "He said", PROMPT[:30]]
    together = gpu.generate(prompts, GREEDY)
    for prompt, answer in zip(prompts, together, strict=True):
        assert answer.token_ids == gpu.generate(prompt, GREEDY).token_ids
    gpu.engine.scheduler.allocator.check_integrity([])


def test_a_seed_gives_the_same_text_as_on_the_cpu(pair) -> None:
    cpu, gpu = pair
    params = npmoe.SamplingParams(seed=7, max_tokens=12)
    assert (
        gpu.generate(PROMPT, params).text.split()[:2]
        == (cpu.generate(PROMPT, params).text.split()[:2])
    )


def test_gpt_oss_is_that_of_the_cpu() -> None:
    """Biases, sinks, windows shorter than the text, clamped SwiGLU, MXFP4 experts, padding."""
    ids = golden_arrays("gpt_oss")["input_ids"].tolist()
    options = {"kv_cache": "bf16", "progress": False, "max_seq_len": 256}
    with npmoe.LLM(GOLDEN / "gpt_oss", device="cpu", **options) as cpu:
        expected = cpu.forward(ids)
    with npmoe.LLM(GOLDEN / "gpt_oss", device="cuda", **options) as gpu:
        found = gpu.forward(ids)
    errors = np.abs(found - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert np.median(errors) < 1e-3
    assert np.quantile(errors, 0.95) < 5e-3  # a key or a value may round the other way
