"""Quantisation of keys and values as a user calls it: `[batch, heads, seq, head_dim]` arrays.

Groups lie along head_dim. The same formats fill the pages of the KV cache.
"""

from numbers import Integral

from npmoe.dtypes import Array
from npmoe.formats.fp4 import (
    decode_fp4,
    decode_mxfp4,
    decode_nvfp4_cache,
    encode_fp4,
    encode_mxfp4,
    encode_nvfp4_cache,
)
from npmoe.formats.fp8 import decode_fp8, encode_fp8
from npmoe.formats.groups import Encoded
from npmoe.formats.int4 import decode_int4, decode_int4_asym, encode_int4, encode_int4_asym
from npmoe.formats.int8 import decode_int8, encode_int8

GROUPED_KV_FORMATS = {
    "fp8": (encode_fp8, decode_fp8),
    "int8": (encode_int8, decode_int8),
    "int4": (encode_int4, decode_int4),
    "int4_asym": (encode_int4_asym, decode_int4_asym),
    "fp4": (encode_fp4, decode_fp4),
    "mxfp4": (encode_mxfp4, decode_mxfp4),
    "nvfp4": (encode_nvfp4_cache, decode_nvfp4_cache),
}


def _check(x: Array, group_size: int) -> None:
    if len(getattr(x, "shape", ())) != 4:
        found = f"shape {tuple(x.shape)}" if hasattr(x, "shape") else f"a {type(x).__name__}"
        raise ValueError(f"expected [batch, heads, seq, head_dim], got {found}")
    if isinstance(group_size, bool) or not isinstance(group_size, Integral) or group_size < 1:
        raise ValueError(f"group_size = {group_size!r}: expected a whole number >= 1")
    if x.shape[-1] % group_size:
        raise ValueError(f"head_dim = {x.shape[-1]} is not a multiple of group_size = {group_size}")


def quantize_kv_cache_fp4(k: Array, group_size: int = 32) -> tuple[Array, Array]:
    """Keys or values -> E2M1 codes and fp16 scales.

    Shapes: k float `[batch, heads, seq, head_dim]`; codes uint8 `[batch, heads, seq, head_dim / 2]`
    (low nibble first); scales fp16 `[batch, heads, seq, head_dim / group_size]`.
    Raises ValueError for another rank, head_dim not a multiple of group_size, NaN or infinity.
    """
    _check(k, group_size)
    return encode_fp4(k, group_size)[:2]


def dequantize_kv_cache_fp4(codes: Array, scales: Array) -> Array:
    """The inverse of `quantize_kv_cache_fp4`: float32 `[batch, heads, seq, head_dim]`."""
    return decode_fp4(Encoded(codes, scales))


def quantize_kv_cache_mxfp4(k: Array, group_size: int = 32) -> tuple[Array, Array]:
    """E2M1 codes as for fp4, and E8M0 scales, powers of two.

    scales uint8 `[batch, heads, seq, head_dim / group_size]`, 2^(scale - 127) each; the rest as for
    fp4.
    """
    _check(k, group_size)
    return encode_mxfp4(k, group_size)[:2]


def dequantize_kv_cache_mxfp4(codes: Array, scales: Array) -> Array:
    """The inverse of `quantize_kv_cache_mxfp4`: float32 `[batch, heads, seq, head_dim]`."""
    return decode_mxfp4(Encoded(codes, scales))


def quantize_kv_cache_nvfp4(k: Array, group_size: int = 32) -> tuple[Array, Array]:
    """E2M1 codes as for fp4, and E4M3 scales without a global one, which is 1.

    scales uint8 `[batch, heads, seq, head_dim / group_size]`, E4M3 codes. Groups whose largest
    magnitude is at most 2^-8 become zeros; ValueError beyond 448 * 6. The rest as for fp4.
    """
    _check(k, group_size)
    return encode_nvfp4_cache(k, group_size)[:2]


def dequantize_kv_cache_nvfp4(codes: Array, scales: Array) -> Array:
    """The inverse of `quantize_kv_cache_nvfp4`: float32 `[batch, heads, seq, head_dim]`."""
    return decode_nvfp4_cache(Encoded(codes, scales))


def quantize_kv_cache_int4(k: Array, group_size: int = 32) -> tuple[Array, Array]:
    """Symmetric int4, value = (nibble - 8) * scale; shapes and errors as for fp4."""
    _check(k, group_size)
    return encode_int4(k, group_size)[:2]


def dequantize_kv_cache_int4(codes: Array, scales: Array) -> Array:
    """The inverse of `quantize_kv_cache_int4`: float32 `[batch, heads, seq, head_dim]`."""
    return decode_int4(Encoded(codes, scales))


def quantize_kv_cache_int4_asym(k: Array, group_size: int = 32) -> tuple[Array, Array, Array]:
    """Asymmetric int4, value = (nibble - zero) * scale: (codes, scales, zeros).

    zeros uint8 `[batch, heads, seq, head_dim / group_size]`; the rest as for fp4.
    """
    _check(k, group_size)
    encoded = encode_int4_asym(k, group_size)
    return encoded.codes, encoded.scales, encoded.zeros


def dequantize_kv_cache_int4_asym(codes: Array, scales: Array, zeros: Array) -> Array:
    """The inverse of `quantize_kv_cache_int4_asym`: float32 `[batch, heads, seq, head_dim]`."""
    return decode_int4_asym(Encoded(codes, scales, zeros))


def quantize_kv_cache_int8(k: Array, group_size: int = 32) -> tuple[Array, Array]:
    """Symmetric int8: codes uint8 (two's complement) `[batch, heads, seq, head_dim]` and scales."""
    _check(k, group_size)
    return encode_int8(k, group_size)[:2]


def dequantize_kv_cache_int8(codes: Array, scales: Array) -> Array:
    """The inverse of `quantize_kv_cache_int8`: float32 `[batch, heads, seq, head_dim]`."""
    return decode_int8(Encoded(codes, scales))


def quantize_kv_cache_fp8(k: Array, group_size: int = 32) -> tuple[Array, Array]:
    """E4M3 codes uint8 `[batch, heads, seq, head_dim]` and fp16 scales per group."""
    _check(k, group_size)
    return encode_fp8(k, group_size)[:2]


def dequantize_kv_cache_fp8(codes: Array, scales: Array) -> Array:
    """The inverse of `quantize_kv_cache_fp8`: float32 `[batch, heads, seq, head_dim]`."""
    return decode_fp8(Encoded(codes, scales))
