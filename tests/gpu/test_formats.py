"""Weights on a GPU: quantised and laid out to NumPy's bytes, and read as they are."""

from dataclasses import replace

import numpy as np
import pytest

from npmoe.formats.fragments import COLUMNS, RECORDS, ROWS, to_fragments
from npmoe.formats.quant_tensor import QuantTensor, quantize
from npmoe.models.kernel_layout import prepare_for_gpu
from npmoe.models.parameters import Parameter
from npmoe.models.stream import W_CODES, Stream
from npmoe.runtime.device import cupy, to_device
from npmoe.runtime.launch import launch
from npmoe.runtime.nvrtc import bulk, kernel
from tests.cuda.test_weight_formats import TOKENS, assert_read, every_code
from tests.helpers import normal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fmt", RECORDS)
def test_a_gpu_quantises_as_numpy_does(fmt: str) -> None:
    x = normal(2, 48, 256) * np.exp(3 * normal(2, 48, 1, seed=1))
    x[0, :, 32:64] = 0
    expected, found = quantize(x, fmt), quantize(to_device(x, "cuda"), fmt)
    assert found.arrays().keys() == expected.arrays().keys()
    for name, array in expected.arrays().items():
        np.testing.assert_array_equal(getattr(found, name).get(), array, err_msg=name)
    np.testing.assert_array_equal(to_fragments(found).codes.get(), to_fragments(expected).codes)


@pytest.mark.parametrize("fmt", RECORDS)
def test_a_gpu_prepares_experts_as_numpy_does(fmt: str) -> None:
    w = quantize(normal(2, 48, 160), fmt)
    parameter = Parameter("layers.0.gate_up_proj", "experts", w.shape, (), (24, 24))
    found = prepare_for_gpu(parameter, w.map_arrays(lambda a: to_device(a, "cuda")))
    assert found.shape == (2, 256, 256)
    np.testing.assert_array_equal(found.codes.get(), prepare_for_gpu(parameter, w).codes)


@pytest.mark.parametrize("fmt", RECORDS)
def test_every_code_and_scale_is_read_in_its_place(fmt: str) -> None:
    assert_read(as_read(w := every_code(fmt, 32, 256)), w.dequantize(), fmt)


def test_rows_keep_their_nvfp4_global_scales() -> None:
    """Even and odd rows, as gate and up are laid out."""
    w = every_code("nvfp4", 32, 256)
    w = replace(w, global_scale=np.array([0.1, 7.3] * 16, np.float32))
    assert_read(as_read(w), w.dequantize(), "nvfp4")


def as_read(w: QuantTensor) -> np.ndarray:
    """As in tests/cuda/test_weight_formats.py: unit vectors through `output` give the matrix."""
    xp, fmt, (rows, columns) = cupy(), w.format, w.shape
    records = xp.asarray(to_fragments(w).codes)
    shared = xp.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
    stream = Stream.fit(fmt, columns // COLUMNS, 1, TOKENS, rows // ROWS, 1, bulk(), shared)
    macros = {"K": columns, "TOKENS": TOKENS, "W_FORMAT": W_CODES[fmt]}
    output = kernel("output", "output", **macros, **stream.macros())
    x, found = xp.eye(columns, dtype=xp.float32), xp.zeros((columns, rows), xp.float32)
    unused = xp.zeros(1, xp.uint32)  # words to empty: none
    for first in range(0, columns, TOKENS):
        some = slice(first, first + TOKENS)
        arguments = (found[some], unused, records, None, x[some], rows, 0, TOKENS)
        launch(output, (1,), stream.threads, *arguments, shared=stream.shared)
    return found.get().T
