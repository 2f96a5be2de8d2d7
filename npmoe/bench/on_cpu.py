"""Times of decode steps on the CPU: the NumPy and Numba path, sampling included."""

from functools import partial
from typing import Any

import numpy as np

from npmoe.batch import Batch
from npmoe.bench.random_model import random_cache
from npmoe.bench.timing import call_ms
from npmoe.config import KVCacheConfig
from npmoe.models.cache import ModelCache
from npmoe.models.layers import CausalLM
from npmoe.models.specs import ModelSpec
from npmoe.ops.sample import Chooser
from npmoe.sampling import SamplingParams

TOP_P = SamplingParams(temperature=1.0, top_p=0.9, seed=0).resolve({})
GREEDY = SamplingParams(temperature=0.0, seed=0).resolve({})


def cpu_setup(
    spec: ModelSpec,
    weights: dict[str, Any],
    kv: KVCacheConfig,
    batch: int,
    page_size: int,
    context: int,
) -> tuple[CausalLM, ModelCache, Batch]:
    """The model, a filled cache, and one token a sequence, the `context`-th of each."""
    pages = -(-context // page_size)
    cache = random_cache(spec, kv, batch * pages, page_size, "cpu", num_slots=batch)
    table = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
    rows = np.arange(batch + 1, dtype=np.int32)
    last = np.full(batch, context - 1, np.int32)
    slots = table[:, (context - 1) // page_size] * page_size + (context - 1) % page_size
    switch = spec.longrope_switch
    variant = None if switch is None else np.full(batch, int(context > switch), np.int32)
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, batch).astype(np.int32)
    new = Batch(tokens, last, slots, rows, last + 1, table, rows[:-1], variant, rows[:-1])
    return CausalLM(spec, weights), cache, new


def step_ms(model: CausalLM, cache: ModelCache, batch: Batch) -> dict[str, float]:
    """Way of choosing the next token -> median milliseconds of a step."""

    def step(params: SamplingParams) -> list[int]:
        chooser = Chooser(params, [0], 1, 0, 0, frozenset())
        return [chooser.choose(row) for row in model.forward(batch, cache.layers)]

    return {"greedy": call_ms(partial(step, GREEDY)), "top_p": call_ms(partial(step, TOP_P))}
