"""What a decode step must read: every array with the bytes of it that the step needs.

Experts count as far as the tokens of the batch choose them, if each token chooses at random and
by itself; the embedding counts a row a token; keys and values count to the end of the context, or
as far as a window sees, where copies at higher precision serve them in these; recurrent states
count whole. Padding that a layout adds does not count, nor do activations.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from npmoe.dtypes import Array
from npmoe.kv.states import RecurrentState
from npmoe.models.cache import ModelCache
from npmoe.models.conversion import format_bytes, running_bytes
from npmoe.models.parameters import ROUTER, TABLE, VECTOR, Parameter
from npmoe.models.specs import AttentionSpec, ExpertSpec, ModelSpec
from npmoe.ops.quantize import KVPages

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """Address of an array on its device -> the bytes of it that one step must read."""

    by_address: dict[int, float]

    @property
    def total(self) -> float:
        """Bytes of a step."""
        return sum(self.by_address.values())

    def of(self, arguments: Iterable[Any]) -> float:
        """Bytes that a kernel with these arguments must read."""
        arrays = [a for a in arguments if getattr(a, "shape", ()) and hasattr(a, "nbytes")]
        return sum(self.by_address.get(address(a), 0.0) for a in arrays if a.nbytes)


def address(a: Array) -> int:
    """Where an array begins in its device's memory."""
    return a.data.ptr if hasattr(a.data, "ptr") else a.ctypes.data


def step_traffic(
    spec: ModelSpec,
    parameters: list[Parameter],
    weights: dict[str, Any],
    cache: ModelCache,
    batch: int,
    context: int,
    device: str,
) -> Traffic:
    """Of one token each of `batch` sequences, the `context`-th of its sequence."""
    found: dict[int, float] = {}
    for p in parameters:
        w = weights[p.name]
        size = _matrix_bytes(p, w, device) * _share(spec, p, batch)
        found[address(w if p.part == VECTOR else getattr(w, "codes", w))] = size
    for layer, held in zip(spec.layers, cache.layers, strict=True):
        if isinstance(held, RecurrentState):
            for a in (held.conv, held.memory):
                found[address(a)] = batch * a.nbytes / len(a)
            continue
        window = layer.attention.window if isinstance(layer.attention, AttentionSpec) else None
        keys = np.arange(max(0, context - (window or context)), context)
        for pages in held:
            copied = 0
            if pages.copies is not None:
                copied = int(pages.copies.serves(np.array([context - 1]), keys).sum())
                copies = pages.copies.pages
                found[address(copies.codes)] = batch * copied * _token_bytes(copies)
            found[address(pages.codes)] = batch * (len(keys) - copied) * _token_bytes(pages)
    return Traffic(found)


def _token_bytes(pages: KVPages) -> float:
    return sum(a.nbytes for a in pages.arrays()) / (len(pages.codes) * pages.page_size)


def _matrix_bytes(p: Parameter, w: Any, device: str) -> float:
    """All bytes of a parameter; on the CPU 4-bit codes take a byte each."""
    if p.part == VECTOR:
        return math.prod(p.shape) * FLOAT32_BYTES
    if p.part in (TABLE, ROUTER) and device == "cuda":
        return math.prod(p.shape) * w.itemsize
    measure = running_bytes if device == "cpu" and p.part != TABLE else format_bytes
    return measure(w.format, p.shape)


def _share(spec: ModelSpec, p: Parameter, batch: int) -> float:
    """The part of a parameter that a step reads."""
    if p.part == TABLE:
        return batch / p.shape[0]
    if not p.stacked:
        return 1.0
    mlp = spec.layers[int(p.name.split(".")[1])].mlp
    assert isinstance(mlp, ExpertSpec)
    return 1 - (1 - mlp.router.top_k / mlp.router.num_experts) ** batch
