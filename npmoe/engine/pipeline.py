"""Decoding with the host one step behind: a step's tokens are read while the model runs the next.

A model that samples feeds each token back by itself, so the next step needs nothing from the host
but pages. What a step computed for a sequence that has ended meanwhile is discarded.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol, runtime_checkable

from npmoe.batch import Batch
from npmoe.engine.request import Sequence
from npmoe.ops.sample import Chooser, Sampled


@runtime_checkable
class SamplingModel(Protocol):
    """A model that chooses tokens and feeds them back without the host.

    Steps and `forward` calls run in the order in which they were asked for.
    """

    max_sampled_seqs: int

    def start(self, batch: Batch, choosers: SequenceOf[Chooser]) -> None:
        """Prepares steps of these sequences, of which the batch has the last token each. Steps that
        were not taken are forgotten."""

    def enqueue(self, new_pages: Iterable[tuple[int, int, int]]) -> None:
        """Begins a step: every sequence's last token in, its next one out; does not wait.

        new_pages: (sequence, index, page) that join the sequences' pages first. At most two steps
        may wait to be taken.
        """

    def take(self) -> list[Sampled]:
        """Waits for the oldest step that was not taken; the token of every sequence."""

    def synchronize(self) -> None:
        """Waits until nothing runs any more."""


class Pipeline:
    """The steps that a model has been asked for and whose tokens are still to be used."""

    def __init__(self, model: SamplingModel | None) -> None:
        """None: a model that does not sample; max_seqs is 0 and nothing is ever in flight."""
        self._model = model
        self.max_seqs = 0 if model is None else model.max_sampled_seqs
        self.sequences: list[Sequence] = []
        self.in_flight = 0
        self._num_pages: list[int] = []

    def start(self, batch: Batch, sequences: list[Sequence], choosers: SequenceOf[Chooser]) -> None:
        """Begins the first step of these sequences."""
        assert self._model is not None
        self.clear()
        self._model.start(batch, choosers)
        self._num_pages = [len(s.pages) for s in sequences]
        self.sequences = sequences
        self.enqueue()

    def enqueue(self) -> None:
        """Begins one more step of the same sequences, which have the pages for it."""
        assert self._model is not None
        new = [
            (row, i, s.pages[i])
            for row, (s, known) in enumerate(zip(self.sequences, self._num_pages, strict=True))
            for i in range(known, len(s.pages))
        ]
        self._model.enqueue(new)
        self._num_pages = [len(s.pages) for s in self.sequences]
        self.in_flight += 1

    def take(self) -> list[tuple[Sequence, Sampled]]:
        """The tokens of the oldest step in flight."""
        assert self._model is not None
        sampled = self._model.take()
        self.in_flight -= 1
        return list(zip(self.sequences, sampled, strict=True))

    def clear(self) -> None:
        """Forgets what is in flight."""
        self.sequences, self.in_flight = [], 0

    def close(self) -> None:
        """Forgets what is in flight and waits for its end: then the model's memory may go."""
        self.clear()
        if self._model is not None:
            self._model.synchronize()
