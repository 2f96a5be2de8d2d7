"""cuda_src/weight_formats.cuh on the CPU: every code and scale of every format, as kernels read it.

A kernel that multiplies the unit vectors gives the matrix back, element by element.
"""

from dataclasses import replace

import numpy as np
import pytest

from npmoe.dtypes import Array
from npmoe.formats.fragments import COLUMNS, RECORDS, ROWS, to_fragments
from npmoe.formats.quant_tensor import QuantTensor, concatenate_rows, quantize, stack
from npmoe.models.kernel_layout import prepare_for_gpu, prepared_bytes
from npmoe.models.parameters import Parameter
from npmoe.ops.linear import linear_ref
from tests.cuda.support import TOLERANCE, streaming
from tests.helpers import normal, relative_error

FORMATS = tuple(RECORDS)
TOKENS = 8


def product(fragments: QuantTensor, x: Array) -> Array:
    """What `output` adds, float32 `[T, tiles * 16]`, of activations float32 `[T, K]`."""
    tiles, slices = fragments.codes.shape[:2]
    rows, columns = tiles * ROWS, slices * COLUMNS
    macros = {"K": columns, "TOKENS": TOKENS}
    unused = np.zeros(1, np.uint32)  # words to empty: none
    output = streaming(
        "output", "output", fragments.format, columns, tiles, rows, 2, tokens=TOKENS, **macros
    )
    found = np.zeros((len(x), rows), np.float32)
    for first in range(0, len(x), TOKENS):
        some = slice(first, first + TOKENS)
        output((1,), found[some], unused, fragments.codes, None, x[some], rows, 0, TOKENS, seed=0)
    return found


def as_read(fragments: QuantTensor) -> Array:
    """A matrix in the kernels' layout as float32 `[tiles * 16, K]`."""
    return product(fragments, np.eye(fragments.codes.shape[1] * COLUMNS, dtype=np.float32)).T


