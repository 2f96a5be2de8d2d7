"""Which sequence has which slot for what it keeps beside its pages: plain ints, no arrays.

A free slot still holds the copies (`npmoe.ops.quantize.KVCopies`) of its last sequence. Another one
with the same beginning may go on with them, if the last one was not so far ahead that its ring had
taken the place of what the window at the end of that beginning holds.
"""

from collections import OrderedDict
from collections.abc import Sequence

DISCARDED = 1
"""Tokens that a model running ahead may have written behind a sequence's end."""


class StateSlots:
    """Hands out slots 0 .. num_slots - 1."""

    def __init__(self, num_slots: int, page_size: int, prefill_chunk: int) -> None:
        """prefill_chunk: tokens that a ring holds behind those of a window."""
        self.num_slots = num_slots
        self._page_size, self._most_ahead = page_size, prefill_chunk + 1 - DISCARDED
        self._free: OrderedDict[int, Sequence[bytes]] = OrderedDict.fromkeys(range(num_slots), ())
        self._written = [0] * num_slots

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return len(self._free)

    def take(self, slot: int | None = None) -> int:
        """This free slot with what it holds, else the one that has been free for longest."""
        if slot is None:
            slot, _ = self._free.popitem(last=False)
            self._written[slot] = 0
        else:
            del self._free[slot]
        return slot

    def copied(self, source: int, target: int) -> None:
        """Records that `target` holds what `source` does."""
        self._written[target] = self._written[source]

    def release(self, slot: int, keys: Sequence[bytes], num_tokens: int) -> None:
        """Frees a slot that holds copies of num_tokens tokens, of which the first pages have these
        keys; one without keys is taken first."""
        assert slot not in self._free, f"slot {slot} is free already"
        self._free[slot] = tuple(keys)
        if not keys:
            self._free.move_to_end(slot, last=False)
        self._written[slot] = max(self._written[slot], num_tokens)

    def match(self, keys: Sequence[bytes]) -> tuple[int | None, int]:
        """The free slot that serves the longest run of `keys`, and how many; (None, 0): none does.

        A query after these pages finds the whole window before it in that slot.
        """
        found: tuple[int | None, int] = None, 0
        for slot, held in self._free.items():
            count = sum(a == b for a, b in zip(keys, held, strict=False))
            ahead = self._written[slot] - count * self._page_size
            if count > found[1] and ahead <= self._most_ahead:
                found = slot, count
        return found
