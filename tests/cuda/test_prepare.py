"""cuda_src/prepare.cu on the CPU: the bits of the array code that defines it."""

import numpy as np
import pytest

from npmoe.formats.floats import encode_bf16
from npmoe.formats.quant_tensor import QuantTensor, quantize
from npmoe.models import prepare
from npmoe.models.conversion import convert_parameter
from npmoe.models.kernel_layout import prepare_for_gpu
from npmoe.models.parameters import ROUTER, Parameter
from npmoe.models.prepare import (
    KERNELS,
    NOT_FINITE,
    SCALE_TOO_LARGE,
    has_kernel,
    prepare_matrix,
)
from tests.cuda import build
from tests.cuda.support import SEEDS, Memory, same_bits

SHAPES = [  # name of the parameter, part, shape
    ("o_proj", "attention", (48, 256)),
    ("lm_head", "lm_head", (37, 640)),  # rows padded to 48; five slices, four warps a block
    ("gate_up_proj", "experts", (2, 2 * 24, 128)),  # gate and up alternate, padded to 128 pairs
    ("down_proj", "experts", (3, 32, 96)),  # rows and columns padded to 128
    ("o_proj", "attention", (16, 2080)),  # columns padded to 2304
]


def parameter(name: str, part: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(name, part, shape, (), ())


def values(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """float32 with groups of zeros, signed zeros, subnormal and large scales, and ties."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    x *= np.exp2(rng.integers(-30, 17, (*shape[:-1], 1))).astype(np.float32)
    x[..., 0, :32] = 0
    x[..., 1, :32] = -0.0
    x[..., 2, :32] = np.tile([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], 4)
    x[..., 3, :32] = np.arange(-16, 16) * np.float32(2.0**-40)
    return x


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Memory]:
    """Kernels run on the CPU, once in each order of threads; their memory is checked."""
    monkeypatch.setattr(prepare, "kernel", build.kernel)
    checked: list[Memory] = []

    def launch(function, grid, threads, records, flags, codes, scales, *sizes: int) -> None:
        for seed in SEEDS:
            memory = Memory()
            out, flag = memory.writable(np.full_like(records, 0xFF)), memory.writable(flags)
            given = [None if a is None else memory.read_only(a) for a in (codes, scales)]
            build.launch(function, grid, threads, out, flag, *given, *sizes, seed=seed)
            memory.check()
            assert seed == SEEDS[0] or (same_bits(out, records) and same_bits(flag, flags))
            records[...], flags[...] = out, flag
            checked.append(memory)

    monkeypatch.setattr(prepare, "launch", launch)
    return checked


@pytest.mark.parametrize(("stored", "target"), KERNELS)
@pytest.mark.parametrize(("name", "part", "shape"), SHAPES)
def test_the_bits_of_the_definition(
    on_cpu: list[Memory], name: str, part: str, shape: tuple[int, ...], stored: str, target: str
) -> None:
    p = parameter(name, part, shape)
    w = quantize(values(len(name), shape), stored)
    flags = np.zeros(1, np.int32)
    found = prepare_matrix(p, w, target, flags)
    expected = prepare_for_gpu(p, convert_parameter(p, w, {part: target}))
    assert len(on_cpu) == len(SEEDS)
    assert isinstance(found, QuantTensor)
    assert isinstance(expected, QuantTensor)
    assert (found.format, found.shape, found.layout, found.block) == (
        *(expected.format, expected.shape, expected.layout),
        expected.block,
    )
    assert same_bits(found.codes, expected.codes)
    assert flags == 0


@pytest.mark.sanitize
def test_under_sanitizers(on_cpu: list[Memory]) -> None:
    for stored, target in KERNELS:
        w = quantize(values(1, (1, 20, 160)), stored)
        prepare_matrix(
            parameter("gate_up_proj", "experts", w.shape), w, target, np.zeros(1, np.int32)
        )
    assert len(on_cpu) == len(SEEDS) * len(KERNELS)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x7F80, NOT_FINITE | SCALE_TOO_LARGE),  # infinity
        (0xFFC0, NOT_FINITE),  # NaN
        (0x4880, SCALE_TOO_LARGE),  # 2^18: a quarter of it is 65536
        (0x487F, 0),  # the bf16 below: the scales are finite
    ],
)
def test_what_fp4_cannot_hold_is_flagged(on_cpu: list[Memory], bits: int, expected: int) -> None:
    w = quantize(values(2, (16, 128)) / 2**17, "bf16")
    w.codes[5, 77] = bits
    flags = np.zeros(1, np.int32)
    prepare_matrix(parameter("o_proj", "attention", w.shape), w, "fp4", flags)
    assert flags[0] == expected
    try:
        quantize(w.dequantize(), "fp4")
    except ValueError:
        assert expected
    else:
        assert not expected


@pytest.mark.parametrize(
    ("stored", "target", "columns", "expected"),
    [
        ("bf16", "fp4", 96, True),
        ("bf16", "bf16", 72, True),
        ("bf16", "bf16", 100, False),  # not in units of 16 bytes
        ("fp32", "fp4", 128, False),
        ("fp4", "bf16", 128, False),
    ],
)
def test_which_matrices_have_a_kernel(
    stored: str, target: str, columns: int, expected: bool
) -> None:
    w = quantize(np.zeros((16, columns), np.float32), stored)
    assert has_kernel(w, target) == expected


@pytest.mark.parametrize("target", ["fp4", "fp8", "int4_asym", "nvfp4"])
@pytest.mark.parametrize("part_bytes", [1, 40_000, 1 << 30])
@pytest.mark.parametrize(
    ("name", "part", "shape"),
    [*SHAPES, ("o_proj", "attention", (2080, 96))],  # 2304 rows, whatever parts it could come in
)
def test_array_code_in_parts_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    part: str,
    shape: tuple[int, ...],
    part_bytes: int,
    target: str,
) -> None:
    """fp32 has no kernel: experts or rows are done a few at a time."""
    monkeypatch.setattr(prepare, "PART_BYTES", part_bytes)
    p = parameter(name, part, shape)
    w = quantize(values(3, shape), "fp32")
    found = prepare_matrix(p, w, target, np.zeros(1, np.int32))
    expected = prepare_for_gpu(p, convert_parameter(p, w, {part: target}))
    assert isinstance(found, QuantTensor)
    assert isinstance(expected, QuantTensor)
    assert (found.shape, found.layout) == (expected.shape, expected.layout)
    assert same_bits(found.codes, expected.codes)


@pytest.mark.parametrize("columns", [96, 128])
def test_a_router_is_copied_as_it_is(columns: int) -> None:
    """And its columns filled up with zeros."""
    w = QuantTensor("bf16", (4, columns), encode_bf16(values(4, (4, columns))))
    found = prepare_matrix(parameter("router", ROUTER, w.shape), w, "bf16", np.zeros(1, np.int32))
    assert same_bits(found, np.pad(w.codes, ((0, 0), (0, 128 - columns))))
    assert not np.shares_memory(found, w.codes)
