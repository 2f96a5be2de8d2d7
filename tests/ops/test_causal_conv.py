"""The causal convolution and its state."""

import numpy as np
import pytest

from npmoe.ops.causal_conv import causal_conv, causal_conv_ref
from tests.helpers import normal, relative_error

both = pytest.mark.parametrize("conv", [causal_conv, causal_conv_ref])


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def one(stop: int) -> tuple[np.ndarray, np.ndarray]:
    """A sequence of `stop` tokens in slot 0."""
    return np.array([0, stop], np.int32), np.zeros(1, np.int32)


@both
def test_by_hand(conv) -> None:
    # Taps 1, 10, 100: the newest input weighs 100. Before the first token stood 4 and 5.
    x, weight = np.array([[1], [2]], np.float32), np.array([[1, 10, 100]], np.float32)
    state = np.array([[[4], [5]]], np.float32)
    out = conv(x / 100, weight, state / 100, *one(2))
    np.testing.assert_allclose(out[:, 0], silu(np.array([1.54, 2.15])), rtol=1e-6)


@both
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_the_state_is_the_last_inputs(conv, count: int) -> None:
    x, state = normal(count, 5), normal(2, 3, 5, seed=1)
    inputs = np.concatenate([state[1], x])
    kept = state[0].copy()
    conv(x, normal(5, 4, seed=2), state, np.array([0, count], np.int32), np.ones(1, np.int32))
    np.testing.assert_array_equal(state[1], inputs[-3:])
    np.testing.assert_array_equal(state[0], kept)


def test_agrees_with_the_definition_on_ragged_sequences() -> None:
    x, weight, state = normal(12, 20), normal(20, 4, seed=1), normal(5, 3, 20, seed=2)
    edges, slots = np.array([0, 7, 8, 12], np.int32), np.array([3, 0, 4], np.int32)
    expected_state = state.copy()
    expected = causal_conv_ref(x, weight, expected_state, edges, slots)
    out = causal_conv(x, weight, state, edges, slots)
    assert (out.shape, out.dtype) == (x.shape, np.float32)
    assert relative_error(out, expected) < 1e-6
    np.testing.assert_array_equal(state, expected_state)


@pytest.mark.parametrize("cuts", [[5], [1, 2, 3], [3, 17]])
def test_chunks_give_the_same_bits(cuts: list[int]) -> None:
    x, weight = normal(20, 6), normal(6, 4, seed=1)
    whole_state, state = np.zeros((1, 3, 6), np.float32), np.zeros((1, 3, 6), np.float32)
    whole = causal_conv(x, weight, whole_state, *one(20))
    parts = [causal_conv(part, weight, state, *one(len(part))) for part in np.split(x, cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(state, whole_state)
