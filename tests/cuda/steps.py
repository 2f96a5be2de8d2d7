"""The decode step without a GPU: which kernels it launches, and how, or running them on the CPU."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from npmoe.config import KVCacheConfig, RopeConfig
from npmoe.formats.fragments import COLUMNS, RECORD_BYTES, ROWS, padded
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.kv.storage import KVCache
from npmoe.models import decode, grouped
from npmoe.models.specs import AttentionSpec, ExpertSpec, LayerSpec, ModelSpec, RouterSpec
from npmoe.ops import sampler


@dataclass(frozen=True)
class Shape:
    """Sizes of a mixture-of-experts model."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    width: int
    vocab: int
    renormalize: bool = True
    qk_norm: str = "head"

    def spec(self) -> ModelSpec:
        attention = AttentionSpec(
            *(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5), qk_norm=self.qk_norm
        )
        router = RouterSpec(self.experts, self.top_k, self.renormalize)
        layer = LayerSpec(attention, ExpertSpec(router, self.width))
        rope = RopeConfig(rope_theta=1e6)
        layers = (layer,) * self.layers
        return ModelSpec(self.hidden, self.vocab, 1e-6, rope, 1 << 15, layers, False)


class NumPyAsCuPy:
    """What the decode step takes from CuPy, from NumPy, on a GPU of this size."""

    def __init__(self, multiprocessors: int, shared_bytes: int) -> None:
        sizes = {
            "MultiProcessorCount": multiprocessors,
            "MaxSharedMemoryPerBlockOptin": shared_bytes,
        }
        device = SimpleNamespace(attributes=sizes)
        self.cuda = SimpleNamespace(Device=lambda: device)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


@contextmanager
def decode_on_cpu(
    kernel: Any, launch: Any, bulk: bool, multiprocessors: int, shared_bytes: int = 227 << 10
) -> Iterator[None]:
    """The decode step, its grouped experts and its sampler, with these in place of the GPU's."""
    replaced = {"kernel": kernel, "launch": launch, "bulk": lambda: bulk}
    replaced["cupy"] = lambda: NumPyAsCuPy(multiprocessors, shared_bytes)
    with ExitStack() as stack:
        for module in (decode, grouped, sampler):
            here = {name: value for name, value in replaced.items() if hasattr(module, name)}
            stack.enter_context(patch.multiple(module, **here))
        yield


@dataclass(frozen=True)
class Specialised:
    """A kernel that was asked for."""

    stem: str
    name: str
    macros: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Launch:
    """A launch of it: `shared` is dynamic shared memory."""

    kernel: Specialised
    grid: tuple[int, ...]
    threads: int
    shared: int


def launches(
    shape: Shape,
    weights: str,
    kv: str | tuple[str, str],
    seqs: int,
    bulk: bool,
    multiprocessors: int,
    shared_bytes: int,
) -> list[Launch]:
    """What a step launches for two layers of the shape, from embedding to sampler: for short
    contexts, then for long ones."""
    seen: list[Launch] = []

    def kernel(stem: str, name: str, **macros: int) -> Specialised:
        return Specialised(stem, name, tuple(sorted((k, int(v)) for k, v in macros.items())))

    def launch(
        kernel: Specialised,
        grid: tuple[int, ...],
        threads: int,
        *_: Any,
        shared: int = 0,
        **__: Any,
    ) -> None:
        seen.append(Launch(kernel, grid, threads, shared))

    shape = replace(shape, layers=2)
    spec = shape.spec()
    cache = KVCache(2, 2, 64, shape.kv_heads, shape.head_dim, KVCacheConfig.parse(kv))
    table = np.zeros((seqs, 2), np.int32)
    with decode_on_cpu(kernel, launch, bulk, multiprocessors, shared_bytes):
        w = empty_weights(shape, weights)
        step = decode.DecodeStep(spec, w, cache.layers, table, sampled=True)
        step.enqueue()
        step.for_context(decode.LONG_CONTEXT).enqueue()
    return seen


def empty_weights(shape: Shape, fmt: str) -> dict[str, Any]:
    """Weights that take no memory."""

    def matrix(rows: int, columns: int, *lead: int) -> QuantTensor:
        grid = (*lead, -(-rows // ROWS), padded(columns) // COLUMNS, RECORD_BYTES[fmt])
        records = np.broadcast_to(np.uint8(0), grid)
        return QuantTensor(fmt, (*lead, rows, padded(columns)), records, layout="fragments")

    s = shape
    rows = (s.heads + 2 * s.kv_heads) * s.head_dim
    w = {"embed_tokens": None, "norm": None, "lm_head": matrix(s.vocab, s.hidden)}
    for i in range(s.layers):
        layer = f"layers.{i}."
        w[layer + "qkv_proj"] = matrix(rows, s.hidden)
        w[layer + "o_proj"] = matrix(padded(s.hidden), s.heads * s.head_dim)
        w[layer + "gate_up_proj"] = matrix(2 * padded(s.width), s.hidden, s.experts)
        w[layer + "down_proj"] = matrix(padded(s.hidden), s.width, s.experts)
    return w
