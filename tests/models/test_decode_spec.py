"""What the decode kernels do not know is refused by name, from the spec alone."""

from dataclasses import replace
from typing import Any

import pytest

from npmoe.config import RopeConfig
from npmoe.errors import UnsupportedModel
from npmoe.models.decode_spec import check_decode_spec
from npmoe.models.families import read_model
from npmoe.models.specs import (
    AttentionSpec,
    ExpertSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    RouterSpec,
    SharedSpec,
)
from npmoe.ops.experts import SwiGLU
from npmoe.ops.route import TopKRule
from tests.golden.golden_cases import CASES

ATTENTION = AttentionSpec(8, 2, 64, 0.125)
ROUTER = RouterSpec(8, 2, True)
EXPERTS = ExpertSpec(ROUTER, 128)
SIGMOID = TopKRule("sigmoid")


def model(attention: AttentionSpec = ATTENTION, mlp: Any = EXPERTS) -> ModelSpec:
    """Two layers; only the second is as asked for."""
    layers = LayerSpec(ATTENTION, EXPERTS), LayerSpec(attention, mlp)
    return ModelSpec(128, 300, 1e-6, RopeConfig(), 256, layers, tied=False)


def test_what_the_kernels_know() -> None:
    check_decode_spec(model(replace(ATTENTION, qk_norm="head", qkv_bias=True, output_bias=True)))
    check_decode_spec(model(replace(ATTENTION, qk_norm="projection", clip=1.0)))
    check_decode_spec(model(replace(ATTENTION, window=128, sinks=True)))
    check_decode_spec(model(mlp=replace(EXPERTS, bias=True, activation=SwiGLU(1.702, 7.0, 1.0))))
    check_decode_spec(model(mlp=replace(EXPERTS, router=replace(ROUTER, bias=True))))
    check_decode_spec(replace(model(), hidden_size=2880))
    check_decode_spec(read_model(CASES["gpt_oss"], "config.json")[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"output_gate": True}, "attention with an output gate"),
        ({"qk_norm": "head", "clip": 1.0}, "q, k and v clipped after a norm of each head"),
        ({"interleaved": True}, "interleaved rotary"),
        ({"qk_norm": "rotated"}, "a q/k norm after rotary"),
        ({"head_dim": 96}, "head_dim 96"),
        ({"num_heads": 34}, "more than 16 query heads"),
        ({"num_heads": 33, "num_kv_heads": 3}, "heads of 33 x 64"),
        ({"num_heads": 34, "num_kv_heads": 17}, "heads of 34 x 64"),  # read 256 columns at a time
    ],
)
def test_attention(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"no decode kernel yet for {words}"):
        check_decode_spec(model(attention=replace(ATTENTION, **change)))


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_latent_attention(name: str) -> None:
    _, spec, _ = read_model(CASES[name], "config.json")
    with pytest.raises(UnsupportedModel, match="kernel yet for multi-head latent attention"):
        check_decode_spec(spec)


@pytest.mark.parametrize(
    ("mlp", "words"),
    [
        (MLPSpec(128), "a dense MLP"),
        (replace(EXPERTS, router=replace(ROUTER, selection_bias=True)), "a selection bias"),
        (replace(EXPERTS, router=replace(ROUTER, rule=SIGMOID)), "experts chosen by TopKRule"),
        (replace(EXPERTS, shared=SharedSpec(64)), "shared experts"),
    ],
)
def test_mlp(mlp: Any, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"no decode kernel yet for {words}"):
        check_decode_spec(model(mlp=mlp))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"embedding_scale": 2.0}, "scaled embeddings or logits"),
        ({"logits_scale": 0.5}, "scaled embeddings or logits"),
        ({"layer_norm": True}, "a layer norm or a bias before the logits"),
        ({"head_bias": True}, "a layer norm or a bias before the logits"),
        ({"layers": (LayerSpec(ATTENTION, EXPERTS, residual_scale=0.5),)}, "a scaled residual"),
        ({"layers": (LayerSpec(ATTENTION, EXPERTS, norm="after"),)}, "norm = 'after'"),
    ],
)
def test_scales_and_norms(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"no decode kernel yet for {words}"):
        check_decode_spec(replace(model(), **change))


@pytest.mark.parametrize(
    "name",
    [
        *("dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "gpt_oss_v5", "granitemoe"),
        *("granitemoeshared", "hunyuan_v1_moe", "minimax_m2", "mistral", "phimoe"),
        *("qwen2", "qwen2_moe"),
    ],
)
def test_families_without_kernels(name: str) -> None:
    with pytest.raises(UnsupportedModel, match="use device='cpu'"):
        check_decode_spec(read_model(CASES[name], "config.json")[1])
