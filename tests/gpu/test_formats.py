"""Weights are quantised and laid out on a GPU to the same bytes as with NumPy."""

import numpy as np
import pytest

from npmoe.formats.fragments import RECORDS, to_fragments
from npmoe.formats.quant_tensor import quantize
from npmoe.models.gpu import prepare_for_gpu
from npmoe.models.parameters import Parameter
from npmoe.runtime.device import to_device
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
