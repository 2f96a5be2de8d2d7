"""int4, two kinds, both packed two a byte with one fp16 scale per group.

Symmetric: value = (nibble - 8) * scale, nibbles 1..15, `scale = amax / 7`.
Asymmetric: value = (nibble - zero) * scale, nibbles and zero 0..15. The range is widened to hold 0,
so that a zero is always exact: `scale = (max - min) / 15`, `zero = round(-min / scale)`.
"""

from npmoe.dtypes import Array, array_namespace
from npmoe.formats.groups import (
    Encoded,
    divide,
    fp16_scale,
    join,
    pack_nibbles,
    split,
    unpack_nibbles,
)


def encode_int4(x: Array, group_size: int) -> Encoded:
    """float `[..., K]` -> codes uint8 `[..., K / 2]`, scales fp16 `[..., K / group_size]`."""
    xp = array_namespace(x)
    groups = split(x, group_size)
    scales = fp16_scale(xp.abs(groups).max(axis=-1) / xp.float32(7))
    codes = xp.clip(xp.rint(divide(groups, scales)), -7, 7) + 8
    return Encoded(pack_nibbles(codes.astype(xp.uint8).reshape(x.shape)), scales)


def decode_int4(encoded: Encoded) -> Array:
    """Encoded -> float32 `[..., K]`."""
    xp = array_namespace(encoded.codes)
    return join(unpack_nibbles(encoded.codes).astype(xp.float32) - 8, encoded.scales)


def encode_int4_asym(x: Array, group_size: int) -> Encoded:
    """float `[..., K]` -> codes uint8 `[..., K / 2]`, scales fp16, zeros uint8 `[..., K / g]`."""
    xp = array_namespace(x)
    groups = split(x, group_size)
    low = xp.minimum(groups.min(axis=-1), xp.float32(0))
    high = xp.maximum(groups.max(axis=-1), xp.float32(0))
    scales = fp16_scale((high - low) / xp.float32(15))
    zeros = xp.clip(xp.rint(divide(-low[..., None], scales)), 0, 15)
    codes = xp.clip(xp.rint(divide(groups, scales)) + zeros, 0, 15)
    packed = pack_nibbles(codes.astype(xp.uint8).reshape(x.shape))
    return Encoded(packed, scales, zeros[..., 0].astype(xp.uint8))


def decode_int4_asym(encoded: Encoded) -> Array:
    """Encoded -> float32 `[..., K]`."""
    return join(unpack_nibbles(encoded.codes), encoded.scales, encoded.zeros)
