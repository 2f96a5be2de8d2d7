"""What every group-scaled format promises, and small examples of each worked out by hand."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from npmoe.formats import Encoded, QuantTensor, pack_nibbles, quantize, unpack_nibbles
from npmoe.formats.fp4 import decode_mxfp4, encode_fp4, encode_mxfp4, encode_nvfp4
from npmoe.formats.fp8 import encode_fp8
from npmoe.formats.int4 import decode_int4, decode_int4_asym, encode_int4, encode_int4_asym
from npmoe.formats.int8 import encode_int8
from npmoe.formats.kv_cache import GROUPED_KV_FORMATS

GROUPED = ("fp8", "int8", "int4", "int4_asym", "fp4", "mxfp4", "nvfp4")
GROUP = {"nvfp4": 16}  # the others are tried with 32
matrices = arrays(np.float32, (2, 64), elements=st.floats(-1000, 1000, width=32))


LARGEST = {"fp8": 448, "int8": 127, "int4": 7, "int4_asym": 15, "fp4": 6, "mxfp4": 6, "nvfp4": 2688}
"""Largest value of a code; for nvfp4 that of a code times a group's scale."""


def largest_errors(x: np.ndarray, format: str) -> np.ndarray:
    """How far a decoded value may lie from x, from the definition of the format."""
    group = GROUP.get(format, 32)
    x = np.abs(x).astype(np.float64)
    amax = x.reshape(len(x), -1, group).max(axis=-1).repeat(group, axis=-1)
    # An integer lies half a scale off at most, E2M1 one (5 between 4 and 6); 2 % for the scale's
    # own rounding. An asymmetric scale spans up to 2 amax. E8M0 scales reach twice amax / 6. E4M3
    # is off by 2^-4 of a value, or by 2^-10 below its smallest normal one; cut to 448, a scale of
    # amax / 4 may end as amax / 5 and put amax halfway between 4 and 6.
    error = {
        "fp8": x * 2**-4 + amax / 448 * 2**-10 + amax * 2**-20,
        "int8": amax / 127 * 0.51,
        "int4": amax / 7 * 0.51,
        "int4_asym": 2 * amax / 15 * 0.51,
        "fp4": amax / 6 * 1.02,
        "mxfp4": 2 * amax / 6,
        "nvfp4": amax / 5 * 1.02 + 6 * x.max() / 2688 * 2**-9,
    }
    smallest_scale = {"fp8": 2.0**-149, "mxfp4": 2.0**-127, "nvfp4": 2.0**-149}.get(format, 2**-24)
    return error[format] + LARGEST[format] * smallest_scale


@pytest.mark.parametrize("format", GROUPED)
@given(x=matrices)
def test_decoded_values_are_as_near_as_the_format_allows(format: str, x: np.ndarray) -> None:
    decoded = quantize(x, format, GROUP.get(format, 32)).dequantize()
    assert decoded.dtype == np.float32
    assert (np.abs(decoded.astype(np.float64) - x) <= largest_errors(x, format)).all()


