"""fp8: E4M3 codes with one scale per group, `scale = amax / 448`.

Weights keep float32 scales per output row (or per 128 x 128 block, see QuantTensor); the KV cache
keeps fp16 scales per group along head_dim.
"""

from npmoe.dtypes import Array, array_namespace
from npmoe.formats.groups import Encoded, divide, fp16_scale, join, split
from npmoe.formats.minifloat import E4M3, E4M3_VALUES, decode_table


def encode_fp8(x: Array, group_size: int, fp16_scales: bool = True) -> Encoded:
    """float `[..., K]` -> codes uint8 `[..., K]`, scales fp16 or float32 `[..., K / g]`."""
    xp = array_namespace(x)
    groups = split(x, group_size)
    scales = xp.abs(groups).max(axis=-1) / xp.float32(448)
    if fp16_scales:
        scales = fp16_scale(scales)
    codes = E4M3.encode(divide(groups, scales)).reshape(x.shape)
    return Encoded(codes, scales)


def decode_fp8(encoded: Encoded) -> Array:
    """Encoded -> float32 `[..., K]`."""
    return join(decode_table(encoded.codes, E4M3_VALUES), encoded.scales)
