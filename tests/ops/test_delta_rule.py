"""The gated delta rule."""

import numpy as np
import pytest

from npmoe.ops.delta_rule import delta_gates, delta_rule, delta_rule_ref
from tests.helpers import normal, relative_error

both = pytest.mark.parametrize("rule", [delta_rule, delta_rule_ref])
HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 16, 24


def random_inputs(num_tokens: int) -> tuple[np.ndarray, ...]:
    """q, k, v, decay, beta of `num_tokens` tokens."""
    keys = num_tokens, KEY_HEADS, KEY_DIM
    a, b = normal(num_tokens, HEADS, seed=3), normal(num_tokens, HEADS, seed=4)
    gates = delta_gates(b, a, np.linspace(-2, 1, HEADS, dtype=np.float32), a[0])
    return (
        normal(*keys),
        normal(*keys, seed=1),
        normal(num_tokens, HEADS, VALUE_DIM, seed=2),
        *gates,
    )


def empty_state(slots: int = 1) -> np.ndarray:
    return np.zeros((slots, HEADS, KEY_DIM, VALUE_DIM), np.float32)


def one(stop: int) -> tuple[np.ndarray, np.ndarray]:
    """A sequence of `stop` tokens in slot 0."""
    return np.array([0, stop], np.int32), np.zeros(1, np.int32)


@both
def test_by_hand(rule) -> None:
    # One head, Dk = 4, so q is scaled by 1/2. The first token writes 10 under the key e0. The
    # second halves that, writes half of the way from it to 20 under e0: 5 + (20 - 5) / 2 = 12.5.
    # The third forgets all but a tenth, writes nothing and asks for e0 + e1 over its length.
    e0, e1 = np.eye(4, dtype=np.float32)[:2]
    k = np.array([3 * e0, e0, e1])[:, None]
    q = np.array([e0, 2 * e0, e0 + e1])[:, None]
    v = np.array([10, 20, 30], np.float32).reshape(3, 1, 1)
    decay = np.array([[0.7], [0.5], [0.1]], np.float32)
    beta = np.array([[1], [0.5], [0]], np.float32)
    state = np.zeros((1, 1, 4, 1), np.float32)
    out = rule(q, k, v, decay, beta, state, *one(3))
    np.testing.assert_allclose(out.ravel(), [5, 6.25, 1.25 / 2 / np.sqrt(2)], rtol=1e-5)
    np.testing.assert_allclose(state.ravel(), [1.25, 0, 0, 0], rtol=1e-5)


def test_gates_by_hand() -> None:
    # softplus(0) = log 2; exp(a_log) = 3, so the decay is 2^-3.
    zero = np.zeros((1, 1), np.float32)
    a_log, dt_bias = np.log(np.array([3], np.float32)), np.array([2], np.float32)
    decay, beta = delta_gates(zero, zero - 2, a_log, dt_bias)
    np.testing.assert_allclose([decay[0, 0], beta[0, 0]], [0.125, 0.5], rtol=1e-6)
    assert decay.dtype == beta.dtype == np.float32
    far = np.array([[-200, 200]], np.float32)  # nothing overflows
    decay, beta = delta_gates(far, far, np.zeros(2, np.float32), np.zeros(2, np.float32))
    assert decay.tolist() == [[1, 0]]
    np.testing.assert_allclose(beta, [[0, 1]], atol=1e-30)


def test_agrees_with_the_definition_on_ragged_sequences() -> None:
    inputs, state = random_inputs(14), normal(4, HEADS, KEY_DIM, VALUE_DIM, seed=9)
    edges, slots = np.array([0, 9, 10, 14], np.int32), np.array([2, 0, 3], np.int32)
    expected_state = state.copy()
    expected = delta_rule_ref(*inputs, expected_state, edges, slots)
    out = delta_rule(*inputs, state, edges, slots)
    assert (out.shape, out.dtype) == (inputs[2].shape, np.float32)
    assert relative_error(out.reshape(14, -1), expected.reshape(14, -1)) < 2e-6
    assert relative_error(state.reshape(4, -1), expected_state.reshape(4, -1)) < 2e-6


@pytest.mark.parametrize("cuts", [[6], [1, 2, 3], [19]])
def test_chunks_give_the_same_bits(cuts: list[int]) -> None:
    inputs, whole_state, state = random_inputs(20), empty_state(), empty_state()
    whole = delta_rule(*inputs, whole_state, *one(20))
    pieces = zip(*(np.split(a, cuts) for a in inputs), strict=True)
    parts = [delta_rule(*piece, state, *one(len(piece[0]))) for piece in pieces]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(state, whole_state)


def test_with_no_decay_and_full_correction_a_key_recalls_its_last_value() -> None:
    _, k, v, *_ = random_inputs(3)
    ones = np.ones((3, HEADS), np.float32)
    k[2] = k[0]
    out = delta_rule(k * np.float32(7), k, v, ones, ones, empty_state(), *one(3))
    np.testing.assert_allclose(out[2], v[2] / np.sqrt(np.float32(KEY_DIM)), rtol=1e-4, atol=1e-5)
