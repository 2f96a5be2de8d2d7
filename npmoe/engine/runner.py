"""Turns scheduled work into a Batch and hands it to the model: for logits, or to be decoded."""

from collections.abc import Sequence

import numpy as np

from npmoe.batch import Batch
from npmoe.dtypes import Array
from npmoe.engine.pipeline import Pipeline, SamplingModel
from npmoe.engine.scheduler import Work
from npmoe.models.cache import ModelCache
from npmoe.models.gpu import GpuModel
from npmoe.models.layers import CausalLM
from npmoe.ops.sample import Chooser


class Runner:
    """Owns the model, the arrays of its cache, and the steps in flight."""

    def __init__(self, model: CausalLM | GpuModel, cache: ModelCache, page_size: int) -> None:
        self.model, self.cache, self.page_size = model, cache, page_size
        self.pipeline = Pipeline(model if isinstance(model, SamplingModel) else None)

    def start(self, works: list[Work], choosers: Sequence[Chooser]) -> None:
        """Begins to decode sequences that have one token to compute each; see Pipeline."""
        rows = [np.arange(i, i + 1) for i in range(len(works))]
        sequences = [work.sequence for work in works]
        self.pipeline.start(self._batch(works, rows), sequences, choosers)

    def run(self, works: list[Work], wants_all: list[bool]) -> list[Array]:
        """Computes the works' tokens; logits float32 `[rows, vocab]` for each work: all of its
        rows where wants_all, the last one where the work reaches the sequence's end, else none.
        """
        ends = np.cumsum([work.count for work in works])
        rows = []
        for work, every, last in zip(works, wants_all, ends, strict=True):
            count = work.count if every else int(work.reaches_end)
            rows.append(np.arange(last - count, last))
        logits = self.model.forward(self._batch(works, rows), self.cache.layers)
        return np.split(logits, np.cumsum([len(r) for r in rows])[:-1])

    def _batch(self, works: list[Work], rows: list[Array]) -> Batch:
        """The works' tokens; rows: of each work, those whose logits are wanted."""
        counts = [work.count for work in works]
        edges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        starts = [work.sequence.num_computed for work in works]
        input_ids = np.concatenate(
            [w.sequence.token_ids[s : s + w.count] for w, s in zip(works, starts, strict=True)]
        )
        spans = [np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        tables = np.zeros((len(works), max(len(w.sequence.pages) for w in works)), np.int32)
        slots = []
        for table, work, span in zip(tables, works, spans, strict=True):
            table[: len(work.sequence.pages)] = work.sequence.pages
            slots.append(table[span // self.page_size] * self.page_size + span % self.page_size)
        variant = None
        if self.model.spec.longrope_switch is not None:
            variant = np.repeat([int(w.sequence.long_rope) for w in works], counts)
        state_slots = None
        if self.cache.has_slots:
            state_slots = np.asarray([w.sequence.state_slot for w in works], np.int32)
        return Batch(
            input_ids=input_ids.astype(np.int32),
            positions=np.concatenate(spans).astype(np.int32),
            slot_mapping=np.concatenate(slots).astype(np.int32),
            cu_seqlens_q=edges,
            seq_lens=np.asarray([s + n for s, n in zip(starts, counts, strict=True)], np.int32),
            block_table=tables,
            logits_rows=np.concatenate(rows).astype(np.int32),
            rope_variant=variant,
            state_slots=state_slots,
        )
