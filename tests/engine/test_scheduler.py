"""The scheduler alone: pages, order, budget; simulations in which tokens are random numbers."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npmoe.engine.request import Sequence
from npmoe.engine.scheduler import Scheduler, Work
from npmoe.kv.pages import PageAllocator
from tests.engine.helpers import make_sequence

SIZE = 4
FIRST, RECENT = 2, 5  # of windows


def make_scheduler(
    num_pages: int = 16,
    max_num_seqs: int = 4,
    chunk: int = 8,
    switch: int | None = None,
    recurrent: bool = False,
    windows: bool = False,
) -> Scheduler:
    pages = PageAllocator(num_pages, SIZE)
    return Scheduler(pages, max_num_seqs, chunk, switch, recurrent, windows)


class Simulation:
    """Runs a scheduler as the engine does, and checks every step."""

    def __init__(self, scheduler: Scheduler, lengths: dict[Sequence, int]) -> None:
        """lengths: tokens that each sequence has when it ends."""
        self.scheduler, self.lengths = scheduler, lengths
        self.live: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.contents: dict[int, list[tuple]] = {}  # page -> what its slots hold
        self.states: dict[int, list[int]] = {}  # state slot -> tokens that it has taken
        self.rings: dict[int, dict[int, tuple]] = {}  # state slot -> what its copies are of
        self.random = random.Random(0)

    def add(self, sequence: Sequence) -> None:
        self.live.append(sequence)
        self.scheduler.add(sequence)

    def step(self) -> list[Work]:
        before = list(self.scheduler.running)
        works = self.scheduler.plan()
        self.check_plan(works, before)
        for work in works:
            self.write(work)
            self.scheduler.complete(work)
            if work.sequence.num_pending == 0:
                self.advance(work.sequence)
            self.check_pages()
        return works

    def check_plan(self, works: list[Work], before: list[Sequence]) -> None:
        s = self.scheduler
        assert works or not self.live
        assert len(s.running) <= s.max_num_seqs
        assert len({id(w.sequence) for w in works}) == len(works)
        assert all(w.sequence in s.running for w in works)
        assert all(1 <= w.count <= w.sequence.num_pending for w in works)
        assert sum(w.count for w in works if w.count > 1) <= s.prefill_chunk
        decoding = [q for q in before if q in s.running and q.num_pending == 1]
        assert set(map(id, decoding)) <= {id(w.sequence) for w in works}, "a decoder was skipped"
        for w in works:
            assert len(w.sequence.pages) * SIZE >= w.sequence.num_computed + w.count
        assert sorted(map(id, [*s.running, *s.waiting])) == sorted(map(id, self.live))
        assert all(not q.pages and not q.num_computed for q in s.waiting)
        slots = [q.state_slot for q in s.running]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(s.max_num_seqs + 1))
        assert all(q.state_slot is None for q in s.waiting)

    def write(self, work: Work) -> None:
        """Fills slots with (everything up to the token, factors), and checks what lies before."""
        q = work.sequence
        if self.scheduler.recurrent:
            assert q.state_slot is not None
            state = self.states[q.state_slot] if q.num_computed else []
            assert state == q.token_ids[: q.num_computed], "a state has taken other tokens"
            self.states[q.state_slot] = q.token_ids[: q.num_computed + work.count]
        if self.scheduler.windows:
            self.write_copies(q, q.num_computed, q.num_computed + work.count)
        for i in range(q.num_computed + work.count):
            slots = self.contents.setdefault(q.pages[i // SIZE], [()] * SIZE)
            value = (tuple(q.token_ids[: i + 1]), q.long_rope)
            if i >= q.num_computed:
                slots[i % SIZE] = value
            assert slots[i % SIZE] == value, "a page does not hold what its owner thinks"
        assert q.long_rope == self.scheduler.is_long(q)

    def write_copies(self, q: Sequence, start: int, stop: int) -> None:
        """Writes copies of positions start to stop - 1; each query must find those it reads."""
        assert q.state_slot is not None
        copies = self.rings.setdefault(q.state_slot, {})
        for i in range(start, stop):
            copies[self.copy_offset(i)] = tuple(q.token_ids[: i + 1]), q.long_rope
        for query in range(start, stop):
            for i in {*range(FIRST), *range(query - RECENT + 1, query + 1)}:
                if 0 <= i <= query:
                    want = tuple(q.token_ids[: i + 1]), q.long_rope
                    assert copies.get(self.copy_offset(i)) == want, "a copy is not the query's"

    def copy_offset(self, position: int) -> int:
        """The first tokens, then a ring."""
        ring = RECENT + self.scheduler.prefill_chunk
        return position if position < FIRST else FIRST + (position - FIRST) % ring

    def advance(self, q: Sequence) -> None:
        advancing = [q]
        while q.num_forks:
            q.num_forks -= 1
            child = make_sequence(q.token_ids)
            child.num_prompt = q.num_prompt
            self.lengths[child] = self.lengths[q] + self.random.randint(0, 3)
            self.live.append(child)
            copy = self.scheduler.fork(q, child)
            if copy is not None:
                self.contents[copy[1]] = list(self.contents[copy[0]])
            if child.state_slot is not None:
                assert q.state_slot is not None
                self.states[child.state_slot] = self.states.get(q.state_slot, [])
                self.rings[child.state_slot] = dict(self.rings.get(q.state_slot, {}))
            if child.num_computed:
                advancing.append(child)
        for each in advancing:
            each.token_ids.append(self.random.randint(0, 2))
            if len(each.token_ids) >= self.lengths[each]:
                if each.state_slot is not None:  # a model that runs ahead has written one more
                    copies = self.rings.setdefault(each.state_slot, {})
                    copies[self.copy_offset(each.num_computed)] = ()
                self.scheduler.finish(each)
                self.live.remove(each)
                self.finished.append(each)

    def check_pages(self) -> None:
        self.scheduler.allocator.check_integrity([q.pages for q in self.live])

    def run(self, steps: int = 2000) -> None:
        while self.live:
            self.step()
            steps -= 1
            assert steps, "it does not end"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_everything_ends_and_no_page_is_lost(data: st.DataObject) -> None:
    """Arrivals at any time, forks, aborts, one-shot claims, few pages; prompts share beginnings."""
    draw = data.draw
    num_pages = draw(st.integers(5, 14))
    longest = num_pages * SIZE
    scheduler = make_scheduler(
        num_pages,
        draw(st.integers(1, 5)),
        draw(st.integers(1, 12)),
        draw(st.sampled_from([None, 9])),
        *draw(st.sampled_from([(False, False), (True, False), (False, True), (True, True)])),
    )
    simulation = Simulation(scheduler, {})
    for _ in range(draw(st.integers(1, 25))):
        event = draw(st.sampled_from(["add", "add", "step", "step", "abort", "claim", "reset"]))
        if event == "add":
            start = draw(st.integers(1, longest - 4))
            prompt = [i % 3 for i in range(start)]
            prompt[-1] = draw(st.integers(0, 2))
            sequence = make_sequence(prompt)
            sequence.num_forks = draw(st.sampled_from([0, 0, 1, 3]))
            last = longest - (3 if sequence.num_forks else 0)
            simulation.lengths[sequence] = draw(st.integers(start + 1, last))
            simulation.add(sequence)
        elif event == "step":
            simulation.step()
        elif event == "abort" and simulation.live:
            gone = draw(st.sampled_from(simulation.live))
            scheduler.finish(gone)
            simulation.live.remove(gone)
        elif event == "claim":
            outsider = make_sequence([1] * draw(st.integers(1, longest)))
            scheduler.claim_pages(outsider)
            scheduler.allocator.check_integrity(
                [*(q.pages for q in simulation.live), outsider.pages]
            )
            assert outsider.state_slot is not None
            assert outsider.state_slot not in [q.state_slot for q in simulation.live]
            simulation.rings.pop(outsider.state_slot, None)
            scheduler.finish(outsider)
        elif event == "reset":
            scheduler.reset(simulation.live)
            simulation.rings.clear()
        simulation.check_pages()
    simulation.run()
    assert scheduler.allocator.num_free == num_pages
    assert all(len(q.token_ids) == simulation.lengths[q] for q in simulation.finished)
    assert scheduler.plan() == []


def test_first_come_first_served() -> None:
    simulation = Simulation(make_scheduler(num_pages=6, max_num_seqs=2), {})
    order = [make_sequence([i] * 5) for i in range(5)]
    for q in order:
        simulation.lengths[q] = 9
        simulation.add(q)
    simulation.run()
    assert simulation.finished == order


def test_the_latest_gives_way_and_is_recomputed() -> None:
    simulation = Simulation(make_scheduler(num_pages=4), {})
    first, second = make_sequence([0] * 7), make_sequence([1] * 7)
    for q in (first, second):
        simulation.lengths[q] = 13
        simulation.add(q)
    computed = {first: 0, second: 0}
    while simulation.live:
        for work in simulation.step():
            computed[work.sequence] += work.count
    assert computed[first] == 12, "the first one is never recomputed"
    assert computed[second] > 12
    assert simulation.finished == [first, second]


def test_a_prompt_is_cut_into_chunks_while_others_decode() -> None:
    simulation = Simulation(make_scheduler(chunk=3), {})
    decoder, prompt = make_sequence([0]), make_sequence([1] * 8)
    simulation.lengths |= {decoder: 20, prompt: 20}
    simulation.add(decoder)
    simulation.step()
    simulation.add(prompt)
    counts = [[(w.sequence is prompt, w.count) for w in simulation.step()] for _ in range(4)]
    assert counts == [
        *[[(False, 1), (True, 3)], [(False, 1), (True, 3)], [(False, 1), (True, 2)]],
        [(False, 1), (True, 1)],
    ]


def test_the_budget_is_shared_in_order() -> None:
    scheduler = make_scheduler(chunk=8)
    for length in (5, 5, 5):
        scheduler.add(make_sequence(list(range(length))))
    assert [w.count for w in scheduler.plan()] == [5, 3]


def test_max_num_seqs_holds_for_forks_too() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    parent = make_sequence([0] * 6)
    scheduler.add(parent)
    scheduler.complete(scheduler.plan()[0])
    assert scheduler.fork(parent, make_sequence([0] * 6)) is not None
    waiting = make_sequence([0] * 6)
    assert scheduler.fork(parent, waiting) is None
    assert list(scheduler.waiting) == [waiting]


def test_a_fork_shares_full_pages_and_copies_the_last() -> None:
    scheduler = make_scheduler()
    parent, child = make_sequence([0] * 6), make_sequence([0] * 6)
    scheduler.add(parent)
    scheduler.complete(scheduler.plan()[0])
    copy = scheduler.fork(parent, child)
    assert copy == (parent.pages[1], child.pages[1])
    assert parent.pages[0] == child.pages[0]
    scheduler.allocator.check_integrity([parent.pages, child.pages])


def test_a_fork_at_a_page_boundary_copies_nothing() -> None:
    scheduler = make_scheduler()
    parent, child = make_sequence([0] * 8), make_sequence([0] * 8)
    scheduler.add(parent)
    scheduler.complete(scheduler.plan()[0])
    assert scheduler.fork(parent, child) is None
    assert parent.pages == child.pages
    assert child in scheduler.running


def test_a_known_beginning_is_not_computed_again() -> None:
    simulation = Simulation(make_scheduler(), {})
    prompt = list(range(11))
    for tail, count in (([20], 8), ([21], 4), ([], 3)):
        q = make_sequence([*prompt, *tail])
        simulation.lengths[q] = len(q.token_ids) + 1
        simulation.add(q)
        works = [w for _ in range(2) if simulation.live for w in simulation.step()]
        assert works[0].count == count
    # The last token is computed even if its page is known.
    q = make_sequence(prompt[:8])
    scheduler = simulation.scheduler
    scheduler.add(q)
    assert scheduler.plan()[0].count == 4


def test_a_recurrent_model_takes_no_prefix_over() -> None:
    for recurrent, count in ((False, 4), (True, 12)):
        scheduler = make_scheduler(chunk=100, recurrent=recurrent)
        first, second = make_sequence([5] * 8), make_sequence([5] * 12)
        scheduler.add(first)
        scheduler.complete(scheduler.plan()[0])
        scheduler.finish(first)
        scheduler.add(second)
        assert scheduler.plan()[0].count == count


def run_alone(scheduler: Scheduler, token_ids: list[int]) -> int:
    """Computes a prompt and frees it; how many of its tokens were computed."""
    q, counts = make_sequence(token_ids), []
    scheduler.add(q)
    while q.num_pending:
        (work,) = scheduler.plan()
        scheduler.complete(work)
        counts.append(work.count)
    scheduler.finish(q)
    return sum(counts)


def test_a_prefix_is_taken_over_while_a_slot_holds_its_window() -> None:
    # Chunks of 8: a slot serves a boundary that its last sequence outran by 8 tokens at most.
    scheduler = make_scheduler(windows=True, max_num_seqs=1)
    prompt = list(range(40))
    assert run_alone(scheduler, prompt[:20]) == 20
    assert run_alone(scheduler, prompt[:22]) == 22 - 20
    assert run_alone(scheduler, [*prompt[:16], 99, 99]) == 18 - 16  # 16 = 22 - 6
    assert (
        run_alone(scheduler, [*prompt[:12], 98]) == 13
    )  # the slot has seen 22 tokens, 12 < 22 - 8
    assert run_alone(scheduler, [*prompt[:12], 97]) == 1
    # Two slots: the one that a forward pass takes is not the one with a window.
    outsider = make_sequence([1] * 9)
    scheduler.claim_pages(outsider)
    scheduler.finish(outsider)
    assert run_alone(scheduler, [*prompt[:12], 96]) == 1
    scheduler.reset([])
    assert run_alone(scheduler, [*prompt[:12], 96]) == 13


def test_a_window_without_its_pages_is_of_no_use() -> None:
    scheduler = make_scheduler(num_pages=5, windows=True, max_num_seqs=2)
    prompt = list(range(20))
    assert run_alone(scheduler, prompt) == 20
    assert run_alone(scheduler, [50] * 9) == 9  # takes 3 pages, the last ones of the first prompt
    assert run_alone(scheduler, prompt) == 20  # 8 tokens have their pages, 20 - 8 > 8


def test_prompt_logprobs_need_the_whole_prompt() -> None:
    scheduler = make_scheduler()
    for params in ({}, {"prompt_logprobs": 0}):
        q = make_sequence([0] * 8, **params)
        scheduler.add(q)
        work = scheduler.plan()[0]
        assert work.count == 8
        scheduler.complete(work)
        scheduler.finish(q)


def test_growing_past_the_longrope_switch_recomputes_once() -> None:
    simulation = Simulation(make_scheduler(switch=9), {})
    q = make_sequence([0] * 7)
    simulation.lengths[q] = 13
    simulation.add(q)
    counts = []
    while simulation.live:
        counts += [w.count for w in simulation.step()]
    # 7 give the 8th, 9th and 10th token; then 10 are long: computed anew, 8 a step.
    assert counts == [7, 1, 1, 8, 2, 1, 1]


def test_sequences_that_cross_the_switch_together_keep_their_order() -> None:
    scheduler = make_scheduler(switch=9, chunk=4)
    first, second = make_sequence([0] * 4), make_sequence([1] * 4)
    for q in (first, second):
        scheduler.add(q)
    for _ in range(2):
        for work in scheduler.plan():
            scheduler.complete(work)
    for q in (first, second):
        q.token_ids += [5] * 6
    assert [w.sequence for w in scheduler.plan()] == [first]


@pytest.mark.parametrize("running", [0, 3])
def test_claiming_takes_pages_from_the_latest(running: int) -> None:
    scheduler = make_scheduler(num_pages=6, chunk=100)
    queue = [make_sequence([i] * 7) for i in range(running)]
    for q in queue:
        scheduler.add(q)
    for work in scheduler.plan():
        scheduler.complete(work)
    outsider = make_sequence([9] * 15)
    scheduler.claim_pages(outsider)
    assert len(outsider.pages) == 4
    assert scheduler.running == queue[:1]
    assert list(scheduler.waiting) == queue[1:]


def test_room_for_one_token_more() -> None:
    """Two sequences of 3 and of 4 tokens decode on pages of 4: the next but one token of both needs
    a second page, of which there is one."""
    scheduler = make_scheduler(num_pages=4)
    short, full = make_sequence([1, 2, 3]), make_sequence([1, 2, 3, 4])
    for sequence in (short, full):
        scheduler.add(sequence)
    for work in scheduler.plan():
        scheduler.complete(work)
        work.sequence.token_ids.append(9)
    assert [len(work.sequence.pages) for work in scheduler.plan()] == [1, 2]
    assert not scheduler.grow_ahead([short, full, make_sequence([1] * 9)])
    assert [len(short.pages), len(full.pages)] == [1, 2]
    assert scheduler.grow_ahead([short, full])
    assert [len(short.pages), len(full.pages)] == [2, 2]
    assert scheduler.grow_ahead([short, full])
    assert [len(short.pages), len(full.pages)] == [2, 2]
    scheduler.allocator.check_integrity([short.pages, full.pages])
