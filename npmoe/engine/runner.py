"""Turns scheduled work into a Batch, runs the model, hands back logits."""

import numpy as np

from npmoe.batch import Batch
from npmoe.dtypes import Array
from npmoe.engine.scheduler import Work
from npmoe.kv.storage import KVCache
from npmoe.models.gpu import GpuModel
from npmoe.models.layers import CausalLM


class Runner:
    """Owns the model and the arrays of its cache."""

    def __init__(self, model: CausalLM | GpuModel, cache: KVCache, page_size: int) -> None:
        self.model, self.cache, self.page_size = model, cache, page_size

    def run(self, works: list[Work], wants_all: list[bool]) -> list[Array]:
        """Computes the works' tokens; logits float32 `[rows, vocab]` for each work: all of its
        rows where wants_all, the last one where the work reaches the sequence's end, else none.
        """
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
        rows = []
        for work, every, first, last in zip(works, wants_all, edges[:-1], edges[1:], strict=True):
            rows.append(np.arange(first if every else last - int(work.reaches_end), last))
        variant = None
        if self.model.spec.longrope_switch is not None:
            variant = np.repeat([int(w.sequence.long_rope) for w in works], counts)
        batch = Batch(
            input_ids=input_ids.astype(np.int32),
            positions=np.concatenate(spans).astype(np.int32),
            slot_mapping=np.concatenate(slots).astype(np.int32),
            cu_seqlens_q=edges,
            seq_lens=np.asarray([s + n for s, n in zip(starts, counts, strict=True)], np.int32),
            block_table=tables,
            logits_rows=np.concatenate(rows).astype(np.int32),
            rope_variant=variant,
        )
        logits = self.model.forward(batch, self.cache.layers)
        return np.split(logits, np.cumsum([len(r) for r in rows])[:-1])
