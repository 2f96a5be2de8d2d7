"""fp4: E2M1 codes (0, .5, 1, 1.5, 2, 3, 4, 6 and negatives), low nibble first, three scalings.

fp4: one fp16 scale per group. mxfp4: one E8M0 scale, a power of two, per 32 (OCP Microscaling
Formats v1.0). nvfp4: one E4M3 scale per 16 and one float32 scale per matrix. In the KV cache that
scale is 1, and groups of mxfp4 and nvfp4 are of its group_size.
fp16 and E4M3 scales are the better of amax / 6 and amax / 4 by squared error (amax / 6 on a tie):
the second leaves the gap between 4 and 6 unused. E8M0 takes the smallest power of two that holds
amax / 6, so nothing is clipped.
"""

from collections.abc import Callable

import numpy as np

from npmoe.dtypes import Array, array_namespace
from npmoe.formats.groups import Encoded, divide, fp16_scale, join, pack_nibbles, split
from npmoe.formats.groups import unpack_nibbles as _unpack
from npmoe.formats.minifloat import (
    E2M1,
    E2M1_VALUES,
    E4M3,
    E4M3_VALUES,
    E8M0_VALUES,
    decode_table,
)

NVFP4_MAX = 448 * 6
"""Largest value of an E2M1 code times an E4M3 scale."""


def _better_of_two(groups: Array, store: Callable[[Array], tuple[Array, Array]]) -> tuple:
    """Codes and stored scales of `[..., G, g]`; `store` gives (stored, float32) of a scale."""
    xp = array_namespace(groups)
    amax = xp.abs(groups).max(axis=-1)
    best = None
    for top in (6, 4):
        stored, scale = store(amax / xp.float32(top))
        codes = E2M1.encode(divide(groups, scale))
        loss = _fold(xp.square(decode_table(codes, E2M1_VALUES) * scale[..., None] - groups))
        if best is None:
            best = (codes, stored, loss)
        else:
            better = loss < best[2]
            codes = xp.where(better[..., None], codes, best[0])
            best = (codes, xp.where(better, stored, best[1]), loss)
    assert best is not None
    return best[0], best[1]


def _fold(x: Array) -> Array:
    """float32 sums over the last axis in the order in which a warp adds them: neighbours first,
    then the first half to the second until one is left. So a GPU gets the same bits."""
    if x.shape[-1] % 2 == 0:
        x = x[..., 0::2] + x[..., 1::2]
    while x.shape[-1] > 1 and x.shape[-1] % 2 == 0:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x.sum(axis=-1)


def encode_fp4(x: Array, group_size: int) -> Encoded:
    """float `[..., K]` -> codes uint8 `[..., K / 2]`, scales fp16 `[..., K / group_size]`."""
    xp = array_namespace(x)

    def store(scale: Array) -> tuple[Array, Array]:
        stored = fp16_scale(scale)
        return stored, stored.astype(xp.float32)

    codes, scales = _better_of_two(split(x, group_size), store)
    return Encoded(pack_nibbles(codes.reshape(x.shape)), scales)


def decode_fp4(encoded: Encoded) -> Array:
    """Encoded -> float32 `[..., K]`."""
    return join(decode_table(_unpack(encoded.codes), E2M1_VALUES), encoded.scales)


def encode_mxfp4(x: Array, group_size: int = 32) -> Encoded:
    """float `[..., K]` -> codes uint8 `[..., K / 2]`, scales E8M0 as uint8 `[..., K / g]`."""
    xp = array_namespace(x)
    groups = split(x, group_size)
    fraction, exponent = xp.frexp(xp.abs(groups).max(axis=-1) / xp.float32(6))
    exponent = xp.where(fraction == 0.5, exponent - 1, exponent)  # ceil(log2(amax / 6))
    stored = (xp.where(fraction > 0, xp.clip(exponent, -127, 127), -127) + 127).astype(xp.uint8)
    codes = E2M1.encode(divide(groups, decode_table(stored, E8M0_VALUES)))
    return Encoded(pack_nibbles(codes.reshape(x.shape)), stored)


def decode_mxfp4(encoded: Encoded) -> Array:
    """Encoded -> float32 `[..., K]`."""
    scales = decode_table(encoded.scales, E8M0_VALUES)
    return join(decode_table(_unpack(encoded.codes), E2M1_VALUES), scales)


def encode_nvfp4(x: Array, group_size: int = 16) -> tuple[Encoded, Array]:
    """float `[..., N, K]` -> (codes uint8 `[..., N, K / 2]`, scales E4M3 as uint8), and the global
    scale float32 `[...]`, one per matrix: `amax / (448 * 6)`."""
    xp = array_namespace(x)
    groups = split(x, group_size)
    global_scale = xp.abs(groups).max(axis=(-1, -2, -3)) / xp.float32(NVFP4_MAX)
    global_scale = xp.where(global_scale > 0, global_scale, xp.float32(1)).astype(xp.float32)
    return _with_e4m3_scales(groups, global_scale[..., None, None]), global_scale


def encode_nvfp4_cache(x: Array, group_size: int) -> Encoded:
    """float `[..., K]` -> codes uint8 `[..., K / 2]`, scales E4M3 as uint8 `[..., K / group_size]`;
    the global scale is 1. Groups whose amax is at most 2^-8 become zeros; beyond 448 * 6:
    ValueError."""
    xp = array_namespace(x)
    groups = split(x, group_size)
    amax = float(xp.abs(groups).max()) if groups.size else 0.0
    if amax > NVFP4_MAX:
        raise ValueError(f"a group needs the scale {amax / 6:.5g}, E4M3 ends at 448")
    return _with_e4m3_scales(groups, xp.float32(1))


def _with_e4m3_scales(groups: Array, global_scale: Array) -> Encoded:
    """Groups `[..., G, g]`; global_scale float32, broadcasts to `[..., G]`."""

    def store(scale: Array) -> tuple[Array, Array]:
        stored = E4M3.encode(scale / global_scale)
        return stored, decode_table(stored, E4M3_VALUES) * global_scale

    codes, scales = _better_of_two(groups, store)
    *lead, count, size = groups.shape
    return Encoded(pack_nibbles(codes.reshape(*lead, count * size)), scales)


def decode_nvfp4(encoded: Encoded, global_scale: Array | np.ndarray | float) -> Array:
    """Encoded and the global scales of its rows, `[..., N]` or `[..., 1]` for all of a matrix, ->
    float32 `[..., N, K]`."""
    xp = array_namespace(encoded.codes)
    scales = decode_table(encoded.scales, E4M3_VALUES)
    scales = scales * xp.asarray(global_scale, dtype=xp.float32)[..., None]
    return join(decode_table(_unpack(encoded.codes), E2M1_VALUES), scales)


def decode_nvfp4_cache(encoded: Encoded) -> Array:
    """Encoded -> float32 `[..., K]`; the global scale is 1."""
    return decode_nvfp4(encoded, 1)
