"""Slots beside the pages: who gets which, and when what a slot holds serves another sequence."""

import pytest

from npmoe.kv.slots import StateSlots

A, B, C, D = b"a", b"b", b"c", b"d"


def make_slots(count: int = 3) -> StateSlots:
    """Pages of 4 tokens, chunks of 6: a slot may be 6 tokens ahead."""
    return StateSlots(count, 4, 6)


def test_slots_are_taken_in_turn_and_those_without_keys_first() -> None:
    slots = make_slots()
    assert [slots.take() for _ in range(3)] == [0, 1, 2]
    assert slots.num_free == 0
    slots.release(2, [A], 4)
    slots.release(0, [B], 4)
    slots.release(1, [], 3)
    assert slots.num_free == 3
    assert [slots.take() for _ in range(3)] == [1, 2, 0]


@pytest.mark.parametrize(("num_tokens", "count"), [(12, 3), (18, 3), (19, 0)])
def test_a_slot_serves_a_beginning_that_it_has_not_left_far_behind(
    num_tokens: int, count: int
) -> None:
    slots = make_slots()
    slots.release(slots.take(), [A, B, C], num_tokens)
    assert slots.match([A, B, C, D]) == ((0 if count else None), count)


def test_the_longest_common_beginning_wins() -> None:
    slots = make_slots()
    for slot, keys in enumerate(([A], [A, B], [A, B, C])):
        assert slots.take() == slot
        slots.release(slot, keys, 4 * len(keys))
    slots.take(2)  # in use: not to be had
    assert slots.match([A, B, C]) == (1, 2)
    assert slots.match([A, D]) == (0, 1)  # slot 1 is no longer one
    assert slots.match([D]) == (None, 0)


def test_what_was_written_counts_until_the_slot_begins_anew() -> None:
    slots = make_slots(1)
    slots.release(slots.take(), [A, B, C], 12)
    slots.take(0)  # goes on from a page that it has, and ends early
    slots.release(0, [A, D], 9)
    assert slots.match([A]) == (None, 0)  # 12 - 4 tokens ahead
    assert slots.match([A, D]) == (0, 2)
    slots.release(slots.take(), [A], 4)
    assert slots.match([A]) == (0, 1)


def test_a_copied_slot_has_seen_as_much() -> None:
    slots = make_slots(2)
    slots.release(slots.take(), [A, B, C], 12)
    first, second = slots.take(0), slots.take()
    slots.copied(first, second)
    slots.release(second, [A], 5)
    assert slots.match([A]) == (None, 0)
