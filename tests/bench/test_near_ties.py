"""The watched router chooses as `route` does, or the next expert, and says how near that was."""

import numpy as np
import pytest

from npmoe.bench.near_ties import WatchedRouter
from npmoe.formats.quant_tensor import quantize
from npmoe.ops.route import route

LOGITS = np.array([[0.5, 4.0, 2.0, 1.0], [-4.0, 0.0, -1.0, -2.0]], np.float32)
ROUTER = quantize(np.eye(4, dtype=np.float32), "bf16")  # what comes normed are the logits


def watched(takes_next: list[bool], k: int, renormalize: bool = True) -> tuple:
    router = WatchedRouter(np.array([takes_next]))
    _, weights, ids = router(LOGITS, None, 1e-6, ROUTER, k, renormalize)
    return router.leads, weights, ids


@pytest.mark.parametrize("renormalize", [False, True])
def test_the_best_experts_and_their_lead(renormalize: bool) -> None:
    leads, weights, ids = watched([False, False], 2, renormalize)
    _, expected_weights, expected_ids = route(LOGITS, None, 1e-6, ROUTER, 2, renormalize)
    np.testing.assert_array_equal(weights, expected_weights)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(leads, [[(2 - 1) / 4, (-1 + 2) / 4]])


def test_the_next_expert_where_told_to() -> None:
    leads, weights, ids = watched([True, False], 2)
    np.testing.assert_array_equal(ids, [[1, 3], [1, 2]])
    ratio = np.exp([1.0 - 4.0, -1.0 - 0.0])  # of the second weight to the first
    np.testing.assert_allclose(weights, np.stack([1 / (1 + ratio), ratio / (1 + ratio)], 1), 1e-6)
    np.testing.assert_array_equal(leads, [[0.25, 0.25]])


def test_tied_experts_go_by_their_ids() -> None:
    router = WatchedRouter(np.array([[False, True]]))
    _, _, ids = router(np.zeros((2, 4), np.float32), None, 1e-6, ROUTER, 2, True)
    np.testing.assert_array_equal(ids, [[0, 1], [0, 2]])
    np.testing.assert_array_equal(router.leads, [[0, 0]])


def test_all_experts_have_no_next() -> None:
    _, _, ids = watched([True, True], 4)
    np.testing.assert_array_equal(np.sort(ids), [[0, 1, 2, 3]] * 2)
