"""Named shapes are the models they say, and small copies keep what decides which code runs."""

import math

import pytest

from npmoe.bench.shapes import SHAPES, small_copy
from npmoe.bench.subject import check_subject, from_config, named_shape
from npmoe.config import KVCacheConfig, parse_weights
from npmoe.errors import UnsupportedModel
from npmoe.models.specs import ExpertSpec

KV = KVCacheConfig()


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("seed-67b", 66.8, 10.4),
        ("mixtral-8x7b", 46.7, 12.9),
        ("gpt-oss-20b", 20.9, 4.2),
        ("olmoe-1b-7b", 6.9, 1.3),
    ],
)
def test_parameters(name: str, billions: float, active: float) -> None:
    """As model cards say, with the embedding counted as active."""
    subject = named_shape(name)
    mlp = subject.spec.layers[0].mlp
    assert isinstance(mlp, ExpertSpec)
    share = mlp.router.top_k / mlp.router.num_experts
    sizes = [(math.prod(p.shape), share if p.stacked else 1) for p in subject.parameters]
    assert sum(n for n, _ in sizes) / 1e9 == pytest.approx(billions, abs=0.06)
    assert sum(n * s for n, s in sizes) / 1e9 == pytest.approx(active, abs=0.06)


@pytest.mark.parametrize("name", SHAPES)
def test_a_small_copy(name: str) -> None:
    whole, small = SHAPES[name], small_copy(SHAPES[name])
    a = named_shape(name).spec
    b = from_config(small, "small").spec
    for x, y in zip(a.layers[:2], b.layers, strict=True):
        heads, few = x.attention, y.attention
        assert heads.num_heads // heads.num_kv_heads == few.num_heads // few.num_kv_heads
        assert (heads.head_dim, heads.qk_norm, heads.sinks) == (
            *(few.head_dim, few.qk_norm, few.sinks),
        )
        assert few.window == (None if heads.window is None else 24)  # of 50 tokens and more
        assert isinstance(x.mlp, ExpertSpec)
        assert isinstance(y.mlp, ExpertSpec)
        assert (x.mlp.router, x.mlp.activation) == (y.mlp.router, y.mlp.activation)
        assert few.num_heads * few.head_dim % 128 == 0
    assert small["hidden_size"] < whole["hidden_size"]


@pytest.mark.parametrize(("window", "expected"), [(4096, 24), (8, 8), (None, None)])
def test_the_window_of_a_small_copy(window: int | None, expected: int | None) -> None:
    raw = SHAPES["mixtral-8x7b"] | {"sliding_window": window}
    assert small_copy(raw)["sliding_window"] == expected
    assert "sliding_window" not in small_copy(SHAPES["mixtral-8x7b"])


def test_a_small_copy_of_lists_by_layer() -> None:
    raw = SHAPES["qwen3-30b-a3b"] | {"mlp_only_layers": [0, 7], "layer_types": ["x"] * 48}
    assert len(from_config(small_copy(raw), "small").spec.layers) == 2


def test_a_small_copy_fills_a_part_of_the_columns_where_the_shape_does() -> None:
    copy = small_copy(SHAPES["gpt-oss-20b"])
    assert (copy["hidden_size"] % 128, copy["intermediate_size"] % 128) == (64, 64)


def test_formats_without_kernels() -> None:
    with pytest.raises(UnsupportedModel, match="int8"):
        check_subject(named_shape("seed-67b"), parse_weights("int8"), KV, 1024, "cuda")


def test_an_unknown_shape() -> None:
    with pytest.raises(ValueError, match=r"shape = 'x': legal shapes are qwen3-30b-a3b, "):
        named_shape("x")