@pytest.mark.parametrize("format", GROUPED)
@given(data=st.data())
def test_decoded_codes_encode_to_themselves(format: str, data: st.DataObject) -> None:
    group = GROUP.get(format, 32)
    codes = data.draw(arrays(np.uint8, (2, 64), elements=st.integers(0, 255)), label="codes")
    scales = data.draw(
        arrays(np.float32, (2, 64 // group), elements=st.sampled_from([0.25, 1, 3, 24])),
        label="scales",
    )
    w = _tensor(format, codes, scales, group)
    x = w.dequantize()
    np.testing.assert_array_equal(quantize(x, format, group).dequantize(), x)


def _tensor(format: str, codes: np.ndarray, scales: np.ndarray, group: int) -> QuantTensor:
    """A tensor of these codes, with the largest code in every group, so that scales are known."""
    zeros = global_scale = None
    starts = slice(None), slice(None, None, group)
    if format == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
        codes[starts] = 0x7E
    elif format == "int8":
        codes[codes == 128] = 0  # -128 is not used
        codes[starts] = 127
    else:
        codes &= 15
        codes[starts] = {"int4": 15, "int4_asym": 15}.get(format, 7)
        if format == "int4":
            codes[codes == 0] = 8
        if format == "int4_asym":
            codes[:, 1::group] = 0
            zeros = np.full(scales.shape, 5, np.uint8)
        codes = pack_nibbles(codes)
    if format == "mxfp4":
        stored = (np.floor(np.log2(scales)) + 127).astype(np.uint8)
    elif format == "nvfp4":
        scales[0, 0] = 448
        stored = scales.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        global_scale = np.float32(0.125)
    else:
        stored = scales.astype(np.float32 if format == "fp8" else np.float16)
    return QuantTensor(format, (2, 64), codes, stored, zeros, global_scale, (1, group))


@pytest.mark.parametrize("format", GROUPED)
def test_zeros_decode_to_exact_zeros(format: str) -> None:
    x = np.zeros((2, 64), np.float32)
    x[1, :32] = 5  # a zero group beside others, and a row of zeros
    decoded = quantize(x, format, GROUP.get(format, 32)).dequantize()
    assert (decoded[x == 0] == 0).all()
    assert (quantize(np.zeros((2, 64)), format).dequantize() == 0).all()


@pytest.mark.parametrize("format", GROUPED)
def test_a_zero_among_others_stays_exact(format: str) -> None:
    x = np.linspace(0.3, 2, 64, dtype=np.float32)[None]
    x[0, 5] = 0
    assert quantize(x, format).dequantize()[0, 5] == 0


@pytest.mark.parametrize("format", [*GROUPED, "bf16", "fp16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(format: str, bad: float) -> None:
    x = np.ones((2, 64), np.float32)
    x[1, 3] = bad
    with pytest.raises(ValueError, match="1 of 128 values are NaN or infinite"):
        quantize(x, format)


@pytest.mark.parametrize("format", GROUPED)
def test_a_group_size_that_does_not_divide_is_refused(format: str) -> None:
    with pytest.raises(ValueError, match="group_size = 24"):
        quantize(np.ones((2, 64)), format, group_size=24)


@pytest.mark.parametrize("format", sorted(GROUPED_KV_FORMATS.keys() - {"mxfp4"}))
def test_a_scale_that_the_format_cannot_hold_is_refused(format: str) -> None:
    encode, _ = GROUPED_KV_FORMATS[format]
    end = "E4M3 ends at 448" if format == "nvfp4" else "float16 ends at 65504"
    with pytest.raises(ValueError, match=f"a group needs the scale .*, {end}"):
        encode(np.full((1, 32), 1e9, np.float32), 32)


def test_mxfp4_holds_scales_beyond_fp16() -> None:
    x = np.array([[6, -3]], np.float32) * np.float32(2.0**120)
    np.testing.assert_array_equal(decode_mxfp4(encode_mxfp4(x, 2)), x)


def test_fp4_takes_amax_over_6_when_the_codes_then_fit() -> None:
    encoded = encode_fp4(np.array([[6, 3, -1.5, 0.5]], np.float32), 4)
    assert encoded.scales.tolist() == [[1]]
    assert unpack_nibbles(encoded.codes).tolist() == [[7, 5, 8 + 3, 1]]


def test_fp4_takes_amax_over_4_when_that_is_nearer() -> None:
    # With 12 / 6 = 2 the 9 becomes 8 or 12; with 12 / 4 = 3 all of 12, 9, 6 are codes 4, 3, 2.
    encoded = encode_fp4(np.array([[12, 9, 6, -9]], np.float32), 4)
    assert encoded.scales.tolist() == [[3]]
    assert unpack_nibbles(encoded.codes).tolist() == [[6, 5, 4, 8 + 5]]


def test_fp4_takes_amax_over_6_on_a_tie() -> None:
    # 12 alone is exact both as 6 * 2 and as 4 * 3.
    assert encode_fp4(np.array([[12, 0]], np.float32), 2).scales.tolist() == [[2]]


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(6, 1), (6.0000005, 2), (5.9, 1), (3, 0.5), (3.01, 1), (12, 2), (6 * 2.0**-100, 2.0**-100)],
)
def test_mxfp4_takes_the_smallest_power_of_two_that_holds_amax(amax: float, scale: float) -> None:
    encoded = encode_mxfp4(np.array([[amax, 0]], np.float32), 2)
    assert encoded.scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32).tolist() == [[scale]]


def test_nvfp4_has_two_levels_of_scales() -> None:
    # amax 2688 = 448 * 6 makes the global scale 1, so E4M3 scales are the groups' own: 448 and 2.
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16:18] = 2688, (12, -3)
    encoded, global_scale = encode_nvfp4(x, 16)
    assert global_scale == 1
    assert encoded.scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist() == [[448, 2]]
    assert unpack_nibbles(encoded.codes)[0, [0, 16, 17]].tolist() == [7, 7, 8 + 3]


