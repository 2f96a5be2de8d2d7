"""What the decode kernels cannot run is refused, with its name, before a GPU is touched."""

from dataclasses import replace

import pytest

from npmoe.config import KVCacheConfig, RopeConfig, parse_weights
from npmoe.errors import UnsupportedModel
from npmoe.models.gpu import check_gpu_support
from npmoe.models.specs import (
    AttentionSpec,
    ExpertSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    RouterSpec,
)

ATTENTION = AttentionSpec(4, 2, 64, 0.125, qk_norm="head")
EXPERTS = ExpertSpec(RouterSpec(64, 8, True), 192)
SPEC = ModelSpec(256, 1000, 1e-6, RopeConfig(), 4096, (LayerSpec(ATTENTION, EXPERTS),) * 2, False)
STORED = {"table": "bf16", "router": "bf16", "attention": "bf16", "experts": "fp4"}


def last_layer(attention: AttentionSpec = ATTENTION, mlp: MLPSpec | ExpertSpec = EXPERTS):
    return replace(SPEC, layers=(SPEC.layers[0], LayerSpec(attention, mlp)))


def check(
    spec: ModelSpec = SPEC, stored: dict[str, str] | None = None, weights="native", kv="bf16"
) -> None:
    policy = parse_weights(weights)
    check_gpu_support(spec, STORED | (stored or {}), policy, KVCacheConfig.parse(kv))


def test_what_has_kernels_passes() -> None:
    check()
    check(weights="fp4", kv=("bf16", "fp4"))
    check(stored={"attention": "mixed"}, weights="bf16")
    check(stored={"attention": "fp8", "experts": "mxfp4", "lm_head": "bf16"})
    check(weights={"experts": "nvfp4", "attention": "int4", "lm_head": "int4_asym"})
    check(kv=KVCacheConfig("bf16", "bf16", 16))
    check(kv="k8v4:rotated")
    check(last_layer(replace(ATTENTION, qk_norm="projection", clip=8.0)))
    check(last_layer(replace(ATTENTION, window=128, sinks=True)))
    check(kv=KVCacheConfig("int4_asym", "nvfp4", 16))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (replace(SPEC, rope=RopeConfig("longrope")), "longrope"),
        (replace(SPEC, rope=RopeConfig(partial_rotary_factor=0.5)), "part of each head"),
        (last_layer(mlp=MLPSpec(256)), "dense MLP"),
        (last_layer(mlp=ExpertSpec(RouterSpec(64, 33, True), 192)), "33 experts a token"),
        (last_layer(replace(ATTENTION, qk_norm="head", clip=8.0)), "clipped after a norm"),
        (last_layer(replace(ATTENTION, qk_norm="rotated")), "norm after rotary"),
        (last_layer(replace(ATTENTION, head_dim=96)), "head_dim 96"),
        (last_layer(replace(ATTENTION, num_heads=36)), "16 query heads"),
    ],
)
def test_layers_without_a_kernel(spec: ModelSpec, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{message}.*device='cpu'"):
        check(spec)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int8"}, "no GPU kernel reads int8 weights"),
        (
            {"stored": {"experts": "fp16"}},
            r"fp16 weights \(experts\); choose one of bf16, fp4, fp8",
        ),
        ({"stored": {"attention": "mixed"}}, "no GPU kernel reads mixed weights"),
        ({"stored": {"table": "fp32"}}, "reads a table in bf16, this checkpoint has fp32"),
        ({"kv": "fp32"}, "kv_cache fp32 has no GPU kernel; use one of bf16, fp4, .* fp8"),
        ({"kv": ("bf16", "fp32")}, "kv_cache fp32 has no GPU kernel"),
        ({"kv": "fp4+"}, r"kv_cache fp4\+ has no GPU kernel yet, since none reads windows"),
    ],
)
def test_formats_without_a_kernel(options: dict, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        check(**options)
