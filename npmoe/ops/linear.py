"""y = x W^T + b with W in any format.

`linear_ref` is the definition. On the CPU a prepared weight (`prepare_linear`) lies in tiles of 64
rows, so that the innermost loop runs over rows and vectorises without a horizontal sum; 4-bit codes
become int8 there, still exact: 1 + 2 / 32 bytes a weight.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from npmoe.dtypes import Array
from npmoe.formats.floats import FP16_VALUES
from npmoe.formats.groups import unpack_nibbles
from npmoe.formats.minifloat import E2M1_VALUES, E4M3_VALUES, E8M0_VALUES
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.runtime.device import jit, parallel_ranges

TILE_ROWS = 64
TILES = f"tiles{TILE_ROWS}"
FEW_TOKENS = 8
"""Up to this many tokens each token takes its own pass (one result whoever is in the batch)."""

SUM_COLUMNS = 32
"""Columns that one run of a float32 sum takes, token by token; short runs round less."""
PRODUCT_COLUMNS = 128
"""The same for the matrix product of many tokens."""

# A float code becomes a float32 by one shift and one mask: the code's exponent lands in float32's
# exponent field, and the difference of the biases is a power of two. Half of it multiplies the
# activations and half the sum, so that neither leaves float32's normal range.
_FLOAT_CODES = {
    "bf16": (16, 0xFFFFFFFF, 1.0),
    "fp16": (13, 0x8FFFE000, 2.0**56),
    "fp8": (20, 0x87F00000, 2.0**60),
}


def linear_ref(x: Array, w: QuantTensor, bias: Array | None = None) -> Array:
    """The definition. x float32 `[T, K]`, w `[N, K]`, bias `[N]` -> float32 `[T, N]`."""
    y = x @ w.dequantize().T
    return y if bias is None else y + bias


def linear(x: Array, w: QuantTensor, bias: Array | None = None, expert: int | None = None) -> Array:
    """x float32 `[T, K]` times w `[N, K]` (or w[expert] of `[E, N, K]`) -> float32 `[T, N]`."""
    assert x.shape[1] == w.shape[-1], f"{x.shape[1]} activations for {w.shape[-1]} columns"
    if w.layout != TILES:
        w = w if expert is None else w[expert]
        if x.shape[0] > FEW_TOKENS:
            y = _short_sums(x, w.dequantize().T)
        else:  # a product for each token: BLAS adds up in another order for several
            y = np.matmul(w.dequantize(), x[:, :, None])[..., 0]
        return y if bias is None else y + bias
    y = np.empty((x.shape[0], w.codes.shape[-3] * TILE_ROWS), np.float32)
    codes = w.codes if expert is None else w.codes[expert]
    scales = w.scales if expert is None else w.scales[expert]
    arguments = _kernel_arguments(w, expert)
    tiles = codes.shape[0]
    if x.shape[0] <= FEW_TOKENS:
        x = np.ascontiguousarray(x, np.float32)
        kernel = _float_tiles if w.format in _FLOAT_CODES else _int8_tiles
        parallel_ranges(
            tiles, codes.size, lambda a, b: kernel(x, codes, scales, *arguments, y, a, b)
        )
    else:
        decode = _decode_float_tiles if w.format in _FLOAT_CODES else _decode_int8_tiles
        step = max(1, (1 << 22) // (codes.shape[1] * TILE_ROWS))
        for first in range(0, tiles, step):
            last = min(first + step, tiles)
            block = np.empty((last - first, *codes.shape[1:]), np.float32)
            decode(codes[first:last], scales[first:last], *arguments, block)
            part = _short_sums(x, block)  # [tiles, T, 64]
            span = slice(first * TILE_ROWS, last * TILE_ROWS)
            y[:, span] = part.transpose(1, 0, 2).reshape(x.shape[0], -1)
    y = y[:, : w.shape[-2]]
    if w.has_row_globals:
        y = y * (w.global_scale if expert is None else w.global_scale[expert])
    if bias is not None:
        y = y + bias
    return y


def decoded(w: QuantTensor) -> Array:
    """A weight `[N, K]`, prepared or not, as float32."""
    if w.layout != TILES:
        return w.dequantize()
    decode = _decode_float_tiles if w.format in _FLOAT_CODES else _decode_int8_tiles
    arguments, block = _kernel_arguments(w, None), np.empty(w.codes.shape, np.float32)

    def run(first: int, last: int) -> None:
        decode(w.codes[first:last], w.scales[first:last], *arguments, block[first:last])

    parallel_ranges(len(block), block.size, run)
    return np.swapaxes(block, 1, 2).reshape(-1, block.shape[1])[: w.shape[0]]


def _short_sums(x: np.ndarray, block: np.ndarray) -> np.ndarray:
    """x `[T, K]` times block `[..., K, N]` -> `[..., T, N]`, summed in runs of PRODUCT_COLUMNS: a
    float32 sum over all of K would lose a bit or two more."""
    total = np.matmul(x[:, :PRODUCT_COLUMNS], block[..., :PRODUCT_COLUMNS, :])
    for start in range(PRODUCT_COLUMNS, x.shape[1], PRODUCT_COLUMNS):
        run = slice(start, start + PRODUCT_COLUMNS)
        total += np.matmul(x[:, run], block[..., run, :])
    return total


def prepare_linear(w: QuantTensor) -> QuantTensor:
    """A weight in "rows" layout as CPU tiles; the same values. fp32 stays as it is, and so do a
    width or a group that is not a multiple of 4 (32 for fp8 groups), which no model has. Integers
    whose scales fp16 cannot hold become bf16 codes, which hold them, with float32 scales.

    codes int8 or int16 `[..., ceil(N / 64), K, 64]`; scales `[..., ceil(N / 64), G, 64]`: fp16 bits
    as uint16, raw uint8 (E8M0, E4M3) or float32 (float codes, G = 1 or the number of blocks).
    """
    is_exact = w.format.startswith("int") and w.scales.dtype == np.float32
    unit = SUM_COLUMNS if is_exact or w.format in _FLOAT_CODES else 4
    grouped = w.scales is not None and w.block[1] < w.shape[-1]
    if w.format == "fp32" or w.shape[-1] % 4 or (grouped and w.block[1] % unit):
        return w
    if is_exact:
        integers = _integer_codes(w).astype(np.float32).view(np.uint32) >> 16
        w = replace(w, format="bf16", codes=integers.astype(np.uint16), zeros=None)
    rows = w.shape[-2]
    if w.format in ("bf16", "fp16"):
        codes, scales = w.codes.view(np.int16), w.scales
        if scales is None:
            scales = np.ones((*w.shape[:-1], 1), np.float32)
    elif w.format == "fp8":
        codes, scales = w.codes.view(np.int8), w.scales.astype(np.float32)
        scales = np.repeat(scales, w.block[0], axis=-2)[..., :rows, :]
    else:
        codes = _integer_codes(w)
        scales = w.scales.view(np.uint16) if w.scales.dtype == np.float16 else w.scales
    return replace(w, codes=_tile(codes), scales=_tile(scales), zeros=None, layout=TILES)


def _integer_codes(w: QuantTensor) -> np.ndarray:
    """The codes of an integer or E2M1 format as int8 `[..., N, K]`; E2M1 values are doubled."""
    if w.format == "int8":
        return w.codes.view(np.int8)
    nibbles = unpack_nibbles(w.codes)
    if w.format == "int4":
        return nibbles.view(np.int8) - np.int8(8)
    if w.format == "int4_asym":
        return nibbles.view(np.int8) - np.repeat(w.zeros.view(np.int8), w.block[1], axis=-1)
    return (E2M1_VALUES * 2).astype(np.int8)[nibbles]


def _tile(a: np.ndarray) -> np.ndarray:
    """`[..., N, C]` -> `[..., ceil(N / 64), C, 64]`, padded with zeros."""
    *lead, rows, columns = a.shape
    padding = -rows % TILE_ROWS
    if padding:
        a = np.concatenate([a, np.zeros((*lead, padding, columns), a.dtype)], axis=-2)
    tiles = a.reshape(*lead, (rows + padding) // TILE_ROWS, TILE_ROWS, columns)
    return np.ascontiguousarray(np.swapaxes(tiles, -1, -2))


def _kernel_arguments(w: QuantTensor, expert: int | None) -> tuple[Any, ...]:
    """What a tile kernel needs besides codes and scales."""
    if w.format in _FLOAT_CODES:
        shift, mask, half = _FLOAT_CODES[w.format]
        group = w.block[1] if w.block[1] > 1 else w.shape[-1]
        return np.int32(shift), np.uint32(mask).view(np.int32), np.float32(half), np.int64(group)
    factor = np.float32(0.5 if w.format in ("fp4", "mxfp4", "nvfp4") else 1.0)
    if w.format == "nvfp4" and not w.has_row_globals:
        factor *= w.global_scale if expert is None else w.global_scale[expert]
    table = {"mxfp4": E8M0_VALUES, "nvfp4": E4M3_VALUES}.get(w.format, FP16_VALUES)
    return table, np.float32(factor)


@jit
def _int8_tiles(x, codes, scales, table, factor, y, first, last):  # type: ignore[no-untyped-def]
    """x [T, K], codes int8 [tiles, K, 64], scales (table indices) [tiles, G, 64] -> y [T, N]."""
    num_tokens, (_, columns, rows), groups = x.shape[0], codes.shape, scales.shape[1]
    group = columns // groups
    part = np.empty(rows, np.float32)
    total = np.empty(rows, np.float32)
    for tile in range(first, last):
        for t in range(num_tokens):
            total[:] = 0
            for g in range(groups):
                part[:] = 0
                for k in range(g * group, (g + 1) * group, 4):
                    x0, x1, x2, x3 = x[t, k], x[t, k + 1], x[t, k + 2], x[t, k + 3]
                    for r in range(rows):
                        part[r] += (
                            x0 * np.float32(codes[tile, k, r])
                            + x1 * np.float32(codes[tile, k + 1, r])
                        ) + (
                            x2 * np.float32(codes[tile, k + 2, r])
                            + x3 * np.float32(codes[tile, k + 3, r])
                        )
                for r in range(rows):
                    total[r] += part[r] * (table[scales[tile, g, r]] * factor)
            y[t, tile * rows : (tile + 1) * rows] = total


@jit
def _float_tiles(x, codes, scales, shift, mask, half, group, y, first, last):  # type: ignore[no-untyped-def]
    """x [T, K], codes int16 or int8 [tiles, K, 64], scales float32 [tiles, G, 64] -> y [T, N]."""
    num_tokens, (_, columns, rows) = x.shape[0], codes.shape
    part = np.empty(rows, np.float32)
    total = np.empty(rows, np.float32)
    for tile in range(first, last):
        for t in range(num_tokens):
            total[:] = 0
            for start in range(0, columns, SUM_COLUMNS):  # short sums: less rounding
                part[:] = 0
                stop = min(start + SUM_COLUMNS, columns)
                for k in range(start, stop, 2):
                    x0, x1 = x[t, k] * half, x[t, k + 1] * half
                    for r in range(rows):
                        w0 = np.int32((np.int32(codes[tile, k, r]) << shift) & mask)
                        w1 = np.int32((np.int32(codes[tile, k + 1, r]) << shift) & mask)
                        part[r] += x0 * w0.view(np.float32) + x1 * w1.view(np.float32)
                for r in range(rows):
                    total[r] += part[r] * half * scales[tile, start // group, r]
            y[t, tile * rows : (tile + 1) * rows] = total


@jit
def _decode_int8_tiles(codes, scales, table, factor, out):  # type: ignore[no-untyped-def]
    """codes int8 [tiles, K, 64], scales [tiles, G, 64] -> out float32 [tiles, K, 64]."""
    tiles, columns, rows = codes.shape
    group = columns // scales.shape[1]
    for tile in range(tiles):
        for k in range(columns):
            for r in range(rows):
                scale = table[scales[tile, k // group, r]] * factor
                out[tile, k, r] = np.float32(codes[tile, k, r]) * scale


@jit
def _decode_float_tiles(codes, scales, shift, mask, half, group, out):  # type: ignore[no-untyped-def]
    """codes int16 or int8 [tiles, K, 64], scales [tiles, G, 64] -> out float32 [tiles, K, 64]."""
    tiles, columns, rows = codes.shape
    for tile in range(tiles):
        for k in range(columns):
            for r in range(rows):
                bits = np.int32((np.int32(codes[tile, k, r]) << shift) & mask)
                value = bits.view(np.float32) * half * half
                out[tile, k, r] = value * scales[tile, k // group, r]
