"""The public quantize_kv_cache_* functions."""

from typing import Any

import numpy as np
import pytest

import npmoe
from tests.helpers import normal

FORMATS = ("fp4", "mxfp4", "nvfp4", "int4", "int4_asym", "int8", "fp8")
WORST_ERROR = {
    **{"fp4": 1 / 6, "mxfp4": 1 / 5, "nvfp4": 1 / 6 * 17 / 16},
    **{"int4": 0.5 / 7, "int4_asym": 1 / 15, "int8": 0.5 / 127, "fp8": 1 / 16},
}
"""As a share of the largest element of a group. E2M1 is off by one scale at most, at 5 between 4
and 6. Then an E8M0 scale is a fifth of amax, and an E4M3 scale a 16th more than a sixth."""


def functions(format: str) -> tuple:
    return (
        getattr(npmoe, f"quantize_kv_cache_{format}"),
        getattr(npmoe, f"dequantize_kv_cache_{format}"),
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_shapes_dtypes_and_values(format: str, dtype: type) -> None:
    quantize, dequantize = functions(format)
    k = normal(2, 3, 5, 64).astype(dtype)
    codes, scales, *zeros = quantize(k)
    packed = 64 if format in ("int8", "fp8") else 32
    assert (codes.shape, codes.dtype) == ((2, 3, 5, packed), np.uint8)
    scale_dtype = np.uint8 if format in ("mxfp4", "nvfp4") else np.float16
    assert (scales.shape, scales.dtype) == ((2, 3, 5, 2), scale_dtype)
    assert [(z.shape, z.dtype) for z in zeros] == [((2, 3, 5, 2), np.uint8)] * (
        format == "int4_asym"
    )
    decoded = dequantize(codes, scales, *zeros)
    assert (decoded.shape, decoded.dtype) == (k.shape, np.float32)
    amax = np.abs(k).reshape(2, 3, 5, 2, 32).max(-1).repeat(32, -1)
    assert (np.abs(decoded - k) <= amax * WORST_ERROR[format] * 1.02).all()


@pytest.mark.parametrize("format", FORMATS)
def test_group_size(format: str) -> None:
    quantize, dequantize = functions(format)
    k = normal(1, 1, 2, 64)
    encoded = quantize(k, group_size=16)
    assert encoded[1].shape == (1, 1, 2, 4)
    assert np.abs(dequantize(*encoded) - k).max() <= np.abs(k).max() * WORST_ERROR[format] * 1.02


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("k", "message"),
    [
        (np.ones((2, 5, 64)), r"\[batch, heads, seq, head_dim\].*\(2, 5, 64\)"),
        (np.ones((1, 1, 1, 40)), "head_dim = 40 .*group_size = 32"),
        (np.full((1, 1, 1, 32), np.nan), "32 of 32 values are NaN"),
        (np.full((1, 1, 1, 32), np.inf), "infinite"),
    ],
)
def test_bad_input_is_a_value_error(format: str, k: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        functions(format)[0](k)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("group_size", [0, -32, 1.5, True, None], ids=str)
def test_bad_group_size_is_a_value_error(format: str, group_size: Any) -> None:
    with pytest.raises(ValueError, match="group_size = "):
        functions(format)[0](np.ones((1, 1, 1, 32)), group_size)


def test_what_is_no_array_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="got a list"):
        npmoe.quantize_kv_cache_fp4([[1.0]])  # type: ignore[arg-type]


def test_fp4_takes_28_percent_of_bf16() -> None:
    k = normal(1, 2, 8, 128)
    codes, scales = npmoe.quantize_kv_cache_fp4(k)
    assert (codes.nbytes + scales.nbytes) / (2 * k.size) == 0.28125


def test_fp4_of_one_group_by_hand() -> None:
    k = np.zeros((1, 1, 1, 32), np.float32)
    k[..., :4] = (6, -3, 0.5, 1)
    codes, scales = npmoe.quantize_kv_cache_fp4(k)
    assert scales.tolist() == [[[[1]]]]
    assert codes[0, 0, 0, :3].tolist() == [0xD7, 0x21, 0]


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_a_head_of_128_takes_68_bytes_with_a_scale_of_one_byte(format: str) -> None:
    codes, scales = functions(format)[0](normal(1, 1, 1, 128))
    assert (codes.nbytes, scales.nbytes) == (64, 4)


ONE_E8M0, ONE_E4M3 = 127, 7 << 3  # 2^(127 - 127); exponent 7 less the bias 7, mantissa 0


@pytest.mark.parametrize(
    ("format", "values", "scale", "bytes"),
    [
        ("mxfp4", (6, -3, 0.5, 1), ONE_E8M0, (0xD7, 0x21)),
        ("mxfp4", (7, -3, 1, 4), ONE_E8M0 + 1, (0xB6, 0x41)),  # 7 / 2 = 3.5 is 4; -1.5, .5, 2
        ("mxfp4", (3, -1.5, 0.25, 0.5), ONE_E8M0 - 1, (0xD7, 0x21)),
        ("nvfp4", (6, -3, 0.5, 1), ONE_E4M3, (0xD7, 0x21)),
        ("nvfp4", (12, -6, 1, 2), ONE_E4M3 + 8, (0xD7, 0x21)),
        ("nvfp4", (12, 9, 6, -9), ONE_E4M3 + 8 + 4, (0x56, 0xD4)),  # 12 / 4 = 3 is nearer
        ("nvfp4", (7.5, 0, 0, 0), ONE_E4M3 + 2, (0x07, 0)),  # 7.5 / 6 = 1.25
        ("nvfp4", (2688, -1344, 224, 448), 0x7E, (0xD7, 0x21)),  # 448, the largest
        ("nvfp4", (6 * 2**-9, -3 * 2**-9, 0, 0), 1, (0xD7, 0)),  # 2^-9, the smallest
        ("nvfp4", (2**-8, -(2**-8), 0, 0), 0, (0, 0)),  # of 2^-8 / 4 nothing is left
    ],
)
def test_one_group_with_a_scale_of_one_byte_by_hand(
    format: str, values: tuple, scale: int, bytes: tuple
) -> None:
    k = np.zeros((1, 1, 1, 32), np.float32)
    k[..., :4] = values
    codes, scales = functions(format)[0](k)
    assert scales.tolist() == [[[[scale]]]]
    assert codes[0, 0, 0, :3].tolist() == [*bytes, 0]


def test_mxfp4_values_by_hand() -> None:
    k = np.zeros((1, 1, 1, 32), np.float32)
    k[..., :4] = (7, -3, 1, 4)
    restored = npmoe.dequantize_kv_cache_mxfp4(*npmoe.quantize_kv_cache_mxfp4(k))
    assert restored[0, 0, 0, :5].tolist() == [8, -3, 1, 4, 0]


def test_nvfp4_is_refused_where_e4m3_cannot_hold_the_scale() -> None:
    k = np.ones((1, 1, 2, 64), np.float32)
    k[0, 0, 1, 40] = -2688
    npmoe.quantize_kv_cache_nvfp4(k)
    k[0, 0, 1, 40] = -2694
    with pytest.raises(ValueError, match="a group needs the scale 449, E4M3 ends at 448"):
        npmoe.quantize_kv_cache_nvfp4(k)
