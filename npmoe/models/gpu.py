"""A model on the GPU: weights laid out for the decode kernels, and steps replayed from CUDA graphs.

Prompts run through the same kernels as decoding, a token of each sequence a step: exact, and slow
for long prompts until there are kernels for many tokens at once.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from npmoe.batch import Batch
from npmoe.config import KVCacheConfig, WeightsPolicy
from npmoe.dtypes import Array, array_namespace
from npmoe.errors import UnsupportedModel
from npmoe.formats.fragments import COLUMNS, RECORDS, to_fragments, with_row_scales
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.models.decode import KV_CODES, DecodeStep, check_decode_spec
from npmoe.models.parameters import ROUTER, TABLE, Parameter
from npmoe.models.specs import ModelSpec
from npmoe.ops.quantize import KVPages
from npmoe.runtime.device import cupy
from npmoe.runtime.graphs import Eager, Graph

BUCKETS = (1, 2, 4, 8)


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
    for name in (kv.key_format, kv.value_format):
        if name not in KV_CODES or (name == "fp4" and kv.group_size != 32):
            raise UnsupportedModel(
                f"kv_cache {name} with group_size {kv.group_size} has no GPU kernel yet; "
                "use bf16, or fp4 with groups of 32"
            )


def prepare_for_gpu(parameter: Parameter, w: QuantTensor) -> QuantTensor | Array:
    """A matrix on the device as the decode kernels read it: tables and routers as bf16 bits, others
    as fragments; expert gate and up rows alternate, widths padded to 128 with zeros."""
    if parameter.part in (ROUTER, TABLE):
        return w.codes
    w = with_row_scales(w)  # of blocks of rows nothing is left when rows move
    if parameter.part == "experts" and parameter.name.endswith("gate_up_proj"):
        w = _alternate(w)
    return to_fragments(_pad_columns(w))


def _padded(width: int) -> int:
    return -(-width // COLUMNS) * COLUMNS


def _alternate(w: QuantTensor) -> QuantTensor:
    """gate and up rows `[..., 2I, K]` as gate 0, up 0, gate 1, ...; I is padded with zero rows."""
    xp = array_namespace(w.codes)
    *lead, rows, columns = w.shape
    width = _padded(rows // 2)

    def pair(a: Array) -> Array:
        halves = a.reshape(*lead, 2, rows // 2, a.shape[-1])
        out = xp.zeros((*lead, width, 2, a.shape[-1]), a.dtype)
        out[..., : rows // 2, :, :] = xp.swapaxes(halves, -2, -3)
        return out.reshape(*lead, 2 * width, a.shape[-1])

    changed = {name: pair(a) for name, a in w.arrays().items() if name != "global_scale"}
    return replace(w, shape=(*lead, 2 * width, columns), **changed)


def _pad_columns(w: QuantTensor) -> QuantTensor:
    """K padded to a multiple of 128 with zero codes and zero scales."""
    xp = array_namespace(w.codes)
    *lead, columns = w.shape
    target = _padded(columns)
    if target == columns:
        return w

    def widen(a: Array, width: int) -> Array:
        out = xp.zeros((*a.shape[:-1], width), a.dtype)
        out[..., : a.shape[-1]] = a
        return out

    widths = {"codes": w.codes.shape[-1] * target // columns}
    changed = {
        name: widen(a, widths.get(name, target // w.block[1]))
        for name, a in w.arrays().items()
        if name != "global_scale"
    }
    return replace(w, shape=(*lead, target), **changed)


class GpuModel:
    """Runs batches as CausalLM does, on the device; logits come back as NumPy arrays."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Any]) -> None:
        """weights: parameter name -> float32 vector, or what `prepare_for_gpu` gave."""
        self.spec, self.weights = spec, weights
        self._steps: dict[int, tuple[DecodeStep, Graph | Eager]] = {}
        self._cache: list[tuple[KVPages, KVPages]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all weights on the device."""
        return sum(w.nbytes for w in self.weights.values())

    def bind(
        self, cache: list[tuple[KVPages, KVPages]], max_pages: int, nvtx: bool = False
    ) -> None:
        """Fixes the cache that graphs will use; its last page is a scratch page, for unused rows.

        max_pages: the most pages of a sequence. nvtx: steps run in NVTX ranges, without graphs.
        """
        self._make = Eager if nvtx else Graph
        self._cache, self._max_pages = cache, max_pages
        self._scratch_page = cache[0][0].codes.shape[0] - 1
        self._steps.clear()

    def forward(self, batch: Batch, cache: list[tuple[KVPages, KVPages]]) -> np.ndarray:
        """Logits float32 `[R, vocab]` of batch.logits_rows; `cache` is the one that was bound."""
        assert cache is self._cache, "bind the cache first"
        edges = batch.cu_seqlens_q
        place = {int(row): i for i, row in enumerate(batch.logits_rows)}
        logits = np.empty((len(place), self.spec.vocab_size), np.float32)
        cupy().cuda.Stream.null.synchronize()  # page copies were made there
        for wave in range(int(np.diff(edges).max())):
            pending = [s for s in range(len(edges) - 1) if edges[s] + wave < edges[s + 1]]
            for first in range(0, len(pending), BUCKETS[-1]):
                sequences = pending[first : first + BUCKETS[-1]]
                rows = [int(edges[s]) + wave for s in sequences]
                found = self._run(batch, sequences, rows)
                for i, row in enumerate(rows):
                    if row in place:
                        logits[place[row]] = found.logits[i].get()
        return logits

    def _run(self, batch: Batch, sequences: list[int], rows: list[int]) -> DecodeStep:
        """One token of each of at most 8 sequences."""
        step, graph = self._step(next(b for b in BUCKETS if b >= len(rows)))
        tokens = np.zeros(step.seqs, np.int32)
        lengths = np.zeros(step.seqs, np.int32)  # unused rows: the first token of the scratch page
        tables = np.full((step.seqs, self._max_pages), self._scratch_page, np.int32)
        tokens[: len(rows)] = batch.input_ids[rows]
        lengths[: len(rows)] = batch.positions[rows]
        width = min(batch.block_table.shape[1], self._max_pages)
        tables[: len(rows), :width] = batch.block_table[sequences, :width]
        with graph.stream:
            step.tokens.set(tokens)
            step.seq_lens.set(lengths)
            step.block_table.set(tables)
            step.best[...] = 0
            graph.replay()
        graph.stream.synchronize()
        return step

    def _step(self, seqs: int) -> tuple[DecodeStep, Graph | Eager]:
        if seqs not in self._steps:
            assert self._cache is not None
            table = cupy().full((seqs, self._max_pages), self._scratch_page, np.int32)
            step = DecodeStep(self.spec, self.weights, self._cache, table)
            self._steps[seqs] = step, self._make(step.enqueue)
        return self._steps[seqs]
