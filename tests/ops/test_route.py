"""Routing."""

import numpy as np
import pytest

from npmoe.formats import quantize
from npmoe.ops.linear import prepare_linear
from npmoe.ops.norm import rms_norm_ref
from npmoe.ops.route import TopKRule, route, softmax, top_k, top_k_ref
from tests.helpers import normal

LOGITS = np.log(np.array([[1, 4, 2, 3]], np.float32))  # probabilities .1, .4, .2, .3


def test_softmax_by_hand() -> None:
    np.testing.assert_allclose(softmax(LOGITS), [[0.1, 0.4, 0.2, 0.3]], rtol=1e-6)
    np.testing.assert_allclose(softmax(LOGITS + 1000), [[0.1, 0.4, 0.2, 0.3]], rtol=1e-4)


@pytest.mark.parametrize(
    ("renormalize", "expected"), [(False, [0.4, 0.3]), (True, [0.4 / 0.7, 0.3 / 0.7])]
)
def test_the_most_probable_come_first(renormalize: bool, expected: list[float]) -> None:
    weights, ids = top_k_ref(LOGITS, 2, renormalize)
    assert ids.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, [expected], rtol=1e-6)
    assert (weights.dtype, ids.dtype) == (np.float32, np.int32)


def test_ties_go_to_the_lower_expert_id() -> None:
    logits = np.array([[0, 1, 0, 1, 1], [2, 2, 2, 2, 2], [-0.0, 0.0, -1, 0.0, 0.0]], np.float32)
    _, ids = top_k_ref(logits, 3, False)
    assert ids.tolist() == [[1, 3, 4], [0, 1, 2], [0, 1, 3]]
    _, ids = top_k_ref(np.array([[0, 1] * 64], np.float32), 8, True)
    assert ids.tolist() == [[1, 3, 5, 7, 9, 11, 13, 15]]


def test_all_experts_renormalised_change_nothing() -> None:
    weights, ids = top_k_ref(LOGITS, 4, True)
    assert ids.tolist() == [[1, 3, 2, 0]]
    np.testing.assert_allclose(weights, [[0.4, 0.3, 0.2, 0.1]], rtol=1e-6)


def test_route_by_hand() -> None:
    # The norm makes (3, 4) * sqrt(2 / 25) * weight; expert 1 reads the second element only.
    x, norm = np.array([[3, 4, 0, 0]], np.float32), np.array([1, 2, 1, 1], np.float32)
    router = prepare_linear(quantize(np.eye(4, dtype=np.float32), "bf16"))
    normed, weights, ids = route(x, norm, 0.0, router, 2, True)
    np.testing.assert_allclose(normed, [[1.2, 3.2, 0, 0]], rtol=1e-6)
    assert ids.tolist() == [[1, 0]]
    first = 1 / (1 + np.exp(1.2 - 3.2))
    np.testing.assert_allclose(weights, [[first, 1 - first]], rtol=1e-5)


def test_a_router_bias_is_part_of_the_logits() -> None:
    # Logits 0 and biases log 1, 4, 2, 3: the chosen two share 4 to 3.
    router = quantize(np.zeros((4, 4), np.float32), "fp32")
    ones = np.ones((1, 4), np.float32)
    _, weights, ids = route(ones, ones[0], 1e-6, router, 2, True, bias=LOGITS[0])
    assert ids.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7]], rtol=1e-6)


def test_renormalised_weights_are_softmax_over_the_chosen_logits() -> None:
    logits = 8 * normal(50, 32)
    weights, ids = top_k_ref(logits, 4, True)
    chosen = np.take_along_axis(logits, ids, axis=1)
    np.testing.assert_allclose(weights, softmax(chosen), rtol=1e-6)


@pytest.mark.parametrize("format", ["bf16", "fp32"])
def test_a_token_is_routed_alike_alone_and_among_eight(format: str) -> None:
    x, norm = normal(8, 64), normal(64, seed=1)
    router = prepare_linear(quantize(normal(16, 64, seed=2), format))
    together = route(x, norm, 1e-6, router, 3, True)
    for t in range(8):
        for one, all in zip(
            route(x[t : t + 1], norm, 1e-6, router, 3, True), together, strict=True
        ):
            np.testing.assert_array_equal(one[0], all[t])
    np.testing.assert_allclose(together[0], rms_norm_ref(x, norm, 1e-6), rtol=1e-5)


