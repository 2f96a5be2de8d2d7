"""Routing."""

import numpy as np
import pytest

from npmoe.formats import quantize
from npmoe.ops.linear import prepare_linear
from npmoe.ops.norm import rms_norm_ref
from npmoe.ops.route import route, softmax, top_k_ref
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
