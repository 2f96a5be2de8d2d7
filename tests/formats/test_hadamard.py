"""The rotation of heads: by hand, and what rotations must be."""

import numpy as np
import pytest

from npmoe.formats.hadamard import hadamard
from tests.helpers import normal, relative_error


def test_four_elements_by_hand() -> None:
    half = np.float32(0.5)
    assert hadamard(np.float32([8, 0, 0, 0])).tolist() == [4, 4, 4, 4]
    assert hadamard(np.float32([1, 2, 3, 4])).tolist() == [10 * half, -2 * half, -4 * half, 0]


def test_96_elements_are_three_blocks_of_32() -> None:
    x = np.zeros(96, np.float32)
    x[40] = np.sqrt(np.float32(32))
    turned = hadamard(x)
    assert (turned[:32] == 0).all()
    assert (turned[64:] == 0).all()
    np.testing.assert_allclose(abs(turned[32:64]), 1, rtol=1e-6)


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_it_is_its_own_inverse_and_keeps_products(dim: int) -> None:
    q, k = normal(5, 2, dim, seed=1), normal(5, 2, dim, seed=2)
    assert hadamard(q).dtype == np.float32
    assert relative_error(hadamard(hadamard(q)), q) < 1e-6
    assert relative_error((hadamard(q) * hadamard(k)).sum(-1), (q * k).sum(-1)) < 1e-5