def every_code(fmt: str, rows: int, columns: int) -> QuantTensor:
    """All codes in random places under scales from one end of their range to the other."""
    rng = np.random.default_rng(7)
    if fmt == "bf16":
        codes = rng.integers(0, 1 << 16, (rows, columns)).astype(np.uint16)
        codes[codes & 0x7F80 > 0x7E00] &= 0xBFFF  # no infinity, no NaN
        return QuantTensor(fmt, codes.shape, codes)
    width = RECORDS[fmt].scale_columns
    groups = (rows, columns // width)
    zeros = global_scale = None
    if fmt == "fp8":
        codes = rng.permuted(np.arange(rows * columns) % 256).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 0x7E  # no NaN
        codes = codes.reshape(rows, columns)
        scales = (10.0 ** rng.uniform(-20, 30, groups)).astype(np.float32)
    else:
        codes = rng.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
        scales = rng.integers(0, 0x7C00, groups).astype(np.uint16).view(np.float16)
        scales[0, :2] = 0, np.finfo(np.float16).max
    if fmt == "int4_asym":
        zeros = rng.integers(0, 16, groups).astype(np.uint8)
    if fmt == "mxfp4":
        scales = rng.integers(37, 252, groups).astype(np.uint8)  # 2^-90 to 2^124
    if fmt == "nvfp4":
        scales = rng.permuted(np.arange(rows * columns // width) % 0x7F).reshape(groups)
        scales, global_scale = scales.astype(np.uint8), np.float32(0.1)
    return QuantTensor(fmt, (rows, columns), codes, scales, zeros, global_scale, (1, width))


def assert_read(found: Array, expected: Array, fmt: str) -> None:
    """Equal, but that kernels flush subnormal results; nvfp4 within the rounding of its two scales,
    which kernels do not round together."""
    expected = np.where(np.abs(expected) < np.finfo(np.float32).tiny, 0, expected)
    if fmt == "nvfp4":
        np.testing.assert_allclose(found, expected, rtol=2**-22, atol=0)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_code_and_scale_is_read_in_its_place(fmt: str) -> None:
    w = every_code(fmt, 32, 256)
    assert np.unique(w.codes).size >= 254
    assert_read(as_read(to_fragments(w)), w.dequantize(), fmt)


@pytest.mark.parametrize("block", [(128, 128), (16, 128), (1, 256), (144, 256), (40, 384)])
def test_fp8_with_scales_of_blocks_channels_or_all(block: tuple[int, int]) -> None:
    rows, columns = 144, 256
    codes = quantize(normal(rows, columns), "fp8").codes
    shape = -(-rows // block[0]), -(-columns // block[1])
    scales = np.arange(1, 1 + shape[0] * shape[1], dtype=np.float32).reshape(shape)
    w = QuantTensor("fp8", (rows, columns), codes, scales, block=block)
    assert_read(as_read(to_fragments(w)), w.dequantize(), "fp8")


@pytest.mark.parametrize("fmt", ["int4", "int4_asym", "fp4"])
def test_larger_groups(fmt: str) -> None:
    w = quantize(normal(16, 256), fmt, group_size=128)
    assert_read(as_read(to_fragments(w)), w.dequantize(), fmt)


@pytest.mark.parametrize("exponent", [-60, 31])
@pytest.mark.parametrize("fmt", FORMATS)
def test_activations_of_any_size(fmt: str, exponent: int) -> None:
    w, x = quantize(normal(32, 256), fmt), normal(TOKENS, 256, seed=1)
    x *= np.float32(2.0**exponent) / np.abs(x).max()
    found = product(to_fragments(w), x)
    assert relative_error(found, linear_ref(x, w)) < TOLERANCE


@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_are_prepared_with_alternating_rows_and_padding(fmt: str) -> None:
    """Two experts of width 24 on 160 columns; fp8 with a scale for 32 rows, which straddle both."""
    experts, width, columns = 2, 24, 160
    w = quantize(normal(experts, 2 * width, columns), fmt)
    if fmt == "fp8":
        scales = np.arange(1, 9, dtype=np.float32).reshape(experts, 2, 2)
        w = QuantTensor(fmt, w.shape, w.codes, scales, block=(32, 128))
    parameter = Parameter("layers.0.gate_up_proj", "experts", w.shape, (), (width, width))
    prepared = prepare_for_gpu(parameter, w)
    assert prepared.shape == (experts, 256, 256)
    expected = np.zeros(prepared.shape, np.float32)
    dense = w.dequantize()
    expected[:, 0 : 2 * width : 2, :columns] = dense[:, :width]
    expected[:, 1 : 2 * width : 2, :columns] = dense[:, width:]
    for e in range(experts):
        assert_read(as_read(prepared[e]), expected[e], fmt)


def test_gate_and_up_keep_their_nvfp4_global_scales() -> None:
    experts, width, columns = 2, 24, 160
    halves = normal(experts, 2, width, columns) * np.array([1, 9.7])[:, None, None]
    w = stack([concatenate_rows([quantize(half, "nvfp4") for half in both]) for both in halves])
    assert len(np.unique(w.global_scale)) == 4
    parameter = Parameter("layers.0.gate_up_proj", "experts", w.shape, (), (width, width))
    prepared = prepare_for_gpu(parameter, w)
    expected = np.zeros(prepared.shape, np.float32)
    dense = w.dequantize()
    expected[:, 0 : 2 * width : 2, :columns] = dense[:, :width]
    expected[:, 1 : 2 * width : 2, :columns] = dense[:, width:]
    for e in range(experts):
        assert_read(as_read(prepared[e]), expected[e], "nvfp4")


def test_joined_rows_keep_their_nvfp4_global_scales() -> None:
    """As q, k and v do; the last tile is padded."""
    parts = [quantize((i + 1) * normal(rows, 128), "nvfp4") for i, rows in enumerate((32, 16, 11))]
    w = concatenate_rows(parts)
    assert_read(as_read(to_fragments(w))[:59], w.dequantize(), "nvfp4")
    with pytest.raises(ValueError, match="global scales change within a tile of 16 rows"):
        to_fragments(concatenate_rows(parts[1:] + parts[:1]))


@pytest.mark.parametrize("fmt", ["int4", "int4_asym"])
def test_float32_scales_are_rounded_to_fp16(fmt: str) -> None:
    w = quantize(normal(16, 128), fmt)
    wide = replace(w, scales=w.scales.astype(np.float32) * np.float32(1 + 2**-14))
    np.testing.assert_array_equal(to_fragments(wide).codes, to_fragments(w).codes)


@pytest.mark.parametrize("part", ["experts", "attention", "router"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_prepared_bytes(part: str, fmt: str) -> None:
    fmt = "bf16" if part == "router" else fmt
    for name, shape in (("gate_up_proj", (3, 48, 160)), ("down_proj", (3, 50, 160))):
        shape = shape if part == "experts" else shape[1:]
        p = Parameter(f"layers.0.{name}", part, shape, (), ())
        assert prepared_bytes(p, fmt) == prepare_for_gpu(p, quantize(normal(*shape), fmt)).nbytes


def test_the_smallest_mxfp4_scale_counts_as_zero() -> None:
    w = quantize(normal(16, 128), "mxfp4")
    w.scales[:, 1] = 0
    expected = w.dequantize()
    assert 0 < np.abs(expected[:, 32:64]).max() < 3.6e-38
    expected[:, 32:64] = 0
    assert_read(as_read(to_fragments(w)), expected, "mxfp4")


def test_what_kernels_cannot_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no decode kernel reads int8; there are .*nvfp4"):
        to_fragments(quantize(normal(16, 128), "int8"))
    with pytest.raises(ValueError, match="multiples of 128, not 96"):
        to_fragments(quantize(normal(16, 96), "mxfp4"))
    with pytest.raises(ValueError, match=r"fp4 scales for 32 columns .* not for 16"):
        to_fragments(quantize(normal(16, 128), "fp4", group_size=16))
    w = quantize(normal(16, 128), "nvfp4")
    w.scales[3, 5] |= 0x80
    with pytest.raises(ValueError, match="must not be negative"):
        to_fragments(w)
    w = quantize(normal(16, 128), "int4_asym")
    w.zeros[7, 2] = 16
    with pytest.raises(ValueError, match="zeros are 0 to 15"):
        to_fragments(w)
