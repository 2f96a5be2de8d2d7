"""Gated MLPs, dense and routed."""

import numpy as np
import pytest

from npmoe.formats import QuantTensor, quantize
from npmoe.ops.experts import PLAIN, SwiGLU, add_experts, add_mlp, experts_ref, swiglu, swiglu_ref
from npmoe.ops.linear import prepare_linear
from npmoe.ops.route import top_k_ref
from tests.cases import EXPERTS, WEIGHT_FORMATS, ExpertsCase
from tests.helpers import by_name, normal, relative_error

SILU_2 = 2 / (1 + np.exp(-2))
CLAMPED = SwiGLU(alpha=1.5, limit=3.0, offset=1.0)


@pytest.mark.parametrize("function", [swiglu, swiglu_ref])
def test_swiglu_by_hand(function) -> None:
    with np.errstate(over="ignore"):  # exp(100)
        out = function(np.array([[2, 0, -100, 3, 5, 7]], np.float32))
    np.testing.assert_allclose(out, [[SILU_2 * 3, 0, 0]], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("function", [swiglu, swiglu_ref])
def test_clamped_swiglu_by_hand(function) -> None:
    # Gates 2, 5, -5 are 2, 3, -5, ups 1, 9, -9 are 1, 3, -3; then one is added to each up.
    out = function(np.array([[2, 5, -5, 1, 9, -9]], np.float32), CLAMPED)
    expected = [2 / (1 + np.exp(-3)) * 2, 3 / (1 + np.exp(-4.5)) * 4, -5 / (1 + np.exp(7.5)) * -2]
    np.testing.assert_allclose(out, [expected], rtol=1e-6)


@pytest.mark.parametrize("kind", [PLAIN, CLAMPED])
@pytest.mark.parametrize("function", [swiglu, swiglu_ref])
def test_swiglu_of_nan_is_nan(function, kind: SwiGLU) -> None:
    out = function(np.array([[np.nan, 1, 1, np.nan]], np.float32), kind)
    assert np.isnan(out).all()


@pytest.mark.parametrize("kind", [PLAIN, CLAMPED])
def test_swiglu_agrees_with_the_definition(kind: SwiGLU) -> None:
    x = 4 * normal(5, 70)
    assert relative_error(swiglu(x, kind), swiglu_ref(x, kind)) < 1e-6


def run(case: ExpertsCase, format: str) -> tuple[np.ndarray, tuple, tuple]:
    """x, (gate_up, down) as encoded, and the router's choice and biases of a case."""
    gate_up = quantize(normal(case.num_experts, 2 * case.width, case.hidden, seed=1), format)
    down = quantize(normal(case.num_experts, case.hidden, case.width, seed=2), format)
    choice = top_k_ref(normal(case.num_tokens, case.num_experts, seed=3), case.top_k, True)
    if case.biases:
        biases = (normal(case.num_experts, n, seed=n) for n in (2 * case.width, case.hidden))
        choice = (*choice, *biases, CLAMPED)
    return normal(case.num_tokens, case.hidden), (gate_up, down), choice


def added(x: np.ndarray, weights: tuple[QuantTensor, QuantTensor], choice: tuple) -> np.ndarray:
    residual = np.zeros_like(x)
    add_experts(residual, x, *map(prepare_linear, weights), *choice)
    return residual


@by_name(EXPERTS)
@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_agrees_with_the_definition(case: ExpertsCase, format: str) -> None:
    x, weights, choice = run(case, format)
    assert relative_error(added(x, weights, choice), experts_ref(x, *weights, *choice)) < 5e-6


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_a_token_gets_the_same_bits_alone_and_among_eight(format: str) -> None:
    x, weights, choice = run(ExpertsCase("", 8, 64, 32, 4, 2, biases=True), format)
    together = added(x, weights, choice)
    for t in range(8):
        own = (*(c[t : t + 1] for c in choice[:2]), *choice[2:])
        alone = added(x[t : t + 1], weights, own)
        np.testing.assert_array_equal(alone[0], together[t])


def test_two_experts_by_hand() -> None:
    # Expert e: gate = x0, up = (e + 1) x1, down puts the product on output e. x = (2, 3).
    gate_up, down = np.zeros((2, 2, 4), np.float32), np.zeros((2, 4, 4), np.float32)
    gate_up[:, 0, 0] = 1
    gate_up[:, 1, 1] = 1, 2
    down = np.zeros((2, 4, 1), np.float32)
    down[0, 0], down[1, 1] = 1, 1
    residual = np.array([[10, 10, 10, 10]], np.float32)
    x = np.array([[2, 3, 0, 0]], np.float32)
    weights = np.array([[0.25, 0.5]], np.float32)
    parts = [prepare_linear(quantize(w, "fp32")) for w in (gate_up, down)]
    add_experts(residual, x, *parts, weights, np.array([[1, 0]], np.int32))
    expected = [10 + 0.5 * SILU_2 * 3, 10 + 0.25 * SILU_2 * 6, 10, 10]
    np.testing.assert_allclose(residual, [expected], rtol=1e-6)


def test_biases_and_clamped_activation_by_hand() -> None:
    # No weights: each expert's gate is 2, its up -9 and so -3, and its output bias (e + 1, 10).
    gate_up = quantize(np.zeros((2, 2, 4), np.float32), "fp32")
    down = quantize(np.array([[[1], [0]]] * 2, np.float32), "fp32")
    biases = np.array([[2, -9]] * 2, np.float32), np.array([[1, 10], [2, 10]], np.float32)
    choice = np.array([[0.25, 0.75]], np.float32), np.array([[1, 0]], np.int32)
    residual = np.zeros((1, 2), np.float32)
    add_experts(residual, np.ones((1, 4), np.float32), gate_up, down, *choice, *biases, CLAMPED)
    hidden = 2 / (1 + np.exp(-3)) * -2
    np.testing.assert_allclose(residual, [[hidden + 0.25 * 2 + 0.75 * 1, 10]], rtol=1e-6)


def test_no_tokens() -> None:
    x, weights, _ = run(EXPERTS[0], "fp4")
    choice = np.zeros((0, 2), np.float32), np.zeros((0, 2), np.int32)
    assert added(x[:0], weights, choice).shape == (0, 64)


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_add_mlp_adds_to_the_residual(num_tokens: int) -> None:
    x, gate_up, down = normal(num_tokens, 64), normal(64, 64, seed=1), normal(64, 32, seed=2)
    biases = normal(64, seed=3), normal(64, seed=4)
    residual = normal(num_tokens, 64, seed=5)
    want = residual + swiglu_ref(x @ gate_up.T + biases[0]) @ down.T + biases[1]
    add_mlp(residual, x, quantize(gate_up, "fp32"), quantize(down, "fp32"), *biases)
    assert relative_error(residual, want) < 5e-6


def test_a_gated_mlp_by_hand() -> None:
    # gate = x0, up = x1, so the MLP puts silu(2) * 3 on output 0; the gate is sigmoid(x0 - x1).
    gate_up, down = np.eye(2, dtype=np.float32), np.array([[1], [0]], np.float32)
    residual = np.array([[10, 10]], np.float32)
    x = np.array([[2, 3]], np.float32)
    gate = quantize(np.array([[1, -1]], np.float32), "fp32")
    add_mlp(residual, x, quantize(gate_up, "fp32"), quantize(down, "fp32"), gate=gate)
    np.testing.assert_allclose(residual, [[10 + SILU_2 * 3 / (1 + np.exp(1)), 10]], rtol=1e-6)
