"""Linear layers in every weight format."""

from dataclasses import replace

import numpy as np
import pytest

from npmoe.formats import QuantTensor, quantize
from npmoe.ops.linear import TILES, decoded, linear, linear_ref, prepare_linear
from tests.cases import FOUR_BIT, LINEAR, WEIGHT_FORMATS, LinearCase
from tests.helpers import by_name, normal, relative_error

formats = pytest.mark.parametrize("format", WEIGHT_FORMATS)


@formats
@by_name(LINEAR)
def test_agrees_with_the_definition(case: LinearCase, format: str) -> None:
    x = normal(case.num_tokens, case.columns)
    lead = (case.num_experts,) if case.num_experts else ()
    w = quantize(normal(*lead, case.rows, case.columns, seed=1), format)
    bias = normal(case.rows, seed=2)
    prepared = prepare_linear(w)
    for expert in range(case.num_experts) if case.num_experts else [None]:
        got = linear(x, prepared, bias, expert)
        want = linear_ref(x, w if expert is None else w[expert], bias)
        assert (got.shape, got.dtype) == ((case.num_tokens, case.rows), np.float32)
        assert relative_error(got, want) < 2e-6


@formats
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (70, 96), (7, 32)])
def test_a_prepared_matrix_is_decoded_to_its_values(format: str, rows: int, columns: int) -> None:
    w = quantize(normal(rows, columns), format)
    got = decoded(prepare_linear(w))
    assert (got.shape, got.dtype) == ((rows, columns), np.float32)
    # nvfp4 multiplies its three factors in another order.
    np.testing.assert_allclose(got, w.dequantize(), rtol=3e-7, atol=0)
    np.testing.assert_array_equal(decoded(w), w.dequantize())


@formats
@pytest.mark.parametrize("num_tokens", [1, 12])
def test_by_hand(format: str, num_tokens: int) -> None:
    # Rows of W are all 6 and all -3, exact in every format; x is 1, 2, 0, 0, ...
    w = np.repeat(np.array([[6], [-3]], np.float32), 32, axis=1)
    x = np.zeros((num_tokens, 32), np.float32)
    x[:, :2] = 1, 2
    bias = np.array([0.5, 0], np.float32)
    got = linear(x, prepare_linear(quantize(w, format)), bias)
    # int8 and int4 have scales 6/127 and 6/7, which fp16 rounds; E4M3 scales of nvfp4 are a share
    # of the global scale, which float32 rounds.
    np.testing.assert_allclose(got, [[18.5, -9]] * num_tokens, rtol=1e-3)


@formats
@pytest.mark.parametrize("rows", [64, 100])
def test_a_token_gets_the_same_bits_alone_and_among_eight(format: str, rows: int) -> None:
    x, bias = normal(8, 96), normal(rows, seed=1)
    w = prepare_linear(quantize(normal(rows, 96, seed=2), format))
    together = linear(x, w, bias)
    for t in range(8):
        np.testing.assert_array_equal(linear(x[t : t + 1], w, bias)[0], together[t])
    np.testing.assert_array_equal(linear(x[2:5], w, bias), together[2:5])


@pytest.mark.parametrize("format", FOUR_BIT)
def test_four_bit_weights_take_at_most_1_1_bytes_while_they_run(format: str) -> None:
    w = prepare_linear(quantize(normal(256, 512), format))
    assert w.layout == TILES
    assert w.nbytes <= 1.1 * 256 * 512


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_smallest_and_largest_values_of_float_formats_survive(format: str, num_tokens: int) -> None:
    value = {"bf16": (2.0**-126, 2.0**100), "fp16": (2.0**-24, 65504), "fp8": (2.0**-9, 448)}
    w = np.zeros((2, 32), np.float32)
    w[0, 0], w[1, 0] = value[format]
    quantized = quantize(w, format)
    if format == "fp8":  # one scale of 1 for both rows, so that 2^-9 is a subnormal code
        codes = np.zeros((2, 32), np.uint8)
        codes[:, 0] = 1, 0x7E
        quantized = QuantTensor(format, (2, 32), codes, np.ones((2, 1), np.float32), block=(1, 32))
    x = np.zeros((num_tokens, 32), np.float32)
    x[:, 0] = 1
    got = linear(x, prepare_linear(quantized))
    np.testing.assert_array_equal(got, [value[format]] * num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("columns", [128, 256, 192])
def test_fp8_in_blocks_whose_last_one_is_narrower(columns: int, num_tokens: int) -> None:
    rows, block = 100, 128
    codes = quantize(normal(rows, columns), "fp8").codes
    scales = np.abs(normal(1, -(-columns // block), seed=1)) + 0.1
    w = QuantTensor("fp8", (rows, columns), codes, scales, block=(block, block))
    x = normal(num_tokens, columns, seed=2)
    assert relative_error(linear(x, prepare_linear(w)), linear_ref(x, w)) < 2e-6


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("group_size", [2, 6, 16, 48, 96])
@pytest.mark.parametrize("format", ["fp8", "int8", "int4", "fp4"])
def test_any_group_size(format: str, group_size: int, num_tokens: int) -> None:
    w = quantize(normal(70, 96), format, group_size)
    x = normal(num_tokens, 96, seed=1)
    assert relative_error(linear(x, prepare_linear(w)), linear_ref(x, w)) < 2e-6


def test_a_view_of_x_is_read_as_it_looks() -> None:
    w = prepare_linear(quantize(normal(64, 32), "fp4"))
    x = normal(3, 64)[:, ::2]
    np.testing.assert_array_equal(linear(x, w), linear(np.ascontiguousarray(x), w))


@formats
def test_preparing_does_not_change_the_tensor_it_was_given(format: str) -> None:
    w = quantize(normal(70, 64), format)
    kept = replace(w, **{name: a.copy() for name, a in w.arrays().items()})
    prepare_linear(w)
    for name, a in w.arrays().items():
        np.testing.assert_array_equal(a, kept.arrays()[name])