EIGHT = np.log(np.array([[1, 2, 3, 4, 10, 5, 6, 9]], np.float32))  # of 40: .025 ... .225
SIGMOIDS = np.log(np.array([[1, 3, 1 / 3, 9]], np.float32))  # sigmoid: 1/2, 3/4, 1/4, 9/10


@pytest.mark.parametrize(
    ("renormalize", "expected"), [(False, [0.9, 0.75]), (True, [0.9 / 1.65, 0.75 / 1.65])]
)
def test_sigmoid_scores_by_hand(renormalize: bool, expected: list[float]) -> None:
    weights, ids = top_k_ref(SIGMOIDS, 2, renormalize, TopKRule("sigmoid"))
    assert ids.tolist() == [[3, 1]]
    np.testing.assert_allclose(weights, [expected], rtol=1e-6)


def test_sigmoids_of_large_logits_are_finite_and_still_in_order() -> None:
    logits = np.array([[-1000, 50, 100, -90]], np.float32)
    weights, ids = top_k_ref(logits, 4, False, TopKRule("sigmoid"))
    assert ids.tolist() == [[2, 1, 3, 0]]
    np.testing.assert_allclose(weights, [[1, 1, np.exp(np.float32(-90)), 0]], rtol=1e-6)
    weights, _ = top_k_ref(np.full((1, 4), -1000, np.float32), 2, True, TopKRule("sigmoid"))
    assert weights.tolist() == [[0, 0]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_selection_bias_chooses_and_weighs_nothing(scoring: str) -> None:
    logits = LOGITS if scoring == "softmax" else SIGMOIDS
    scores = [0.1, 0.4, 0.2, 0.3] if scoring == "softmax" else [0.5, 0.75, 0.25, 0.9]
    bias = np.array([10, 0, 20, 0], np.float32)
    rule = TopKRule(scoring)
    weights, ids = top_k_ref(logits, 2, False, rule, selection_bias=bias)
    assert ids.tolist() == [[2, 0]]
    np.testing.assert_allclose(weights, [[scores[2], scores[0]]], rtol=1e-6)
    weights, _ = top_k_ref(logits, 2, True, rule, selection_bias=bias)
    np.testing.assert_allclose(weights[0, 0], scores[2] / (scores[2] + scores[0]), rtol=1e-6)


def test_a_logits_bias_enters_the_weights() -> None:
    weights, ids = top_k_ref(np.zeros((1, 4), np.float32), 2, True, logits_bias=LOGITS[0])
    assert ids.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7]], rtol=1e-6)


@pytest.mark.parametrize(
    ("group_score", "topk_groups", "expected"),
    [
        ("best", 1, [4, 5]),  # groups of two: best 2, 4, 10, 9
        ("best", 2, [4, 7]),
        ("sum_of_two", 1, [4, 5]),  # sums 3, 7, 15, 15: the tie goes to the lower group
        ("sum_of_two", 2, [4, 7]),
    ],
)
def test_groups_by_hand(group_score: str, topk_groups: int, expected: list[int]) -> None:
    rule = TopKRule("softmax", 4, topk_groups, group_score, scaling=2.5)
    weights, ids = top_k_ref(EIGHT, 2, False, rule)
    assert ids.tolist() == [expected]
    np.testing.assert_allclose(weights, 2.5 * np.exp(EIGHT[:, expected]) / 40, rtol=1e-6)


def test_the_sum_of_two_can_beat_the_best_expert() -> None:
    logits = np.log(np.array([[8, 1, 5, 6]], np.float32))
    best = top_k_ref(logits, 2, False, TopKRule("softmax", 2, 1, "best"))
    summed = top_k_ref(logits, 2, False, TopKRule("softmax", 2, 1, "sum_of_two"))
    assert (best[1].tolist(), summed[1].tolist()) == ([[0, 1]], [[3, 2]])


def test_groups_are_compared_with_the_selection_bias() -> None:
    bias = np.array([0, 0, 1, 0, 0, 0, 0, 0], np.float32)
    rule = TopKRule("softmax", 4, 1, "sum_of_two")
    _, ids = top_k_ref(EIGHT, 2, False, rule, selection_bias=bias)
    assert ids.tolist() == [[2, 3]]


