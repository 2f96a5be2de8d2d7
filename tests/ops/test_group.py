"""Pairs grouped by expert."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from npmoe.ops.group import MAX_PAIRS, group_by_expert, group_by_expert_ref


def test_by_hand() -> None:
    # Pairs 0 .. 5 choose 2 0 / 1 2 / 2 0 of four experts.
    topk_ids = np.array([[2, 0], [1, 2], [2, 0]], np.int32)
    counts, offsets, pairs = group_by_expert_ref(topk_ids, 4)
    assert counts.tolist() == [2, 1, 3, 0]
    assert offsets.tolist() == [0, 2, 3, 6, 6]
    assert pairs.tolist() == [1, 5, 2, 0, 3, 4]
    assert {a.dtype for a in (counts, offsets, pairs)} == {np.dtype(np.int32)}


def test_ids_that_name_no_expert_are_left_out() -> None:
    counts, offsets, pairs = group_by_expert_ref(np.array([[1, -1], [0, 2]], np.int32), 2)
    assert counts.tolist() == [1, 1]
    assert offsets.tolist() == [0, 1, 2]
    assert pairs.tolist() == [2, 0, -1, -1]


def test_no_tokens() -> None:
    counts, offsets, pairs = group_by_expert(np.empty((0, 8), np.int32), 3)
    assert (counts.tolist(), offsets.tolist(), pairs.tolist()) == ([0, 0, 0], [0, 0, 0, 0], [])


@given(data=st.data(), num_experts=st.integers(1, 9))
def test_every_pair_stands_once_among_those_of_its_expert_in_order(
    data: st.DataObject, num_experts: int
) -> None:
    shape = data.draw(st.tuples(st.integers(0, 12), st.integers(1, 5)))
    topk_ids = data.draw(arrays(np.int32, shape, elements=st.integers(-1, num_experts)))
    counts, offsets, pairs = group_by_expert(topk_ids, num_experts)
    ids = topk_ids.reshape(-1).tolist()
    assert counts.tolist() == [ids.count(e) for e in range(num_experts)]
    assert offsets.tolist() == [sum(counts[:e]) for e in range(num_experts + 1)]
    for e in range(num_experts):
        mine = pairs[offsets[e] : offsets[e + 1]].tolist()
        assert mine == [pair for pair, chosen in enumerate(ids) if chosen == e]
    assert (pairs[offsets[-1] :] == -1).all()


def test_group_by_expert_fills_what_it_is_given() -> None:
    out = np.empty(2, np.int32), np.empty(3, np.int32), np.empty(2, np.int32)
    assert group_by_expert(np.array([[1, 0]], np.int32), 2, out) is out
    assert [a.tolist() for a in out] == [[1, 1], [0, 1, 2], [1, 0]]


def test_sizes_beyond_the_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="num_experts = 513: legal are 1 to 512"):
        group_by_expert(np.zeros((1, 1), np.int32), 513)
    with pytest.raises(ValueError, match="num_experts = 0"):
        group_by_expert(np.zeros((1, 1), np.int32), 0)
    with pytest.raises(ValueError, match="65540 pairs: at most 65536"):
        group_by_expert(np.zeros((MAX_PAIRS // 4 + 1, 4), np.int32), 8)
