"""Formats of the KV cache beside each other: a decode step in each, at several contexts and
batches, on weights that are made once; what every cell says, see `measure_cells`."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from npmoe.bench.bandwidth import read_bandwidth
from npmoe.bench.kernels import chain_times
from npmoe.bench.measure import BenchOptions, check_options
from npmoe.bench.on_cpu import cpu_setup
from npmoe.bench.on_cpu import step_ms as cpu_step_ms
from npmoe.bench.on_gpu import GpuSetup, greedy_step, replayable, step_ms
from npmoe.bench.subject import Subject, check_subject, kv_bytes, weights_of
from npmoe.bench.traffic import Traffic, step_traffic
from npmoe.config import EngineConfig, KVCacheConfig, WeightsPolicy
from npmoe.dtypes import gigabytes
from npmoe.errors import OutOfMemory, UnsupportedModel
from npmoe.kv.storage import check_kv_format
from npmoe.models.cache import ModelCache, sequence_bytes
from npmoe.models.gpu import BUCKETS, check_gpu_support
from npmoe.models.memory import WORKSPACE_BYTES
from npmoe.runtime.device import free_memory
from npmoe.runtime.failures import named_errors

KV_CACHES = ("bf16", "fp8", "int8", "int4", "int4_asym", "fp4", "k8v4")
CONTEXTS, BATCHES = (1024, 8192, 32768, 131072), (1, 8, 32)


@dataclass(frozen=True)
class TableOptions:
    """What to measure: all combinations of kv_caches, contexts (tokens that the measured token
    attends to, itself included) and batches (sequences). page_size: tokens. weights: part ->
    format, other parts as the model has them."""

    weights: WeightsPolicy
    kv_caches: tuple[KVCacheConfig, ...] = tuple(map(KVCacheConfig.parse, KV_CACHES))
    contexts: tuple[int, ...] = CONTEXTS
    batches: tuple[int, ...] = BATCHES
    page_size: int = EngineConfig.page_size
    quiet: bool = True


@dataclass(frozen=True)
class Cell:
    """One combination."""

    kv: KVCacheConfig
    batch: int
    context: int
    page_size: int

    @property
    def pages(self) -> int:
        """Of a sequence."""
        return -(-self.context // self.page_size)


def measure_cells(subject: Subject, options: TableOptions, device: str) -> Iterator[dict[str, Any]]:
    """A record of each cell, batch by batch, as soon as it is measured.

    kv_group_size: elements that share a scale, where the format `kv` has scales. ms_per_token:
    median milliseconds of a greedy step, which gives every sequence one token. floor_ms: the bytes
    that the step must read over the read bandwidth. kv_gb: GB (1e9 bytes) of the allocated cache,
    whole pages. tokens_that_fit: the memory that was free beside the weights, as the driver reports
    it, over the bytes of a token. attention_gbps: GB a second of keys and values, codes and scales,
    by the attention kernel alone; None on the CPU.

    A cell that cannot be measured has `refused` instead, which says why: the device has no kernel
    for the format, no CUDA graph for the batch, or too little memory; then needs_gb says how many
    GB the cache would take.

    Raises, at the first record, ValueError for an option out of range, and what `check_subject`
    raises of the weights alone.
    """
    check_table(subject, options, device)
    bandwidth = read_bandwidth(device)
    weights = weights_of(subject, options.weights, device, options.quiet)
    table = _Table(subject, options.weights, weights, device, bandwidth, free_memory(device))
    for batch in dict.fromkeys(options.batches):
        for kv in dict.fromkeys(options.kv_caches):
            for context in dict.fromkeys(options.contexts):
                cell = Cell(kv, batch, context, options.page_size)
                yield {
                    "shape": subject.name,
                    "device": device,
                    "weights": subject.chosen_briefly(options.weights),
                    "kv": str(kv),
                    "kv_group_size": kv.group_size,
                    "batch": batch,
                    "context": context,
                    "page_size": options.page_size,
                    "read_gbps": round(bandwidth / 1e9, 1),
                    **table.results(cell),
                }
                gc.collect()  # an error that was caught holds arrays in a cycle


def check_table(subject: Subject, options: TableOptions, device: str) -> None:
    """Raises ValueError for an option out of range, and what `check_subject` raises of the weights
    without a cache; a format or a batch that the device lacks is for its cells to say."""
    for name in ("kv_caches", "contexts", "batches"):
        if not getattr(options, name):
            raise ValueError(f"{name}: expected at least one")
    for context in options.contexts:
        given = BenchOptions(context=context, page_size=options.page_size)
        check_options(subject, given, device)
    if min(options.batches) < 1:
        raise ValueError(f"batch = {min(options.batches)}: legal values are >= 1")
    check_subject(subject, options.weights, KVCacheConfig(), 0, device, sequences=0)


@dataclass(frozen=True)
class _Table:
    """What all cells share. bandwidth: bytes a second. free: bytes beside the weights."""

    subject: Subject
    policy: WeightsPolicy
    weights: dict[str, Any]
    device: str
    bandwidth: float
    free: int

    def results(self, cell: Cell) -> dict[str, Any]:
        """What is measured of a cell, or why it is not; its arrays are gone afterwards."""
        try:
            self._check_format(cell.kv)
        except UnsupportedModel as error:
            return {"refused": str(error)}
        fitting = {"tokens_that_fit": int(self.free // kv_bytes(self.subject.spec, cell.kv))}
        return fitting | (self._refusal(cell) or self._attempt(cell))

    def _check_format(self, kv: KVCacheConfig) -> None:
        """Raises UnsupportedModel."""
        check_kv_format(kv, self.subject.spec.head_dim)
        if self.device == "cuda":
            subject = self.subject
            check_gpu_support(subject.spec, subject.native, self.policy, kv)

    def _refusal(self, cell: Cell) -> dict[str, Any] | None:
        """Why a cell cannot be measured, as far as that is known beforehand."""
        needed = self._cache_bytes(cell)
        working = WORKSPACE_BYTES if self.device == "cuda" else 0
        free = free_memory(self.device)
        if needed + working > free:
            return does_not_fit(needed, working, free)
        if self.device == "cuda" and cell.batch not in BUCKETS:
            legal = ", ".join(map(str, BUCKETS))
            return {"refused": f"no CUDA graph takes a batch of {cell.batch}; those are {legal}"}
        return None

    def _cache_bytes(self, cell: Cell) -> float:
        """Of all pages, and of recurrent states and copies in windows, where there are any."""
        spec, tokens = self.subject.spec, cell.batch * cell.pages * cell.page_size
        beside = sequence_bytes(spec, cell.kv, prefill_chunk=1)
        return kv_bytes(spec, cell.kv) * tokens + cell.batch * beside

    def _attempt(self, cell: Cell) -> dict[str, Any]:
        """Measures; a kernel that is missing or memory that runs out then refuse it after all."""
        try:
            with named_errors():
                return self._on_gpu(cell) if self.device == "cuda" else self._on_cpu(cell)
        except UnsupportedModel as error:
            return {"refused": str(error)}
        except OutOfMemory as error:
            needed = self._cache_bytes(cell)
            words = f"needs {gigabytes(needed)} of KV cache and more to work in: {error}"
            return {"refused": words, "needs_gb": needed / 1e9}

    def _on_gpu(self, cell: Cell) -> dict[str, Any]:
        given = self.subject.spec, self.weights, cell.kv, cell.batch, cell.page_size
        setup = GpuSetup.with_pages(*given, cell.pages)
        step = greedy_step(setup, cell.context)
        milliseconds = step_ms(step, replayable(step, cell.context), cell.context)
        traffic = self._traffic(setup.cache, cell)
        times = chain_times(step, cell.context, traffic, self.bandwidth, "attention")
        microseconds = sum(t.us * t.launches for t in times)
        rate = 1e6 * attention_bytes(setup.cache, traffic) / microseconds
        return self._measured(setup.cache, milliseconds, traffic, rate)

    def _on_cpu(self, cell: Cell) -> dict[str, Any]:
        given = self.subject.spec, self.weights, cell.kv, cell.batch, cell.page_size
        model, cache, batch = cpu_setup(*given, cell.context)
        milliseconds = cpu_step_ms(model, cache, batch)["greedy"]
        return self._measured(cache, milliseconds, self._traffic(cache, cell), None)

    def _traffic(self, cache: ModelCache, cell: Cell) -> Traffic:
        given = self.subject.spec, self.subject.parameters, self.weights, cache
        return step_traffic(*given, cell.batch, cell.context, self.device)

    def _measured(
        self, cache: ModelCache, milliseconds: float, traffic: Traffic, rate: float | None
    ) -> dict[str, Any]:
        """rate: bytes a second that attention reads."""
        return {
            "ms_per_token": round(milliseconds, 4),
            "floor_ms": round(1e3 * traffic.total / self.bandwidth, 4),
            "kv_gb": cache.nbytes / 1e9,
            "attention_gbps": None if rate is None else round(rate / 1e9, 1),
        }


def does_not_fit(needed: float, working: float, free: float) -> dict[str, Any]:
    """The refusal of a cache of `needed` bytes, beside which a step takes `working`."""
    room = f" and {gigabytes(working)} to work in" if working else ""
    words = f"needs {gigabytes(needed)} of KV cache{room}; {gigabytes(free)} are free"
    return {"refused": words, "needs_gb": needed / 1e9}


def attention_bytes(cache: ModelCache, traffic: Traffic) -> float:
    """Bytes of keys and values, codes and scales, that a step reads in all layers."""
    return sum(traffic.of([pages.codes]) for layer in cache.pages for pages in layer)
