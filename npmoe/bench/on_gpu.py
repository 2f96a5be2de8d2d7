"""Times of decode steps on the GPU, and of the host between them."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from npmoe.bench.on_cpu import TOP_P
from npmoe.bench.random_model import random_cache
from npmoe.bench.timing import replay_ms
from npmoe.config import KVCacheConfig
from npmoe.dtypes import Array
from npmoe.engine.engine import Engine
from npmoe.engine.runner import Runner
from npmoe.engine.scheduler import Scheduler
from npmoe.kv.pages import PageAllocator
from npmoe.models.cache import ModelCache
from npmoe.models.decode import DecodeStep
from npmoe.models.gpu import GpuModel
from npmoe.models.specs import ModelSpec
from npmoe.ops.sample import Chooser
from npmoe.ops.sampler import Sampler
from npmoe.runtime.device import cupy
from npmoe.runtime.graphs import Eager, Graph
from npmoe.sampling import SamplingParams

REST_SECONDS = 0.7
GAP_PROMPT, GAP_WARM_UP, GAP_STEPS = 256, 16, 128
PROMPT = 1024
"""Tokens: of the prompts before the steps whose gaps are measured, steps before and in that
measurement; of the prompt whose time is measured."""


@dataclass(frozen=True)
class GpuSetup:
    """Weights and a filled cache on the GPU. block_table int32 `[batch, pages of a sequence]`."""

    spec: ModelSpec
    weights: dict[str, Any]
    cache: ModelCache
    block_table: Array

    @classmethod
    def make(
        cls,
        spec: ModelSpec,
        weights: dict[str, Any],
        kv: KVCacheConfig,
        batch: int,
        page_size: int,
        context: int,
    ) -> "GpuSetup":
        """With pages for `context` tokens, or for the loop of `engine_times` if that is more."""
        pages = pages_for(spec, context, page_size)
        return cls.with_pages(spec, weights, kv, batch, page_size, pages)

    @classmethod
    def with_pages(
        cls,
        spec: ModelSpec,
        weights: dict[str, Any],
        kv: KVCacheConfig,
        batch: int,
        page_size: int,
        pages: int,
    ) -> "GpuSetup":
        """With so many pages for each sequence."""
        cache = random_cache(spec, kv, batch * pages, page_size, "cuda")
        table = cupy().arange(batch * pages, dtype=np.int32).reshape(batch, pages)
        return cls(spec, weights, cache, table)

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.block_table.shape[0]


def pages_for(spec: ModelSpec, context: int, page_size: int) -> int:
    """Pages of a sequence that the measurements need."""
    return max(-(-context // page_size), _gap_pages(spec, page_size))


def greedy_step(setup: GpuSetup, context: int) -> DecodeStep:
    """A decode step for sequences of `context` tokens that ends with the best token of each."""
    args = setup.spec, setup.weights, setup.cache.pages, setup.block_table
    step = DecodeStep(*args).for_context(context)
    # Equal tokens would choose the same experts.
    ids = np.random.default_rng(0).permutation(setup.spec.vocab_size)[: setup.batch]
    step.tokens[...] = cupy().asarray(ids.astype(np.int32))
    return step


def sampled_steps(setup: GpuSetup, context: int) -> dict[str, DecodeStep]:
    """Way of choosing the next token on the device -> a decode step that ends with it, as it is
    for sequences of `context` tokens."""
    greedy = greedy_step(setup, context)
    top_p = greedy.with_sampler(Sampler(setup.batch, setup.spec.vocab_size))
    assert top_p.sampler is not None
    rows = [Chooser(TOP_P, [0], 1, seed, 0, frozenset()) for seed in range(setup.batch)]
    top_p.sampler.set_rows(rows)
    return {"greedy": greedy, "top_p": top_p}


def replayable(step: DecodeStep, context: int, ranges: bool = False) -> Graph | Eager:
    """The step for replays from `context` tokens on, in NVTX ranges if so asked."""
    step.seq_lens[...] = context - 1  # making it runs it once
    return (Eager if ranges else Graph)(step.enqueue)


def step_ms(step: DecodeStep, graph: Graph | Eager, context: int) -> float:
    """Median milliseconds of a step whose tokens are the `context`-th of their sequences; after
    REST_SECONDS, since a GPU at its power limit slows down with what it did before."""

    def prepare() -> None:
        step.seq_lens[...] = context - 1  # embed counts the new token

    time.sleep(REST_SECONDS)
    milliseconds = replay_ms(graph, prepare)
    if not bool(cupy().isfinite(step.logits).all()):
        raise RuntimeError("the measured step gave logits that are NaN or infinite")
    return milliseconds


def engine_times(setup: GpuSetup, step: DecodeStep) -> dict[str, float]:
    """What the engine (scheduler, pages, tokens to the host, stop checks) makes of these weights.

    host_gap_pct: how long the GPU waits for the host between steps, in percent of a step.
    100 * (wall time of a step / GPU time of a step - 1): the first by the clock, of GAP_STEPS
    greedy steps after prompts of GAP_PROMPT tokens, the second by events, of the same steps
    replayed one after another. What the host does while the GPU computes costs nothing; contexts
    are short, where a step is shortest and a gap weighs most.

    prompt_ms: from the request to the first token of one prompt of prompt_tokens tokens.
    """
    wall, prompt_ms = _engine_ms(setup)
    middle = _gap_prompt(setup.spec) + GAP_WARM_UP + GAP_STEPS // 2
    step = step.for_context(middle)
    alone = step_ms(step, replayable(step, middle), middle)
    return {
        "host_gap_pct": 100 * (wall / alone - 1),
        "prompt_tokens": _prompt(setup.spec),
        "prompt_ms": prompt_ms,
    }


def _prompt(spec: ModelSpec) -> int:
    return min(PROMPT, spec.max_positions - 1)


def _gap_prompt(spec: ModelSpec) -> int:
    return max(1, min(GAP_PROMPT, spec.max_positions - GAP_WARM_UP - GAP_STEPS - 1))


def _gap_pages(spec: ModelSpec, page_size: int) -> int:
    tokens = max(_gap_prompt(spec) + GAP_WARM_UP + GAP_STEPS, _prompt(spec)) + 1
    return -(-tokens // page_size)


def _engine_ms(setup: GpuSetup) -> tuple[float, float]:
    """Milliseconds of an engine step in which every sequence gets one token, and of a prompt."""
    spec, batch, prompt = setup.spec, setup.batch, _gap_prompt(setup.spec)
    size = setup.cache.pages[0][0].page_size
    pages = _gap_pages(spec, size)
    cache = random_cache(spec, setup.cache.config, batch * pages + 1, size, "cuda")
    model = GpuModel(spec, setup.weights)
    model.bind(cache.pages, pages, batch)
    at_once = max(batch * prompt, _prompt(spec))
    scheduler = Scheduler(PageAllocator(batch * pages, size), batch, at_once)
    engine = Engine(Runner(model, cache, size), scheduler, None, frozenset(), pages * size)
    tokens = GAP_WARM_UP + GAP_STEPS
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True).resolve({})
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, spec.vocab_size, (batch, prompt)).tolist()
    requests = [engine.add(ids, params) for ids in prompts]
    while any(len(r.sequences[0].output_ids) < GAP_WARM_UP for r in requests):
        engine.step()
    done = sum(len(r.sequences[0].output_ids) for r in requests)
    start = time.perf_counter()
    while not all(r.done for r in requests):
        engine.step()
    elapsed = time.perf_counter() - start
    steps = (batch * tokens - done) / batch
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True).resolve({})
    ids = rng.integers(0, spec.vocab_size, _prompt(spec)).tolist()
    start = time.perf_counter()
    request = engine.add(ids, first)
    while not request.done:
        engine.step()
    prompt_elapsed = time.perf_counter() - start
    engine.close()
    return 1e3 * elapsed / steps, 1e3 * prompt_elapsed
