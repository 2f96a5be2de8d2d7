"""Arrays that do not fit are named."""

import numpy as np
import pytest

from npmoe.runtime.check import check_array


@pytest.mark.parametrize("shape", [(2, 3), (2, None), (None, None)])
def test_arrays_that_fit(shape: tuple) -> None:
    check_array("x", np.zeros((2, 3), np.float32), np.float32, *shape)


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (np.zeros((2, 3)), r"float64 \[2, 3\]"),
        (np.zeros((2, 4), np.float32), r"float32 \[2, 4\]"),
        (np.zeros(2, np.float32), r"float32 \[2\]"),
        (np.zeros((3, 2), np.float32).T, r"float32 \[2, 3\], not contiguous"),
    ],
)
def test_arrays_that_do_not_fit(array: np.ndarray, got: str) -> None:
    with pytest.raises(ValueError, match=r"x: expected float32 \[any, 3\], C-contig.*got " + got):
        check_array("x", array, np.float32, None, 3)
