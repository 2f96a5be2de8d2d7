"""A model on the GPU: weights laid out for the decode kernels, and steps replayed from CUDA graphs.

Prompts run through the same kernels as decoding, eight tokens a step, until there are kernels for
many tokens at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npmoe.batch import Batch
from npmoe.config import KVCacheConfig, WeightsPolicy
from npmoe.dtypes import Array
from npmoe.errors import UnsupportedModel
from npmoe.formats.fragments import RECORDS
from npmoe.models.cache import LayerCache
from npmoe.models.decode import (
    KV_CODES,
    DecodeStep,
    rotary_table,
)
from npmoe.models.decode_spec import check_decode_spec
from npmoe.models.parameters import ROUTER, TABLE
from npmoe.models.specs import ModelSpec
from npmoe.ops.quantize import KVPages
from npmoe.ops.sample import Chooser, Sampled
from npmoe.ops.sampler import REPORT_WORDS, Sampler, needs_sampler, read_report
from npmoe.runtime.device import copy_to_pinned, cupy, pinned_zeros, to_host
from npmoe.runtime.graphs import Eager, Graph
from npmoe.runtime.nvrtc import collected, compile_all
from npmoe.runtime.recording import recorded

BUCKETS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Kind:
    """What a captured step does: one token each of up to `bucket` sequences.

    context: the step is for sequences of at least so many tokens. sampled: a sampler chooses.
    prompt: rows may be tokens of one sequence. logits: most steps of a prompt need none.
    """

    bucket: int
    context: int = 1
    sampled: bool = False
    prompt: bool = False
    logits: bool = True


def check_gpu_support(
    spec: ModelSpec, formats: dict[str, str], policy: WeightsPolicy, kv: KVCacheConfig
) -> None:
    """Raises UnsupportedModel for what has no kernel, with the setting that has one.

    formats: part -> the format that the checkpoint holds.
    """
    check_decode_spec(spec)
    for part, stored in formats.items():
        target = policy.get(part, stored)
        if part in (ROUTER, TABLE) and target != "bf16":
            raise UnsupportedModel(
                f"the GPU reads a {part} in bf16, this checkpoint has {target}; use device='cpu'"
            )
        if part not in (ROUTER, TABLE) and target not in RECORDS:
            raise UnsupportedModel(
                f"no GPU kernel reads {target} weights ({part}); choose one of "
                f"{', '.join(RECORDS)} with weights={{{part!r}: ...}}, or use device='cpu'"
            )
    if kv.windows is not None:
        raise UnsupportedModel(
            f"kv_cache {kv} has no GPU kernel yet, since none reads windows; take a format without "
            "them, or use device='cpu'"
        )
    for name in (kv.key_format, kv.value_format):
        if name not in KV_CODES:
            raise UnsupportedModel(
                f"kv_cache {name} has no GPU kernel; use one of {', '.join(KV_CODES)}"
            )


@dataclass(frozen=True)
class _Results:
    """Where a step's tokens (`best`) and log probabilities arrive on the host, and when."""

    best: np.ndarray
    report: np.ndarray
    arrived: Any