def test_experts_outside_the_best_groups_are_not_chosen_even_for_minus_infinity() -> None:
    logits = np.array([[5, -np.inf, 4, 4]], np.float32)
    _, ids = top_k_ref(logits, 2, False, TopKRule("softmax", 2, 1))
    assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("rule", [TopKRule(), TopKRule("softmax", 4, 2, "sum_of_two")])
def test_no_tokens(rule: TopKRule) -> None:
    weights, ids = top_k(EIGHT[:0], 2, True, rule)
    assert weights.shape == ids.shape == (0, 2)


def test_nan_comes_last_and_ids_stay_different() -> None:
    _, ids = top_k_ref(np.array([[np.nan, 1, np.nan, 2]], np.float32), 3, False)
    assert ids.tolist() == [[3, 1, 0]]


def test_top_k_fills_what_it_is_given() -> None:
    out = np.empty((1, 2), np.float32), np.empty((1, 2), np.int32)
    assert top_k(LOGITS, 2, False, out=out) is out
    np.testing.assert_allclose(out[0], [[0.4, 0.3]], rtol=1e-6)
    assert out[1].tolist() == [[1, 3]]


@pytest.mark.parametrize(
    ("k", "rule", "message"),
    [
        (0, TopKRule(), "k = 0: legal are 1 to 8"),
        (9, TopKRule(), "k = 9: legal are 1 to 8"),
        (5, TopKRule("softmax", 4, 2), "k = 5: legal are 1 to 4"),
        (1, TopKRule("softmax", 3, 2), "num_groups = 3: 8 experts"),
        (1, TopKRule("softmax", 8, 2, "sum_of_two"), "num_groups = 8: 8 experts, two or more"),
    ],
)
def test_what_cannot_be_chosen_is_refused(k: int, rule: TopKRule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        top_k(EIGHT, k, False, rule)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring": "relu"}, "scoring = 'relu': legal values are 'softmax', 'sigmoid'"),
        ({"group_score": "mean"}, "group_score = 'mean': legal values are 'best', 'sum_of_two'"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups = 5: legal are 1 to num_groups = 4"),
        ({"topk_groups": 0}, "topk_groups = 0"),
    ],
)
def test_illegal_rules_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopKRule(**options)


def test_route_hands_the_rule_and_the_selection_bias_on() -> None:
    # The router is the identity and the norm's input has mean square 1: logits 1, -1, 1, -1.
    x = np.array([[1, -1, 1, -1]], np.float32)
    router = prepare_linear(quantize(np.eye(4, dtype=np.float32), "fp32"))
    bias = np.array([0, 1, 0, 0], np.float32)
    _, weights, ids = route(
        x, np.ones(4, np.float32), 0.0, router, 2, False, None, TopKRule("sigmoid", scaling=2), bias
    )
    assert ids.tolist() == [[1, 0]]
    np.testing.assert_allclose(weights, [[2 / (1 + np.e), 2 / (1 + 1 / np.e)]], rtol=1e-6)


def test_sparsemixer_by_hand() -> None:
    # Jitter 0.1: a logit counts beside the best if it is at most 0.2 of the larger size below it.
    # First 10 beside 9 (0.1); 7 is too far. Then 9 beside 7.5 (1.5 / 9 < 0.2) and not 7 (2 / 9).
    logits = np.array([[7, 9, 7.5, 10]], np.float32)
    rule = TopKRule("sparsemixer", jitter=0.1)
    weights, ids = top_k(logits, 2, False, rule)
    assert ids.tolist() == [[3, 1]]
    want = [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-1.5))]
    np.testing.assert_allclose(weights, [want], rtol=1e-6)


def test_sparsemixer_compares_with_the_larger_size() -> None:
    # The best is -10.56; -12 is 1.44 / 12 = 0.12 below it and counts, -14 is 3.44 / 14 = 0.25.
    logits = np.array([[-12, -10.56, -14]], np.float32)
    weights, ids = top_k(logits, 1, False, TopKRule("sparsemixer", jitter=0.1))
    assert ids.tolist() == [[1]]
    np.testing.assert_allclose(weights, [[1 / (1 + np.exp(-1.44))]], rtol=1e-5)


def test_sparsemixer_gives_ties_to_the_lower_id() -> None:
    weights, ids = top_k(np.zeros((1, 4), np.float32), 2, False, TopKRule("sparsemixer"))
    assert ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[1 / 4, 1 / 3]], rtol=1e-6)
