"""Nibbles and groups."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from npmoe.formats import pack_nibbles, unpack_nibbles
from npmoe.formats.groups import divide, join, split


def test_the_first_element_sits_in_the_low_nibble() -> None:
    assert pack_nibbles(np.array([1, 2, 15, 0], np.uint8)).tolist() == [0x21, 0x0F]
    assert unpack_nibbles(np.array([0x21, 0x0F], np.uint8)).tolist() == [1, 2, 15, 0]


@given(arrays(np.uint8, st.tuples(st.integers(1, 3), st.integers(1, 9))))
def test_unpack_then_pack_gives_the_bytes_back(packed: np.ndarray) -> None:
    nibbles = unpack_nibbles(packed)
    assert nibbles.shape == (packed.shape[0], 2 * packed.shape[1])
    np.testing.assert_array_equal(pack_nibbles(nibbles), packed)


def test_an_odd_number_of_nibbles_is_refused() -> None:
    with pytest.raises(ValueError, match="3 codes"):
        pack_nibbles(np.zeros(3, np.uint8))


def test_split_and_join_use_neighbours_of_the_last_axis() -> None:
    assert split(np.arange(4.0), 2).tolist() == [[0, 1], [2, 3]]
    assert join(np.array([1, 2, 3, 4]), np.array([10, 100])).tolist() == [10, 20, 300, 400]
    zeros = np.array([1, 2], np.uint8)
    assert join(np.array([1, 2, 3, 4]), np.array([10, 100]), zeros).tolist() == [0, 10, 100, 200]


@pytest.mark.parametrize("group_size", [3, 0, -2, 8])
def test_a_group_that_does_not_divide_is_refused(group_size: int) -> None:
    with pytest.raises(ValueError, match=f"group_size = {group_size}"):
        split(np.zeros(4), group_size)


def test_dividing_by_a_zero_scale_gives_zero() -> None:
    assert divide(np.array([[2.0, 4.0], [1.0, 1.0]]), np.array([2.0, 0.0])).tolist() == [
        [1, 2],
        [0, 0],
    ]
