"""bf16, fp16 and fp32 as arrays of codes: uint16, uint16 and float32.

bf16 is the upper half of a float32, rounded to nearest even.
"""

import numpy as np

from npmoe.dtypes import Array, array_namespace
from npmoe.formats.groups import FP16_MAX, check_finite

FP16_VALUES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
"""float32 `[65536]`: the value of each fp16 code, for loops that cannot view one as the other."""


def encode_bf16(x: Array) -> Array:
    """float `[...]` -> uint16 `[...]`, round to nearest even; NaN, infinity: ValueError."""
    xp = array_namespace(x)
    x = x.astype(xp.float32)
    check_finite(x)
    bits = x.view(xp.uint32)
    rounded = (bits + xp.uint32(0x7FFF) + ((bits >> 16) & xp.uint32(1))) >> 16
    codes = rounded.astype(xp.uint16)
    if bool(((codes & 0x7F80) == 0x7F80).any()):
        raise ValueError("a value rounds to infinity in bf16")
    return codes


def decode_bf16(codes: Array) -> Array:
    """uint16 `[...]` -> float32 `[...]`, exact."""
    xp = array_namespace(codes)
    return (codes.astype(xp.uint32) << 16).view(xp.float32)


def encode_fp16(x: Array) -> Array:
    """float `[...]` -> uint16 `[...]`, round to nearest even; beyond +-65504: ValueError."""
    xp = array_namespace(x)
    x = x.astype(xp.float32)
    check_finite(x)
    if x.size and float(xp.abs(x).max()) >= FP16_MAX + 16:
        raise ValueError(f"a value is beyond fp16's range of +-{FP16_MAX:.0f}")
    return x.astype(xp.float16).view(xp.uint16)


def decode_fp16(codes: Array) -> Array:
    """uint16 `[...]` -> float32 `[...]`, exact."""
    xp = array_namespace(codes)
    return codes.view(xp.float16).astype(xp.float32)
