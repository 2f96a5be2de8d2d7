"""Recurrent states: slots, copies and beginnings."""

import numpy as np

from npmoe.kv.states import RecurrentStates


def filled() -> RecurrentStates:
    """Two layers of three slots; every number of slot s is s + 1."""
    states = RecurrentStates(2, 3, (3, 5), (2, 4, 6))
    for layer in states.layers:
        for slot in range(3):
            layer.conv[slot], layer.memory[slot] = slot + 1, slot + 1
    return states


def values(states: RecurrentStates) -> list[list[set[float]]]:
    """Of each layer and slot, the numbers in it."""
    return [
        [{*conv.ravel().tolist(), *memory.ravel().tolist()} for conv, memory in pairs]
        for pairs in (zip(a.conv, a.memory, strict=True) for a in states.layers)
    ]


def test_shapes_and_bytes() -> None:
    states = RecurrentStates(2, 3, (3, 5), (2, 4, 6))
    assert states.layers[0].conv.shape == (3, 3, 5)
    assert states.layers[1].memory.shape == (3, 2, 4, 6)
    assert states.nbytes == 2 * 3 * (3 * 5 + 2 * 4 * 6) * 4
    assert values(states) == [[{0}] * 3] * 2


def test_a_copy_changes_its_target_in_every_layer() -> None:
    states = filled()
    states.copy(0, 2)
    assert values(states) == [[{1}, {2}, {1}]] * 2


def test_clearing_is_of_one_layer() -> None:
    states = filled()
    states.layers[1].clear(np.array([0, 1], np.int32))
    assert values(states) == [[{1}, {2}, {3}], [{0}, {0}, {3}]]
