"""The public quantize_kv_cache_* functions."""

from typing import Any

import numpy as np
import pytest

import npmoe
from tests.helpers import normal

FORMATS = ("fp4", "int4", "int4_asym", "int8", "fp8")
WORST_ERROR = {"fp4": 1 / 6, "int4": 0.5 / 7, "int4_asym": 1 / 15, "int8": 0.5 / 127, "fp8": 1 / 16}
"""As a share of the largest element of a group."""


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
    assert (scales.shape, scales.dtype) == ((2, 3, 5, 2), np.float16)
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
