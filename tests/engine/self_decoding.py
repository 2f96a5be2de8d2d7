"""A model on the CPU that decodes by itself, as one on a GPU does: asked now, run later."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from npmoe.batch import Batch
from npmoe.models.layers import CausalLM
from npmoe.ops.sample import Chooser, Sampled, report

MAX_PAGES = 200


class SelfDecoding:
    """A `SamplingModel`. Steps run when they are asked for, or as late as their order allows.

    num_steps: steps run. most_in_flight: steps that were not taken, at most.
    """

    max_sampled_seqs = 4

    def __init__(self, model: CausalLM, cache: list[Any], page_size: int, late: bool) -> None:
        self.model, self.spec = model, model.spec
        self.num_steps = self.most_in_flight = 0
        self._cache, self._page_size, self._late = cache, page_size, late
        self._asked: deque[list[tuple[int, int, int]]] = deque()
        self._results: deque[list[Sampled]] = deque()
        self._started = False

    def forward(self, batch: Batch, cache: list[Any]) -> np.ndarray:
        self._catch_up()
        self._started = False  # it uses the buffers of the steps
        return self.model.forward(batch, cache)

    def start(self, batch: Batch, choosers: Sequence[Chooser]) -> None:
        self._catch_up()
        self._results.clear()
        self._started = True
        assert len(choosers) == len(batch.input_ids) <= self.max_sampled_seqs
        self._choosers = [replace(c, token_ids=list(c.token_ids)) for c in choosers]
        assert [c.token_ids[-1] for c in choosers] == batch.input_ids.tolist()
        self._positions, self._variant = batch.positions.copy(), batch.rope_variant
        self._slots = batch.state_slots
        self._tables = np.full((len(choosers), MAX_PAGES), -1, np.int32)
        self._tables[:, : batch.block_table.shape[1]] = batch.block_table

    def enqueue(self, new_pages: Iterable[tuple[int, int, int]]) -> None:
        assert self._started
        self._asked.append(list(new_pages))
        in_flight = len(self._asked) + len(self._results)
        assert in_flight <= 2
        self.most_in_flight = max(self.most_in_flight, in_flight)
        if not self._late:
            self._catch_up()

    def take(self) -> list[Sampled]:
        if not self._results:
            self._run(self._asked.popleft())
        return self._results.popleft()

    def synchronize(self) -> None:
        self._catch_up()

    def _catch_up(self) -> None:
        while self._asked:
            self._run(self._asked.popleft())

    def _run(self, new_pages: list[tuple[int, int, int]]) -> None:
        for row, index, page in new_pages:
            self._tables[row, index] = page
        rows = np.arange(len(self._choosers) + 1, dtype=np.int32)
        tokens = np.array([c.token_ids[-1] for c in self._choosers], np.int32)
        at = self._positions
        pages = self._tables[rows[:-1], at // self._page_size]
        assert (pages >= 0).all(), "a step without pages for its tokens"
        slots = pages * self._page_size + at % self._page_size
        placed = self._tables, rows[:-1], self._variant, self._slots
        batch = Batch(tokens, at, slots, rows, at + 1, *placed)
        logits = self.model.forward(batch, self._cache)
        self._positions = at + 1
        self._results.append([_choose(c, r) for c, r in zip(self._choosers, logits, strict=True)])
        self.num_steps += 1


def _choose(chooser: Chooser, logits: np.ndarray) -> Sampled:
    token, wanted = chooser.choose(logits), chooser.params.logprobs
    assert isinstance(chooser.token_ids, list)
    chooser.token_ids.append(token)
    return Sampled(token) if wanted is None else report(logits, token, wanted)
