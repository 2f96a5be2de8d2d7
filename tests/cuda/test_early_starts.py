"""Kernels that begin before those ahead of them have ended (programmatic dependent launch): before
`grid_wait` they neither read what a kernel still running may write, nor write what it may read.

A kernel may begin when all blocks of the one before it have called `launch_next`. If those call it
after their own `grid_wait`, all kernels before that one have ended; if they call it before
("hasty"), those that might run beside it may run still.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from npmoe.config import parse_weights
from npmoe.models.decode import DecodeStep, Tuning
from npmoe.ops.sample import Chooser
from npmoe.ops.sampler import Sampler
from npmoe.sampling import SamplingParams
from tests.cuda.build import Kernel, launch
from tests.cuda.build import kernel as build
from tests.cuda.steps import decode_on_cpu
from tests.cuda.test_decode_step import PAGES_EACH, SHAPE, make_cache, make_weights

Address = int


def whole(a: Any) -> Any:
    """The array of which this one shows a part."""
    while isinstance(a, np.ndarray) and isinstance(a.base, np.ndarray):
        a = a.base
    return a


@dataclass
class InOrder:
    """Launches one after another, and notes for each the arrays that it writes."""

    before: dict[Address, np.ndarray] = field(default_factory=dict)  # what each array held at first
    arrays: dict[Address, np.ndarray] = field(default_factory=dict)
    writes: list[set[Address]] = field(default_factory=list)
    hasty: list[bool] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def launch(self, kernel: Kernel, *arguments: Any, **options: Any) -> None:
        arrays = {a.ctypes.data: a for a in map(whole, arguments) if isinstance(a, np.ndarray)}
        old = {at: a.copy() for at, a in arrays.items()}
        launch(kernel, *arguments, **options)
        self.arrays |= arrays
        self.before = old | self.before
        self.writes.append({at for at, a in arrays.items() if a.tobytes() != old[at].tobytes()})
        self.hasty.append(kernel.was_hasty)
        self.names.append(kernel.name)

    @property
    def written(self) -> list[Address]:
        return sorted(set().union(*self.writes))

    def contents(self) -> dict[Address, bytes]:
        return {at: self.arrays[at].tobytes() for at in self.written}

    def reset(self) -> None:
        for at in self.written:
            self.arrays[at][...] = self.before[at]

    def in_flight(self, i: int) -> set[Address]:
        """What kernels before launch i may still be writing when it begins."""
        if i == 0:
            return set()
        return self.writes[i - 1] | (self.in_flight(i - 1) if self.hasty[i - 1] else set())


@dataclass
class Early:
    """The same launches, each beginning as early as it may."""

    order: InOrder
    in_flight: Callable[[int], set[Address]]
    count: int = 0

    def launch(self, kernel: Kernel, *arguments: Any, **options: Any) -> None:
        written, flying = self.order.written, self.in_flight(self.count)
        self.count += 1
        arrays = [self.order.arrays[at] for at in written]
        with kernel.begins_early(arrays, [at in flying for at in written]):
            launch(kernel, *arguments, **options)


def make_step(seqs: int, grouped: bool = False) -> DecodeStep:
    """Of one or two sequences, whose pages hold something: one drawn with penalties, one greedy."""
    weights = make_weights(parse_weights({"experts": "fp4", "attention": "fp8", "lm_head": "bf16"}))
    cache, rng = make_cache(("bf16", "fp4"), seqs), np.random.default_rng(3)
    for pages in (pages for layer in cache.layers for pages in layer):
        pages.codes[...] = rng.integers(0, 0x40, pages.codes.shape)
        if pages.scales is not None:
            pages.scales[...] = 0.25
    tables = np.arange(PAGES_EACH * seqs, dtype=np.int32).reshape(seqs, PAGES_EACH)
    tuning = Tuning(grouped=grouped)
    step = DecodeStep(SHAPE.spec(), weights[1], cache.layers, tables, tuning=tuning)
    step.tokens[:], step.seq_lens[:] = (5, 9)[:seqs], (40, 7)[:seqs]
    step = step.with_sampler(Sampler(seqs, SHAPE.vocab))
    drawn = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=2.0, logprobs=2)
    assert step.sampler is not None
    step.sampler.set_rows([Chooser(drawn.resolve({}), [1, 2, 3], 2, 7, 0, frozenset())])
    return step


def run(step: DecodeStep, launch: Any, bulk: bool) -> None:
    """Two steps, the second with nothing between it and the first."""
    with decode_on_cpu(build, launch, bulk, multiprocessors=3):
        step.enqueue()
        step.enqueue()


@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "plain"])
@pytest.mark.parametrize(
    ("seqs", "prompts", "grouped"),
    [(1, False, False), (2, False, False), (2, False, True), (2, True, True)],
    ids=["one", "two", "grouped", "prompts"],
)
def test_an_early_start_changes_no_bit(seqs: int, prompts: bool, grouped: bool, bulk: bool) -> None:
    with decode_on_cpu(build, launch, bulk, multiprocessors=3):
        step = make_step(seqs, grouped)
    step = step.for_prompts() if prompts else step
    order = InOrder()
    run(step, order.launch, bulk)
    expected = order.contents()
    hasty = {name for name, early in zip(order.names, order.hasty, strict=True) if early}
    experts = {"grouped_down", "combine"} if grouped else {"down"}
    stored = {"store_kv"} if prompts else set()
    assert hasty == {"attention", "output", "route"} | experts | stored
    order.reset()
    run(step, Early(order, order.in_flight).launch, bulk)
    assert order.contents() == expected


def test_a_read_that_comes_too_early_is_noticed() -> None:
    """Attention reads older keys before it waits: wrong, if they were still being written."""
    with decode_on_cpu(build, launch, True, multiprocessors=3):
        step = make_step(2)
    order = InOrder()
    run(step, order.launch, True)
    expected = order.contents()
    order.reset()
    keys = {step.cache[0][0].codes.ctypes.data}
    run(step, Early(order, lambda i: keys).launch, True)
    assert order.contents() != expected
