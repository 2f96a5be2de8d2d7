"""QuantTensor: sizes, parts, joins."""

import numpy as np
import pytest

from npmoe.formats import QuantTensor, concatenate_rows, quantize, stack
from npmoe.formats.minifloat import E4M3
from tests.cases import FOUR_BIT, WEIGHT_FORMATS
from tests.helpers import normal

BITS_PER_WEIGHT = {
    **{"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8.5},
    "fp8": 8 + 32 / 64,  # one float32 per row, of 64 columns here
    **{"int4": 4.5, "int4_asym": 4.75, "fp4": 4.5, "mxfp4": 4.25, "nvfp4": 4.5},
}


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_bytes_per_weight(format: str) -> None:
    w = quantize(normal(8, 64), format)
    global_scale = 4 if format == "nvfp4" else 0
    assert w.nbytes == 8 * 64 * BITS_PER_WEIGHT[format] / 8 + global_scale
    assert w.shape == (8, 64)


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_a_stack_gives_its_parts_back(format: str) -> None:
    x = normal(3, 8, 64)
    whole = quantize(x, format)
    joined = stack([quantize(part, format) for part in x])
    assert whole.shape == joined.shape == (3, 8, 64)
    for w in (whole, joined):
        np.testing.assert_array_equal(w[1].dequantize(), quantize(x[1], format).dequantize())
        np.testing.assert_array_equal(w[1:].dequantize(), w.dequantize()[1:])
        assert (w[1].shape, w[1:].shape) == ((8, 64), (2, 8, 64))


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_rows_selected_then_decoded_are_rows_of_the_decoded(format: str) -> None:
    w = quantize(normal(8, 64), format)
    rows = np.array([5, 0, 5])
    picked = w.select_rows(rows)
    assert picked.shape == (3, 64)
    np.testing.assert_array_equal(picked.dequantize(), w.dequantize()[rows])


@pytest.mark.parametrize("format", [f for f in WEIGHT_FORMATS if f != "nvfp4"])
def test_joined_rows_are_those_of_the_parts(format: str) -> None:
    x = normal(8, 64)
    parts = [quantize(x[:2], format), quantize(x[2:], format)]
    joined = concatenate_rows(parts)
    assert joined.shape == (8, 64)
    np.testing.assert_array_equal(joined.dequantize(), quantize(x, format).dequantize())
    assert concatenate_rows(parts[:1]) is parts[0]


def test_what_does_not_belong_together_is_not_joined() -> None:
    x = normal(4, 64)
    with pytest.raises(ValueError, match="different formats"):
        concatenate_rows([quantize(x, "fp4"), quantize(x, "int4")])
    with pytest.raises(ValueError, match="different formats"):
        stack([quantize(x, "fp4", 32), quantize(x, "fp4", 16)])


def test_rows_keep_their_own_global_scale() -> None:
    parts = [quantize(normal(4, 64), "nvfp4"), quantize(3 * normal(2, 64), "nvfp4")]
    joined = concatenate_rows(parts)
    np.testing.assert_array_equal(
        joined.global_scale, [parts[0].global_scale] * 4 + [parts[1].global_scale] * 2
    )
    expected = np.concatenate([p.dequantize() for p in parts])
    np.testing.assert_array_equal(joined.dequantize(), expected)
    stacked = stack([joined, joined])
    np.testing.assert_array_equal(stacked.dequantize(), [expected, expected])
    np.testing.assert_array_equal(stacked[1].dequantize(), expected)
    np.testing.assert_array_equal(
        joined.select_rows(np.array([5, 0])).dequantize(), expected[[5, 0]]
    )


@pytest.mark.parametrize("heights", [(4, 3), (3, 4)])  # of blocks of 2 rows: 3 leaves one over
def test_blocks_of_rows_are_joined(heights: tuple[int, int]) -> None:
    parts = []
    for rows in heights:
        codes = np.full((rows, 4), E4M3.encode(np.ones(1, np.float32))[0])
        scales = normal(-(-rows // 2), 2, seed=rows)
        parts.append(QuantTensor("fp8", (rows, 4), codes, scales, block=(2, 2)))
    joined = concatenate_rows(parts)
    expected = np.concatenate([p.dequantize() for p in parts])
    np.testing.assert_array_equal(joined.dequantize(), expected)
    assert joined.block == ((2, 2) if heights[0] == 4 else (1, 2))


def test_fp8_with_one_scale_per_block_of_rows_and_columns() -> None:
    # Scales 1, 10 / 100, 1000 over blocks of 2 x 2 in a matrix of 3 x 4 of ones.
    codes = np.full((3, 4), E4M3.encode(np.ones(1, np.float32))[0])
    scales = np.array([[1, 10], [100, 1000]], np.float32)
    w = QuantTensor("fp8", (3, 4), codes, scales, block=(2, 2))
    assert w.dequantize().tolist() == [[1, 1, 10, 10]] * 2 + [[100, 100, 1000, 1000]]
    with pytest.raises(ValueError, match="scales per row"):
        w.select_rows(np.array([0]))


def test_an_unknown_format_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(ValueError, match=r"'fp3'.*mxfp4"):
        quantize(normal(2, 64), "fp3")


@pytest.mark.parametrize("format", FOUR_BIT)
def test_map_arrays_reaches_every_array(format: str) -> None:
    w = quantize(normal(2, 4, 64), format)
    assert w.map_arrays(lambda a: a[:1]).arrays().keys() == w.arrays().keys()
    assert w.map_arrays(np.zeros_like).nbytes == w.nbytes
