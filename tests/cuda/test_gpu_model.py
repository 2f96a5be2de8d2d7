"""GpuModel under the engine, kernels on the CPU: the tokens are those of the NumPy model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from npmoe.config import KVCacheConfig, parse_weights
from npmoe.engine.engine import Engine
from npmoe.engine.output import Completion
from npmoe.engine.runner import Runner
from npmoe.engine.scheduler import Scheduler
from npmoe.kv.pages import PageAllocator
from npmoe.models import decode, gpu
from npmoe.models.cache import ModelCache
from npmoe.models.gpu import GpuModel
from npmoe.models.layers import CausalLM
from npmoe.ops import sampler
from npmoe.sampling import SamplingParams
from tests.cuda.build import kernel, launch
from tests.cuda.steps import NumPyAsCuPy, decode_on_cpu
from tests.cuda.test_decode_step import PAGE, PAGES_EACH, SHAPE, make_weights

SHORT_CONTEXT, LONG_CONTEXT = 4, 6
"""Tokens up to which a context is short, and from which it is long: some pass both on the way."""
PROMPTS = [[3, 1], [15, 9, 2], [6]]


class Stream:
    """One on which everything is done at once."""

    null: "Stream"
    ptr = 0

    def __init__(self, non_blocking: bool = False) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


Stream.null = Stream()


class Event:
    def __init__(self, disable_timing: bool) -> None:
        self.recorded = False

    def record(self, stream: Stream) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded


class Graph:
    """As npmoe.runtime.graphs: runs once when made, and at every replay."""

    made = 0

    def __init__(self, enqueue: Callable[[], None], stream: Stream) -> None:
        self.replay = enqueue
        enqueue()
        Graph.made += 1


def copy_to_pinned(target: np.ndarray, source: np.ndarray, stream: Stream) -> None:
    target.reshape(-1)[: source.size] = source.reshape(-1)


@contextmanager
def gpu_on_cpu() -> Iterator[None]:
    """A GPU of three multiprocessors, whose graphs are of two sequences."""
    xp = NumPyAsCuPy(3, 227 << 10)
    xp.cuda = SimpleNamespace(Device=xp.cuda.Device, Stream=Stream, Event=Event)
    replaced: dict[str, Any] = {
        "cupy": lambda: xp,
        "Graph": Graph,
        "BUCKETS": (2,),
    }
    replaced["pinned_zeros"] = lambda *shape, dtype: np.zeros(shape, dtype)
    replaced["copy_to_pinned"] = copy_to_pinned
    with (
        decode_on_cpu(kernel, launch, True, multiprocessors=3),
        patch.object(sampler, "CLUSTER", 2),
        patch.object(decode.DecodeStep, "long_context", LONG_CONTEXT),
        patch.object(decode.DecodeStep, "short_context", SHORT_CONTEXT),
        patch.object(GpuModel, "max_sampled_seqs", 2),
        patch.multiple(gpu, **replaced),
    ):
        yield


def make_cache(seqs: int) -> ModelCache:
    """Pages in bf16 for so many sequences."""
    return ModelCache(SHAPE.spec(), PAGES_EACH * seqs, PAGE, KVCacheConfig())


def run(
    model: Any, cache: ModelCache, num_pages: int, each: list[SamplingParams]
) -> list[Completion]:
    """What an engine makes of the first prompts."""
    scheduler = Scheduler(PageAllocator(num_pages, PAGE), 8, 512)
    engine = Engine(Runner(model, cache, PAGE), scheduler, None, frozenset(), PAGE + 6)
    requests = [engine.add(p, s.resolve({})) for p, s in zip(PROMPTS, each, strict=False)]
    while not all(r.done for r in requests):
        engine.step()
    scheduler.allocator.check_integrity([])
    return [engine.completion(r) for r in requests]


GREEDY = SamplingParams(max_tokens=3)
LONG = SamplingParams(max_tokens=15)  # over the end of a page
MIXED = [
    SamplingParams(temperature=1.0, top_p=0.9, seed=4, max_tokens=3),
    LONG,
    SamplingParams(temperature=0.7, seed=9, presence_penalty=1.5, logprobs=3, max_tokens=5),
]


@pytest.mark.parametrize(
    ("each", "graphs"), [([GREEDY] * 3, 5), (MIXED, 8)], ids=["greedy", "mixed"]
)
def test_tokens_are_those_of_the_numpy_model(each: list[SamplingParams], graphs: int) -> None:
    """Three sequences are two groups, one of them with an unused row, until two are left."""
    plain, on_device = make_weights(parse_weights("bf16"))
    num_pages = 2 * PAGES_EACH
    want = run(CausalLM(SHAPE.spec(), plain), make_cache(2), num_pages, each)
    with gpu_on_cpu():
        Graph.made = 0
        model, cache = GpuModel(SHAPE.spec(), on_device), make_cache(3)
        model.bind(cache.pages, 2, max_num_seqs=8)
        assert Graph.made == 3  # decoding, and prompts with and without logits
        got = run(model, cache, num_pages, each)
        assert Graph.made == graphs
    for a, b in zip(got, want, strict=True):
        assert a.token_ids == b.token_ids
        for x, y in zip(a.logprobs or [], b.logprobs or [], strict=True):
            assert list(x.top) == list(y.top)
            assert x.logprob == pytest.approx(y.logprob, abs=1e-3)
