"""RMS norm."""

import numpy as np
import pytest

from npmoe.ops.norm import layer_norm, rms_norm, rms_norm_ref
from tests.helpers import normal, relative_error


@pytest.mark.parametrize("norm", [rms_norm, rms_norm_ref])
def test_by_hand(norm) -> None:
    # mean square of (3, 4) is 12.5, and 12.5 + 3.5 = 16.
    x = np.array([[3, 4]], np.float32)
    assert norm(x, np.array([1, 2], np.float32), 3.5).tolist() == [[0.75, 2]]
    assert norm(np.zeros((1, 2), np.float32), np.ones(2, np.float32), 1e-6).tolist() == [[0, 0]]


@pytest.mark.parametrize("shape", [(1, 64), (5, 100), (3, 2, 16), (0, 8)])
def test_agrees_with_the_definition(shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape), normal(shape[-1], seed=1)
    out = rms_norm(x, weight, 1e-6)
    assert (out.shape, out.dtype) == (shape, np.float32)
    assert relative_error(out, rms_norm_ref(x, weight, 1e-6)) < 1e-6


def test_takes_a_view_of_every_second_element() -> None:
    x, weight = normal(3, 32), normal(16, seed=1)
    assert (
        relative_error(rms_norm(x[:, ::2], weight, 0.1), rms_norm_ref(x[:, ::2], weight, 0.1))
        < 1e-6
    )


def test_layer_norm_by_hand() -> None:
    # Mean 4 and variance 4, and 4 + 12 = 16: (2, 6) becomes (-0.5, 0.5), then weight and bias.
    x = np.array([[2, 6], [4, 4]], np.float32)
    out = layer_norm(x, np.array([2, 4], np.float32), np.array([1, 10], np.float32), 12.0)
    assert out.dtype == np.float32
    assert out.tolist() == [[0, 12], [1, 10]]
