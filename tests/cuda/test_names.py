"""A kernel's name says op and format, and the compiler takes it."""

from typing import Any

import numpy as np
import pytest

from npmoe.config import KVCacheConfig
from npmoe.kv.storage import KVCache
from npmoe.models.decode import KV_CODES, DecodeStep
from npmoe.models.stream import W_CODES
from npmoe.runtime.nvrtc import named_codes, symbol
from tests.cuda.nvrtc import compile_kernels, missing
from tests.cuda.steps import Shape, decode_on_cpu, empty_weights

REASON = missing()
SHAPE = Shape("small", 256, 1, 4, 2, 64, 8, 2, 128, 512)


def test_formats_follow_the_op() -> None:
    assert symbol("gate_up", {"HIDDEN": 128, "W_FORMAT": W_CODES["fp4"]}) == "gate_up_fp4"
    assert symbol("embed", {"K": 128}) == "embed"
    keys = {"V_FORMAT": KV_CODES["fp4"], "K_FORMAT": KV_CODES["bf16"]}
    assert symbol("attention", keys) == "attention_bf16_fp4"
    assert symbol("attention", keys | {"K_FORMAT": KV_CODES["fp4"]}) == "attention_fp4"


def test_named_codes_are_numbers() -> None:
    codes = named_codes({"a": 0, "b": 7})
    assert (codes["b"], f"{codes['b']}") == (7, "7")
    assert codes["a"] == 0
    assert hash(codes["b"]) == hash(7)


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
@pytest.mark.parametrize(("weights", "kv"), [("fp4", ("bf16", "fp4")), ("bf16", "fp4")])
def test_kernels_compile_under_their_names(weights: str, kv: str | tuple[str, str]) -> None:
    asked: list[tuple[str, str, dict[str, int]]] = []

    def kernel(stem: str, name: str, **macros: int) -> Any:
        asked.append((stem, name, macros))

    cache = KVCache(1, 2, 16, SHAPE.kv_heads, SHAPE.head_dim, KVCacheConfig.parse(kv))
    with decode_on_cpu(kernel, lambda *_, **__: None, bulk=True, multiprocessors=132):
        table = np.zeros((1, 2), np.int32)
        DecodeStep(SHAPE.spec(), empty_weights(SHAPE, weights), cache.layers, table).enqueue()
    names = set()
    for stem, name, macros in asked:
        renamed = symbol(name, macros)
        options: dict[str, Any] = macros | ({name: renamed} if renamed != name else {})
        assert renamed in compile_kernels(stem, "sm_90a", options)
        names.add(renamed)
    kv_name = "bf16_fp4" if isinstance(kv, tuple) else kv
    plain = {f"{op}_{weights}" for op in ("qkv", "output", "gate_up", "down", "lm_head")}
    assert names == plain | {"embed", "route", f"attention_{kv_name}"}
