"""A model small enough for kernels that g++ built, and measurements of few steps."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from npmoe.bench import bandwidth, check, kernels, on_gpu, shapes, timing
from tests.cuda.build import missing
from tests.cuda.fake_gpu import FakeGPU, fake_gpu

TINY: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rope_theta": 1e4,
    "max_position_embeddings": 1024,
}
"""Sizes as in its own small copy, so that both take the same kernels."""


@pytest.fixture
def tiny_shape() -> Iterator[None]:
    """The shape "tiny", and measurements without warm-up."""
    with (
        patch.dict(shapes.SHAPES, {"tiny": TINY}),
        patch.multiple(timing, WARM_UP_SECONDS=0.0, CPU_SECONDS=0.0, REPLAYS=2),
        patch.multiple(bandwidth, CPU_BYTES=1 << 16, GPU_BYTES=1 << 20, GPU_RUNS=1),
    ):
        yield


@pytest.fixture
def gpu(tiny_shape: None) -> Iterator[FakeGPU]:
    """A GPU made of g++, and the shape."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with (
        patch.multiple(on_gpu, GAP_PROMPT=2, GAP_WARM_UP=1, GAP_STEPS=3, PROMPT=9),
        patch.multiple(check, PROMPT=6, STEPS=3),
        patch.multiple(kernels, FLUSH_BYTES=16, REPLAYS=1),
        fake_gpu() as fake,
    ):
        yield fake
