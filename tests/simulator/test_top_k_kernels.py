"""The router's choice by the Numba kernel: its definition, and the choice in CUDA C, exactly."""

import numpy as np
import pytest

from npmoe.ops.route import BEST_OF_ALL, TopKRule, _top_k_cuda, top_k_ref
from tests.cuda import build
from tests.cuda.test_route import hard_logits
from tests.helpers import by_name
from tests.router_cases import ROUTERS, RouterCase

REASON = build.missing()


def choose(
    logits: np.ndarray,
    k: int,
    renormalize: bool,
    rule: TopKRule = BEST_OF_ALL,
    selection_bias: np.ndarray | None = None,
    logits_bias: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(topk_weights, topk_ids) of the kernel, into arrays that hold nothing of use before."""
    weights = np.full((len(logits), k), np.nan, np.float32)
    ids = np.full((len(logits), k), -9, np.int32)
    _top_k_cuda(weights, ids, logits, renormalize, rule, selection_bias, logits_bias)
    return weights, ids


@by_name(ROUTERS)
def test_the_kernel_chooses_as_defined(case: RouterCase) -> None:
    arguments = case.k, case.renormalize, case.rule
    logits, *biases = case.arrays(3)
    weights, ids = choose(logits, *arguments, *biases)
    expected_weights, expected_ids = top_k_ref(logits, *arguments, *biases)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-6)


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
@pytest.mark.parametrize(
    ("experts", "k", "renormalize"),
    [(128, 8, True), (60, 4, False), (8, 2, True), (5, 5, False), (64, 1, True)],
)
def test_two_routers_agree_exactly(experts: int, k: int, renormalize: bool) -> None:
    logits = hard_logits(experts)
    weights, ids = choose(logits, k, renormalize)
    in_c = build.kernel("choose", "choose", EXPERTS=experts, TOP_K=k, RENORMALIZE=renormalize)
    c_ids, c_weights = np.empty_like(ids), np.empty_like(weights)
    build.launch(in_c, (len(logits),), 64, c_ids, c_weights, logits)
    np.testing.assert_array_equal(ids, c_ids)
    np.testing.assert_array_max_ulp(weights, c_weights, maxulp=2)


@pytest.mark.parametrize("renormalize", [False, True])
def test_nan_comes_last_and_every_place_is_filled(renormalize: bool) -> None:
    logits = np.zeros((2, 40), np.float32)
    logits[0, ::2], logits[1] = np.nan, np.nan
    weights, ids = choose(logits, 30, renormalize)
    expected_weights, expected_ids = top_k_ref(logits, 30, renormalize)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(np.isnan(weights), np.isnan(expected_weights))


def test_scores_that_are_all_zero_weigh_nothing() -> None:
    weights, ids = choose(np.full((1, 4), -1000, np.float32), 2, True, TopKRule("sigmoid"))
    assert (weights.tolist(), ids.tolist()) == ([[0, 0]], [[0, 1]])


def test_arrays_that_do_not_fit_are_named() -> None:
    assert choose(np.zeros((0, 8), np.float32), 2, True)[1].shape == (0, 2)
    with pytest.raises(ValueError, match="router_logits: expected float32"):
        choose(np.zeros((1, 8)), 2, True)
    with pytest.raises(ValueError, match=r"selection_bias: expected float32 \[8\]"):
        choose(
            *(np.zeros((1, 8), np.float32), 2, True),
            selection_bias=np.zeros(7, np.float32),
        )
    with pytest.raises(ValueError, match="1025 experts: the router takes at most 1024"):
        choose(np.zeros((1, 1025), np.float32), 2, True)
