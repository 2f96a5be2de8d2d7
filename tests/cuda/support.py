"""What the kernel tests share: memory that notices stray writes, weights, runs of many seeds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from npmoe.dtypes import Array
from npmoe.formats.fragments import COLUMNS, RECORD_BYTES, ROWS, to_fragments
from npmoe.formats.quant_tensor import QuantTensor, quantize
from npmoe.models import stream
from npmoe.models.stream import W_CODES
from npmoe.ops.norm import rms_norm_ref
from tests.cuda.build import SANITIZE, Kernel, kernel, launch

SEEDS = (0, 1, 2)
SHARED_BYTES = 227 << 10
TOLERANCE = 3e-5
"""Largest error of a product over the largest result: two bf16 to an activation."""

ALIGNMENT = 64
GUARD_BYTES = 0 if SANITIZE else 256  # AddressSanitizer has guards of its own
GUARD, POISON = 0xA5, 0xFF  # POISON is a NaN in every float format


class Memory:
    """Arrays for a kernel, each between guard bytes; `check` tells what was written beside them."""

    def __init__(self) -> None:
        self._blocks: list[tuple[np.ndarray, Array, Array | None]] = []

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, Array]:
        size = int(np.prod(shape)) * dtype.itemsize
        block = np.full(size + 2 * GUARD_BYTES + (ALIGNMENT if GUARD_BYTES else 0), GUARD, np.uint8)
        start = GUARD_BYTES
        if GUARD_BYTES:
            start += -(block.ctypes.data + GUARD_BYTES) % ALIGNMENT
        array = block[start : start + size].view(dtype).reshape(shape)
        block[start : start + size] = POISON
        return block, array

    def read_only(self, a: Array) -> Array:
        """A copy of `a` that a kernel may only read."""
        block, array = self._allocate(a.shape, a.dtype)
        array[...] = a
        self._blocks.append((block, array, array.copy()))
        return array

    def writable(self, a: Array) -> Array:
        """A copy of `a` that a kernel may change."""
        block, array = self._allocate(a.shape, a.dtype)
        array[...] = a
        self._blocks.append((block, array, None))
        return array

    def output(self, *shape: int, dtype: type = np.float32) -> Array:
        """An array of NaN."""
        block, array = self._allocate(shape, np.dtype(dtype))
        self._blocks.append((block, array, None))
        return array

    def check(self) -> None:
        for block, array, before in self._blocks:
            what = f"an array {array.shape} {array.dtype}"
            start = array.ctypes.data - block.ctypes.data
            guards = np.concatenate([block[:start], block[start + array.nbytes :]])
            assert (guards == GUARD).all(), f"a write beside {what}"
            if before is not None:
                assert same_bits(array, before), f"a write into {what} that is only read"


def same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def run_all_orders(run: Callable[[Memory, int], tuple[Array, ...]]) -> tuple[Array, ...]:
    """What `run(memory, seed)` returns: asserts the same bits for every order of threads."""
    first: tuple[Array, ...] = ()
    for seed in SEEDS:
        memory = Memory()
        results = run(memory, seed)
        memory.check()
        if seed == SEEDS[0]:
            first = results
        for a, b in zip(first, results, strict=True):
            assert same_bits(a, b), f"seed {seed} gives other bits: a race"
    return first


def weight(rng: np.random.Generator, fmt: str, *shape: int) -> QuantTensor:
    """A random weight of rows of norm 1 or so, in "rows" layout."""
    return quantize((rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32), fmt)


def activations(rng: np.random.Generator, *shape: int) -> Array:
    """Random activations with a few outliers and a stretch of zeros, as residual streams have."""
    x = rng.standard_normal(shape).astype(np.float32)
    flat = x.reshape(-1)
    flat[rng.integers(0, flat.size, 1 + flat.size // 200)] *= 100
    x[..., : shape[-1] // 16] = 0
    return x


def norm_of_some(x: Array, norm: Array, eps: float, size: int) -> Array:
    """RMS norm over the first `size` columns; zeros in the others."""
    some = rms_norm_ref(x[:, :size], norm[:size], eps)
    return np.pad(some, ((0, 0), (0, x.shape[1] - size)))


def codes(w: QuantTensor) -> Array:
    """The records of a weight in the kernels' layout."""
    return to_fragments(w).codes


@dataclass(frozen=True)
class Streaming:
    """A kernel on stream_tiles of gemv.cuh, and how it is launched."""

    kernel: Kernel
    threads: int
    shared: int

    def __call__(self, grid: tuple[int, ...], *arguments: Any, seed: int) -> None:
        launch(self.kernel, grid, self.threads, *arguments, shared=self.shared, seed=seed)


def streaming(
    stem: str,
    name: str,
    fmt: str,
    columns: int,
    tiles: int,
    rows: int,
    ring: int,
    stacked: int = 1,
    tokens: int = 1,
    **macros: int,
) -> Streaming:
    """A kernel of cuda_src/<stem>.cu, launched as the decode step would.

    columns: of each of the `stacked` matrices side by side; `tiles` row tiles a block at most, in
    pairs only where `rows` are pairs of tiles.
    Chunks are of 4 records at most; ring: how many fit the ring (few, so that it wraps round in
    small cases; at least two), 0 for a GPU without bulk copies.
    """
    chunk_bytes = 4 * RECORD_BYTES[fmt]
    changed = {
        "CHUNK_BYTES": chunk_bytes,
        "NARROW_CHUNK_BYTES": chunk_bytes,
        "RING_BYTES": ring * (chunk_bytes + 16),
    }
    odd = -(-rows // ROWS) % 2 == 1
    tiles += odd and tiles % 2 == 0
    with patch.multiple(stream, **changed):
        fitted = stream.Stream.fit(
            *(fmt, columns // COLUMNS, stacked, tokens, tiles, 1), ring > 0, SHARED_BYTES
        )
    macros |= {"W_FORMAT": W_CODES[fmt]} | fitted.macros()
    return Streaming(kernel(stem, name, **macros), fitted.threads, fitted.shared)
