"""Who runs in the next step, and on which pages. Pure: plain ints, no arrays, no clock.

First come, first served. Running sequences go first; when pages run out the latest one gives its
pages back and is recomputed later, so nothing is lost. Waiting ones join while there is room.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from npmoe.engine.request import Sequence
from npmoe.kv.pages import PageAllocator, prefix_key
from npmoe.kv.slots import StateSlots


@dataclass(frozen=True)
class Work:
    """The next `count` pending tokens of a sequence, to be computed in this step."""

    sequence: Sequence
    count: int

    @property
    def reaches_end(self) -> bool:
        """Whether the step yields the logits of the next token."""
        return self.count == self.sequence.num_pending


class Scheduler:
    """Owns the queues and decides about pages."""

    def __init__(
        self,
        allocator: PageAllocator,
        max_num_seqs: int,
        prefill_chunk: int,
        longrope_switch: int | None = None,
        recurrent: bool = False,
        windows: bool = False,
    ) -> None:
        """longrope_switch: a sequence that grows past this length is recomputed, since its rotary
        frequencies change; None where they never do. recurrent: the model also keeps states, which
        pages do not hold, so that no prefix is taken over. windows: beside the pages there are
        copies of a window: a prefix is taken over as far as a free slot holds its window."""
        self.allocator = allocator
        self.recurrent, self.windows = recurrent, windows
        self.max_num_seqs = max_num_seqs
        self.prefill_chunk = prefill_chunk
        self.longrope_switch = longrope_switch
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.slots = self._all_slots()

    def _all_slots(self) -> StateSlots:
        """For the running sequences, and for one outside the queues."""
        return StateSlots(self.max_num_seqs + 1, self.allocator.page_size, self.prefill_chunk)

    @property
    def has_slots(self) -> bool:
        """Whether a sequence keeps something beside its pages."""
        return self.recurrent or self.windows

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self.waiting.append(sequence)

    def plan(self) -> list[Work]:
        """The work of the next step; empty only if there is nothing to do."""
        for sequence in self.running[::-1]:
            if self.is_long(sequence) != sequence.long_rope:
                self.preempt(sequence)  # its cached keys were turned for a shorter sequence
        works = []
        budget = self.prefill_chunk
        for sequence in list(self.running):
            if sequence not in self.running:
                continue  # gave its pages back to an earlier one
            decoding = sequence.num_pending == 1
            count = 1 if decoding else min(sequence.num_pending, budget)
            if count and self._grow(sequence, count):
                works.append(Work(sequence, count))
                budget -= 0 if decoding else count
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            slot = self._match_prefix(sequence)
            count = min(sequence.num_pending, budget)
            pages = self.allocator.allocate(self._missing_pages(sequence, count))
            if pages is None:
                self._release(sequence)
                break
            sequence.pages += pages
            sequence.state_slot = self.slots.take(slot)
            self.running.append(self.waiting.popleft())
            works.append(Work(sequence, count))
            budget -= count
        return works

    def complete(self, work: Work) -> None:
        """Records that a step has computed `work`, and makes full pages findable."""
        sequence = work.sequence
        sequence.num_computed += work.count
        size = self.allocator.page_size
        while (len(sequence.sealed_keys) + 1) * size <= sequence.num_computed:
            start = len(sequence.sealed_keys) * size
            key = prefix_key(self._parent(sequence), sequence.token_ids[start : start + size])
            self.allocator.seal(sequence.pages[len(sequence.sealed_keys)], key)
            sequence.sealed_keys.append(key)

    def fork(self, parent: Sequence, child: Sequence) -> tuple[int, int] | None:
        """Lets `child`, whose tokens are the parent's, share the parent's pages and run.

        Returns (source, target) pages to copy where the last page is only partly full; the parent's
        state is to be copied, too. Where there is no room the child waits and is computed anew.
        """
        full = parent.num_computed // self.allocator.page_size
        partial = parent.num_computed % self.allocator.page_size > 0
        fresh = self.allocator.allocate(int(partial))
        if fresh is None or len(self.running) >= self.max_num_seqs:
            self.allocator.release(fresh or [])
            self.waiting.append(child)
            return None
        for page in parent.pages[:full]:
            self.allocator.retain(page)
        child.pages = parent.pages[:full] + fresh
        child.sealed_keys = parent.sealed_keys[:full]
        child.num_computed, child.long_rope = parent.num_computed, parent.long_rope
        assert parent.state_slot is not None
        child.state_slot = self.slots.take()
        self.slots.copied(parent.state_slot, child.state_slot)
        self.running.append(child)
        return (parent.pages[full], fresh[0]) if partial else None

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out and frees what it holds, whether it runs, waits or is out."""
        if sequence in self.running:
            self.running.remove(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Starts over with these sequences waiting and every page empty: right whatever state an
        interrupted step has left."""
        self.allocator = PageAllocator(self.allocator.num_pages, self.allocator.page_size)
        self.running, self.waiting = [], deque(sequences)
        self.slots = self._all_slots()
        for s in self.waiting:
            s.pages, s.sealed_keys, s.num_computed, s.state_slot = [], [], 0, None

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's pages and state; it goes to the head of the queue."""
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def claim_pages(self, sequence: Sequence) -> None:
        """Gives a sequence outside the queues a state slot, and pages for all its tokens at once;
        running sequences give way, the latest first. One such sequence at a time."""
        sequence.long_rope = self.is_long(sequence)
        needed = self._missing_pages(sequence, sequence.num_pending)
        while (pages := self.allocator.allocate(needed)) is None:
            self.preempt(self.running[-1])
        sequence.pages += pages
        sequence.state_slot = self.slots.take()

    def grow_ahead(self, sequences: list[Sequence]) -> bool:
        """Gives decoding sequences room for one token more than their next; False, and nothing has
        changed, if there are too few pages."""
        needed = [self._missing_pages(s, 2) for s in sequences]
        pages = self.allocator.allocate(sum(needed))
        if pages is None:
            return False
        for sequence, count in zip(sequences, needed, strict=True):
            sequence.pages += pages[:count]
            pages = pages[count:]
        return True

    def is_long(self, sequence: Sequence) -> bool:
        """Whether the sequence uses longrope's long factors."""
        return self.longrope_switch is not None and len(sequence.token_ids) > self.longrope_switch

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Makes room for `count` more tokens; False if the sequence had to give way itself."""
        needed = self._missing_pages(sequence, count)
        while (pages := self.allocator.allocate(needed)) is None:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        sequence.pages += pages
        return True

    def _missing_pages(self, sequence: Sequence, count: int) -> int:
        total = -(-(sequence.num_computed + count) // self.allocator.page_size)
        return max(0, total - len(sequence.pages))

    def _match_prefix(self, sequence: Sequence) -> int | None:
        """Takes over cached pages of the same beginning; the last token is always computed. The
        slot that has their window, where there are windows and such a slot."""
        sequence.long_rope = self.is_long(sequence)
        if self.recurrent:
            return None
        if sequence.params.prompt_logprobs is not None and not sequence.output_ids:
            return None
        size = self.allocator.page_size
        keys: list[bytes] = []
        parent = self._root(sequence)
        for start in range(0, (len(sequence.token_ids) - 1) // size * size, size):
            parent = prefix_key(parent, sequence.token_ids[start : start + size])
            keys.append(parent)
        slot = None
        sequence.pages = self.allocator.match(keys)
        if self.windows:
            slot, count = self.slots.match(keys[: len(sequence.pages)])
            self.allocator.release(sequence.pages[count:])
            del sequence.pages[count:]
        sequence.sealed_keys = keys[: len(sequence.pages)]
        sequence.num_computed = len(sequence.pages) * size
        return slot

    def _parent(self, sequence: Sequence) -> bytes:
        return sequence.sealed_keys[-1] if sequence.sealed_keys else self._root(sequence)

    def _root(self, sequence: Sequence) -> bytes:
        return b"long" if sequence.long_rope else b""

    def _release(self, sequence: Sequence) -> None:
        self.allocator.release(sequence.pages)
        if sequence.state_slot is not None:
            keys = sequence.sealed_keys if self.windows else ()
            self.slots.release(sequence.state_slot, keys, sequence.num_computed)
        sequence.pages, sequence.sealed_keys, sequence.num_computed = [], [], 0
        sequence.state_slot = None
