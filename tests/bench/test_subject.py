"""What does not fit is refused before anything is made, with what would fit."""

from unittest.mock import patch

import numpy as np
import pytest

from npmoe.bench import subject
from npmoe.bench.subject import check_subject, named_shape, weight_bytes, weights_of
from npmoe.config import KVCacheConfig, parse_weights
from npmoe.errors import OutOfMemory, UnsupportedModel
from npmoe.llm import shipped_model
from tests.helpers import GOLDEN

BF16 = KVCacheConfig()
QWEN = named_shape("qwen3-30b-a3b")


def refusal(free: float, weights: str, tokens: int, device: str = "cuda") -> str:
    with (
        patch.object(subject, "free_memory", lambda device: free),
        pytest.raises(OutOfMemory) as error,
    ):
        check_subject(QWEN, parse_weights(weights), BF16, tokens, device)
    return str(error.value)


def test_weights_in_bytes() -> None:
    """2 bytes a weight, in fp4 9/16 of a byte for all but the embedding and the routers."""
    attention, experts = (32 + 8 + 32) * 128 * 2048, 128 * 3 * 768 * 2048
    matrices = 48 * (attention + experts) + 151936 * 2048
    kept = 48 * 128 * 2048 + 151936 * 2048
    assert weight_bytes(QWEN, {}, "cuda") == 2 * (matrices + kept)
    assert weight_bytes(QWEN, parse_weights("fp4"), "cuda") == matrices * 9 / 16 + 2 * kept


def test_what_would_fit() -> None:
    assert "weights fp4 (17.6 GB) would fit" in refusal(40e9, "native", 1024)
    assert "a KV cache in fp4 of 86,805 tokens would fit" in refusal(
        weight_bytes(QWEN, parse_weights("fp4"), "cuda") + 86_805.5 * 48 * 2 * 4 * 72,
        "fp4",
        1 << 20,
    )
    assert "with weights fp4 olmoe-1b-7b would fit" in refusal(10e9, "fp4", 1024)
    assert "none of the named shapes would fit" in refusal(1e9, "fp4", 1024)


def test_the_message_says_what_is_needed_and_free() -> None:
    message = refusal(40e9, "native", 1024)
    assert "61.1 GB of weights and 101 MB of KV cache for 1,024 tokens, 40 GB are free" in message


def test_a_checkpoint_is_refused_before_it_is_read() -> None:
    opened = subject.checkpoint(shipped_model())
    with (
        patch.object(subject, "free_memory", lambda device: 1e6),
        pytest.raises(OutOfMemory, match=r"storyteller: [\d.]+ MB of weights and .* 1 MB are free"),
    ):
        check_subject(opened, {}, BF16, 16, "cpu")


def test_windows_are_not_measured_on_a_gpu() -> None:
    with pytest.raises(UnsupportedModel, match=r"kv_cache fp4\+ has no GPU kernel yet"):
        check_subject(QWEN, {}, KVCacheConfig.parse("fp4+"), 16, "cuda")


def test_copies_in_windows_need_memory() -> None:
    """48 layers of 4 KV heads of 128: (64 + 8) x 2 bytes a token and head, and in bf16 256 x 2 of
    16 + 128 + 1 tokens a sequence."""
    pages, copies = 1024 * 48 * 4 * 144, 145 * 48 * 4 * 512
    weights = weight_bytes(QWEN, parse_weights("fp4"), "cpu")
    given = QWEN, parse_weights("fp4"), KVCacheConfig.parse("fp4+"), 1024, "cpu"
    with patch.object(subject, "free_memory", lambda device: weights + pages + 3 * copies):
        check_subject(*given, sequences=3)
        with pytest.raises(OutOfMemory):
            check_subject(*given, sequences=4)


def test_a_format_that_cannot_hold_a_matrix() -> None:
    raw = QWEN.raw | {"moe_intermediate_size": 40}
    odd = subject.from_config(raw, "odd")
    with pytest.raises(ValueError, match=r"layers.0.down_proj \[128, 2048, 40\] cannot be fp4"):
        check_subject(odd, parse_weights("fp4"), BF16, 1024, "cpu")


def test_random_weights_are_those_of_the_model(tiny_shape: None) -> None:
    tiny = named_shape("tiny")
    weights = weights_of(tiny, parse_weights("fp4"), "cpu", quiet=True)
    assert weights.keys() == {p.name for p in tiny.parameters}
    gate_up = weights["layers.1.gate_up_proj"]
    assert (gate_up.format, gate_up.shape) == ("fp4", (8, 256, 256))
    assert (weights["embed_tokens"].format, weights["layers.0.router"].format) == ("bf16", "bf16")
    assert np.array_equal(gate_up.codes[0], gate_up.codes[7])
    assert not np.array_equal(gate_up.codes, weights["layers.0.gate_up_proj"].codes)
    rows = (weights["embed_tokens"].dequantize() ** 2).sum(axis=1)
    assert rows.mean() == pytest.approx(256, rel=0.05)


def test_recurrent_states_are_not_measured_on_a_gpu() -> None:
    model = subject.checkpoint(GOLDEN / "qwen3_next")
    with pytest.raises(UnsupportedModel, match="no decode kernel yet for linear attention"):
        check_subject(model, {}, BF16, 16, "cuda")