def test_nvfp4_has_one_global_scale_per_matrix_of_a_stack() -> None:
    x = np.ones((3, 2, 16), np.float32) * np.array([1, 2, 0], np.float32)[:, None, None]
    w = quantize(x, "nvfp4")
    np.testing.assert_allclose(w.global_scale, [1 / 2688, 2 / 2688, 1])
    np.testing.assert_allclose(w.dequantize(), x, rtol=1e-6)


def test_int4_is_symmetric_around_nibble_8() -> None:
    encoded = encode_int4(np.array([[7, -7, 2.4, -2.6]], np.float32), 4)
    assert encoded.scales.tolist() == [[1]]
    assert unpack_nibbles(encoded.codes).tolist() == [[15, 1, 10, 5]]
    assert decode_int4(encoded).tolist() == [[7, -7, 2, -3]]


def test_int4_rounds_ties_to_even() -> None:
    encoded = encode_int4(np.array([[7, 0.5, 1.5, -2.5]], np.float32), 4)
    assert decode_int4(encoded).tolist() == [[7, 0, 2, -2]]


@pytest.mark.parametrize(("format", "most"), [("int4", 7), ("int8", 127)])
def test_symmetric_codes_stay_symmetric_where_fp16_rounds_the_scale(format: str, most: int) -> None:
    # The scale 1.4 * 2^-24 becomes 2^-24, fp16's smallest; the codes would be 1.4 times most.
    x = np.array([[1, -1]], np.float32) * np.float32(1.4 * most * 2**-24)
    w = quantize(x, format, 2)
    assert w.dequantize().tolist() == [[most * 2**-24, -most * 2**-24]]


def test_int4_asym_spreads_15_steps_over_the_range() -> None:
    encoded = encode_int4_asym(np.array([[-5, 10, 0, 2.6]], np.float32), 4)
    assert encoded.zeros is not None
    assert (encoded.scales.tolist(), encoded.zeros.tolist()) == ([[1]], [[5]])
    assert unpack_nibbles(encoded.codes).tolist() == [[0, 15, 5, 8]]
    assert decode_int4_asym(encoded).tolist() == [[-5, 10, 0, 3]]


@pytest.mark.parametrize(("x", "zero"), [([30, 15, 16, 2], 0), ([-30, -15, -16, -2], 15)])
def test_int4_asym_widens_a_one_sided_range_to_hold_zero(x: list[int], zero: int) -> None:
    encoded = encode_int4_asym(np.array([x], np.float32), 4)
    assert encoded.zeros is not None
    assert (encoded.scales.tolist(), encoded.zeros.tolist()) == ([[2]], [[zero]])


def test_int8_codes_are_two_s_complement() -> None:
    encoded = encode_int8(np.array([[127, -127, -1, 2.5]], np.float32), 4)
    assert encoded.scales.tolist() == [[1]]
    assert encoded.codes.tolist() == [[127, 129, 255, 2]]


def test_fp8_maps_amax_to_448() -> None:
    encoded = encode_fp8(np.array([[896, 2, -17, 0]], np.float32), 4)
    assert encoded.scales.tolist() == [[2]]
    expected = np.array([448, 1, -8.5, 0], ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(encoded.codes, [expected])


def test_encoded_has_zeros_only_in_asymmetric_formats() -> None:
    assert Encoded(np.zeros(1), np.zeros(1)).zeros is None
    assert encode_int4(np.ones((1, 4)), 4).zeros is None