class GpuModel:
    """Runs batches as CausalLM does, on the device, and decodes by itself (`SamplingModel`).

    All work runs on one stream, in the order in which it was asked for.
    """

    max_sampled_seqs = BUCKETS[-1]

    def __init__(self, spec: ModelSpec, weights: dict[str, Any]) -> None:
        """weights: parameter name -> float32 vector, or what `prepare_for_gpu` gave."""
        self.spec, self.weights = spec, weights
        self._steps: dict[Kind, tuple[DecodeStep, Graph | Eager]] = {}
        self._buffers: dict[int, DecodeStep] = {}
        self._cache: list[tuple[KVPages, KVPages]] | None = None
        self._sampler: Sampler | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all weights on the device."""
        return sum(w.nbytes for w in self.weights.values())

    def bind(
        self,
        cache: list[tuple[KVPages, KVPages]],
        max_pages: int,
        max_num_seqs: int = BUCKETS[-1],
        nvtx: bool = False,
        check_finite: bool = False,
    ) -> None:
        """Fixes the cache that graphs will use; its last page is a scratch page, for unused rows.

        max_pages: the most pages of a sequence. Compiles all kernels, and captures the greedy steps
        of up to max_num_seqs sequences and those of prompts; steps that sample are captured when
        they are first needed. Compiling takes some seconds on few cores, once a machine.
        nvtx: steps run in NVTX ranges, without graphs. check_finite: they raise NumericalError for
        a key or value that is NaN or infinite, and run without graphs too.
        """
        self._make = Eager if nvtx or check_finite else Graph
        self._checks_finite = check_finite
        xp = cupy()
        self._cache, self._max_pages = cache, max_pages
        self._scratch_page = cache[0][0].codes.shape[0] - 1
        self._steps.clear()
        self._buffers.clear()
        self._stream = xp.cuda.Stream(non_blocking=True)
        self._tables = xp.full((BUCKETS[-1], max_pages), self._scratch_page, np.int32)
        self._tables[0, 0] = self._scratch_page  # compiles what `enqueue` needs
        self._most_tokens = max_pages * cache[0][0].page_size
        self._cos_sin = rotary_table(self.spec, self._most_tokens)
        self._results = [
            _Results(
                pinned_zeros(BUCKETS[-1], dtype=np.uint64),
                pinned_zeros(BUCKETS[-1], REPORT_WORDS, dtype=np.int32),
                xp.cuda.Event(disable_timing=True),
            )
            for _ in range(2)
        ]
        buckets = BUCKETS[: BUCKETS.index(_bucket(max_num_seqs)) + 1]
        prompt = Kind(BUCKETS[-1], prompt=True)
        planned = [*map(Kind, buckets), prompt, replace(prompt, logits=False)]
        self._compile(planned)
        for kind in planned:
            self._step(kind)

    def forward(self, batch: Batch, cache: Sequence[LayerCache]) -> np.ndarray:
        """Logits float32 `[R, vocab]` of batch.logits_rows; `cache` is the one that was bound."""
        assert cache is self._cache, "bind the cache first"
        edges = batch.cu_seqlens_q
        place = {int(row): i for i, row in enumerate(batch.logits_rows)}
        logits = np.empty((len(place), self.spec.vocab_size), np.float32)
        cupy().cuda.Stream.null.synchronize()  # page copies were made there
        owners = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        for first in range(0, len(owners), BUCKETS[-1]):
            rows = list(range(first, min(first + BUCKETS[-1], len(owners))))
            sequences = owners[rows].tolist()
            wanted = [(i, place[row]) for i, row in enumerate(rows) if row in place]
            kind = self._kind(sequences, batch.positions[rows], logits=bool(wanted))
            step, graph = self._step(kind)
            self._load(step, batch, sequences, rows)
            self._check_rows(step, len(rows))
            graph.replay()
            if wanted:
                self._stream.synchronize()
            for i, at in wanted:
                logits[at] = to_host(step.logits[i])
        return logits

    def start(self, batch: Batch, choosers: Sequence[Chooser]) -> None:
        """Prepares steps of up to 8 sequences, of which the batch has the last token each."""
        assert len(choosers) == len(batch.input_ids) <= self.max_sampled_seqs
        self._choosers, self._enqueued, self._taken = choosers, 0, 0
        sampled = any(map(needs_sampler, choosers))
        self._longest = int(batch.positions.max()) + 1
        bucket = _bucket(len(choosers))
        kinds = [Kind(bucket, context, sampled) for context in self._contexts(bucket)]
        # Before _load: a first run writes.
        self._decoding = {kind.context: self._step(kind) for kind in kinds}
        cupy().cuda.Stream.null.synchronize()  # page copies were made there
        rows = list(range(len(choosers)))
        self._load(self._decoding[kinds[0].context][0], batch, rows, rows)
        for step, _ in self._decoding.values():
            self._check_rows(step, len(rows))
        if self._sampler is not None and sampled:
            with self._stream:
                self._sampler.set_rows(choosers)

    def enqueue(self, new_pages: Iterable[tuple[int, int, int]]) -> None:
        """Begins a step, and does not wait. new_pages: (sequence, index, page) for its tables."""
        assert self._enqueued - self._taken < len(self._results)
        length = self._longest + self._enqueued
        step, graph = self._decoding[max(least for least in self._decoding if least <= length)]
        results = self._results[self._enqueued % len(self._results)]
        with self._stream:
            for row, index, page in new_pages:
                self._tables[row, index] = page
            graph.replay()
            copy_to_pinned(results.best, step.best, self._stream)
            if step.sampler is not None:
                copy_to_pinned(results.report, step.sampler.report, self._stream)
            results.arrived.record(self._stream)
        self._enqueued += 1

    def take(self) -> list[Sampled]:
        """Waits for the oldest step that was not taken; the token of every sequence."""
        assert self._taken < self._enqueued
        results = self._results[self._taken % len(self._results)]
        results.arrived.synchronize()
        self._taken += 1
        tokens = ~results.best & np.uint64(0xFFFFFFFF)
        return [self._sampled(c, int(tokens[i]), i, results) for i, c in enumerate(self._choosers)]

    def synchronize(self) -> None:
        """Waits until nothing runs any more."""
        self._stream.synchronize()

    def _sampled(self, chooser: Chooser, token: int, row: int, results: _Results) -> Sampled:
        wanted = chooser.params.logprobs
        if wanted is None:
            return Sampled(token)
        return read_report(results.report[row], token, min(wanted, self.spec.vocab_size))

    def _load(self, step: DecodeStep, batch: Batch, sequences: list[int], rows: list[int]) -> None:
        """Puts one token each of at most 8 sequences where the step finds it."""
        tokens = np.zeros(step.num_seqs, np.int32)
        lengths = np.zeros(step.num_seqs, np.int32)  # unused rows: first token of the scratch page
        tables = np.full((step.num_seqs, self._max_pages), self._scratch_page, np.int32)
        tokens[: len(rows)] = batch.input_ids[rows]
        lengths[: len(rows)] = batch.positions[rows]
        width = min(batch.block_table.shape[1], self._max_pages)
        tables[: len(rows), :width] = batch.block_table[sequences, :width]
        xp = cupy()
        with self._stream:
            step.tokens[...] = xp.asarray(tokens)
            step.seq_lens[...] = xp.asarray(lengths)
            step.block_table[...] = xp.asarray(tables)
            step.best[...] = 0

    def _check_rows(self, step: DecodeStep, count: int) -> None:
        """Of rows that stand for a request, and not of those of a first run."""
        step.checked_rows = count if self._checks_finite else 0

    def _compile(self, planned: list[Kind]) -> None:
        """Compiles the kernels of these steps and of their variants, in threads."""
        with recorded(), collected() as wanted:
            for kind in planned:
                for context in self._contexts(kind.bucket):
                    self._new_step(replace(kind, context=context)).enqueue()
            self._new_step(replace(planned[0], sampled=True)).enqueue()
        compile_all(wanted)

    def _kind(self, sequences: list[int], positions: Array, logits: bool) -> Kind:
        """Of a step whose rows are tokens of these sequences, at these positions."""
        length = int(positions.max()) + 1
        prompt = len(set(sequences)) < len(sequences)
        bucket = BUCKETS[-1] if prompt else _bucket(len(sequences))
        context = max(least for least in self._contexts(bucket) if least <= length)
        return Kind(bucket, context, prompt=prompt, logits=logits or not prompt)

    def _contexts(self, bucket: int) -> list[int]:
        """Least lengths of the sequences for which steps of a bucket differ."""
        contexts = self._buffers_of(bucket).contexts
        return [context for context in contexts if context <= self._most_tokens]

    def _step(self, kind: Kind) -> tuple[DecodeStep, Graph | Eager]:
        """The step and its graph. All kinds of a bucket share buffers."""
        if kind not in self._steps:
            step = self._new_step(kind)
            cupy().cuda.Stream.null.synchronize()  # buffers were zeroed there
            with self._stream:  # a graph's first run writes: to the scratch page
                step.seq_lens[...] = 0
                step.block_table[...] = self._scratch_page
            self._steps[kind] = step, self._make(step.enqueue, self._stream)
        return self._steps[kind]

    def _new_step(self, kind: Kind) -> DecodeStep:
        step = self._buffers_of(kind.bucket).for_context(kind.context)
        if kind.prompt:
            step = step.for_prompts(kind.logits)
        if kind.sampled:
            if self._sampler is None:
                self._sampler = Sampler(BUCKETS[-1], self.spec.vocab_size)
            step = step.with_sampler(self._sampler)
        return step

    def _buffers_of(self, bucket: int) -> DecodeStep:
        if bucket not in self._buffers:
            assert self._cache is not None
            args = self.spec, self.weights, self._cache, self._tables[:bucket]
            self._buffers[bucket] = DecodeStep(*args, cos_sin=self._cos_sin)
        return self._buffers[bucket]


def _bucket(num_seqs: int) -> int:
    """The smallest bucket that holds so many sequences; the largest for more."""
    return next((b for b in BUCKETS if b >= num_seqs), BUCKETS[-1])
