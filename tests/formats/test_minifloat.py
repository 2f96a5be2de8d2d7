"""E2M1, E4M3 and E8M0 bit for bit against ml_dtypes, bf16 and fp16 too."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npmoe.formats.floats import decode_bf16, decode_fp16, encode_bf16, encode_fp16
from npmoe.formats.minifloat import E2M1, E2M1_VALUES, E4M3, E4M3_VALUES, E8M0_VALUES

MINIFLOATS = [
    pytest.param(E2M1, E2M1_VALUES, ml_dtypes.float4_e2m1fn, id="E2M1"),
    pytest.param(E4M3, E4M3_VALUES, ml_dtypes.float8_e4m3fn, id="E4M3"),
]


def hard_values(table: np.ndarray) -> np.ndarray:
    """Every finite value, every midpoint (the ties) and their float32 neighbours, +-."""
    values = np.unique(np.abs(table[np.isfinite(table)]))
    middles = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, middles]).astype(np.float32)
    near = [np.nextafter(points, np.float32(0)), points, np.nextafter(points, np.float32(1e9))]
    both = np.concatenate(near)
    both = both[both <= values.max()]
    return np.concatenate([both, -both])


def test_e2m1_values_are_those_of_the_standard() -> None:
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E2M1_VALUES.tolist() == [*positive, *(-v for v in positive)]


@pytest.mark.parametrize(("minifloat", "table", "dtype"), MINIFLOATS)
def test_every_code_decodes_as_in_ml_dtypes(minifloat, table, dtype) -> None:
    codes = np.arange(len(table), dtype=np.uint8)
    np.testing.assert_array_equal(table, codes.view(dtype).astype(np.float32))
    assert np.nanmax(table) == minifloat.largest


@pytest.mark.parametrize(("minifloat", "table", "dtype"), MINIFLOATS)
def test_every_finite_value_encodes_to_its_own_code(minifloat, table, dtype) -> None:
    codes = np.flatnonzero(np.isfinite(table))
    np.testing.assert_array_equal(minifloat.encode(table[codes]), codes)


@pytest.mark.parametrize(("minifloat", "table", "dtype"), MINIFLOATS)
def test_hard_values_round_as_in_ml_dtypes(minifloat, table, dtype) -> None:
    x = hard_values(table)
    np.testing.assert_array_equal(minifloat.encode(x), x.astype(dtype).view(np.uint8))


@pytest.mark.parametrize(("minifloat", "table", "dtype"), MINIFLOATS)
@given(share=st.floats(-1, 1, width=32))
def test_any_value_rounds_as_in_ml_dtypes(minifloat, table, dtype, share: float) -> None:
    x = np.array([share * minifloat.largest], np.float32)
    np.testing.assert_array_equal(minifloat.encode(x), x.astype(dtype).view(np.uint8))


@pytest.mark.parametrize(("minifloat", "largest_code"), [(E2M1, 7), (E4M3, 0x7E)])
def test_larger_values_saturate(minifloat, largest_code: int) -> None:
    x = np.array([minifloat.largest * 1.2, 1e30, -1e30], np.float32)
    sign = minifloat.sign_bit
    assert minifloat.encode(x).tolist() == [largest_code, largest_code, largest_code + sign]


def test_every_e8m0_code_decodes_as_in_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(E8M0_VALUES, expected)
    assert E8M0_VALUES[127] == 1


def test_every_finite_bf16_and_fp16_code_makes_the_round_trip() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    for decode, encode, dtype in (
        (decode_bf16, encode_bf16, ml_dtypes.bfloat16),
        (decode_fp16, encode_fp16, np.float16),
    ):
        values = decode(codes)
        np.testing.assert_array_equal(values, codes.view(dtype).astype(np.float32))
        finite = np.isfinite(values)
        np.testing.assert_array_equal(encode(values[finite]), codes[finite])


@given(st.floats(-(2.0**127), 2.0**127, width=32))
def test_bf16_rounds_as_in_ml_dtypes(value: float) -> None:
    x = np.array([value], np.float32)
    np.testing.assert_array_equal(encode_bf16(x), x.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_bf16_ties_go_to_the_even_code() -> None:
    # Neighbours of 1 are 2^-7 apart, so these three lie halfway between two codes.
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8], np.float32)
    assert decode_bf16(encode_bf16(x)).tolist() == [1, 1 + 2**-6, -1]


def test_fp16_keeps_subnormals_and_its_largest_value() -> None:
    x = np.array([2**-24, 2**-25, 3 * 2**-25, 65504, 65519], np.float32)
    assert decode_fp16(encode_fp16(x)).tolist() == [2**-24, 0, 2**-23, 65504, 65504]


@pytest.mark.parametrize("encode", [encode_bf16, encode_fp16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.float32(3.4e38)])
def test_what_has_no_finite_code_is_refused(encode, bad: float) -> None:
    with pytest.raises(ValueError):
        encode(np.array([1, bad], np.float32))


def test_a_value_that_would_round_to_fp16_infinity_is_refused() -> None:
    with pytest.raises(ValueError, match="65504"):
        encode_fp16(np.array([65520], np.float32))
