"""Grouping by expert by the Numba kernels, in blocks so small that a few pairs fill several."""

import numpy as np
import pytest

from npmoe.ops import group
from npmoe.ops.group import _group_by_expert_cuda, group_by_expert_ref, group_workspace

BLOCK = 32


@pytest.mark.parametrize(
    ("num_tokens", "k", "num_experts"),
    [
        (0, 2, 3),  # nothing
        (1, 1, 1),
        (3, 4, 7),  # part of one block
        (16, 2, 5),  # one block exactly
        (33, 1, 2),  # one block and one pair
        (20, 8, 64),  # five blocks, more experts than threads
        (9, 6, 130),
    ],
)
def test_the_kernels_group_as_defined(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, k: int, num_experts: int
) -> None:
    monkeypatch.setattr(group, "PAIRS_PER_BLOCK", BLOCK)
    rng = np.random.default_rng(num_tokens)
    topk_ids = rng.integers(-1, num_experts + 1, (num_tokens, k)).astype(np.int32)
    num_pairs = num_tokens * k
    found = tuple(np.full(n, -7, np.int32) for n in (num_experts, num_experts + 1, num_pairs))
    workspace = np.full(group_workspace(num_pairs, num_experts), -7, np.int32)
    _group_by_expert_cuda(*found, topk_ids, workspace)
    for got, expected in zip(found, group_by_expert_ref(topk_ids, num_experts), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_all_pairs_of_one_expert_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "PAIRS_PER_BLOCK", BLOCK)
    counts, offsets, pairs = (np.empty(n, np.int32) for n in (3, 4, 70))
    workspace = np.empty(group_workspace(70, 3), np.int32)
    _group_by_expert_cuda(counts, offsets, pairs, np.full((35, 2), 1, np.int32), workspace)
    assert counts.tolist() == [0, 70, 0]
    assert offsets.tolist() == [0, 0, 70, 70]
    assert pairs.tolist() == list(range(70))


def test_arrays_that_do_not_fit_are_named() -> None:
    out = [np.empty(n, np.int32) for n in (4, 5, 6)]
    ids, workspace = np.zeros((3, 2), np.int32), np.empty((1, 4), np.int32)
    with pytest.raises(ValueError, match="topk_ids: expected int32"):
        _group_by_expert_cuda(*out, ids.astype(np.int64), workspace)
    with pytest.raises(ValueError, match=r"workspace: expected int32 \[1, 4\]"):
        _group_by_expert_cuda(*out, ids, workspace[:, :3])
    with pytest.raises(ValueError, match=r"expert_offsets: expected int32 \[5\]"):
        _group_by_expert_cuda(out[0], out[0], out[2], ids, workspace)
