"""int8: symmetric, codes -127..127, `scale = amax / 127` in fp16 per group."""

from npmoe.dtypes import Array, array_namespace
from npmoe.formats.groups import Encoded, divide, fp16_scale, join, split


def encode_int8(x: Array, group_size: int) -> Encoded:
    """float `[..., K]` -> codes uint8 (two's complement) `[..., K]`, scales fp16 `[..., K / g]`."""
    xp = array_namespace(x)
    groups = split(x, group_size)
    scales = fp16_scale(xp.abs(groups).max(axis=-1) / xp.float32(127))
    codes = xp.clip(xp.rint(divide(groups, scales)), -127, 127).astype(xp.int8)
    return Encoded(codes.reshape(x.shape).view(xp.uint8), scales)


def decode_int8(encoded: Encoded) -> Array:
    """Encoded -> float32 `[..., K]`."""
    xp = array_namespace(encoded.codes)
    return join(encoded.codes.view(xp.int8), encoded.scales)
