"""Medians of repeated runs, after a warm-up in which clocks rise and code is compiled."""

import statistics
import time
from collections.abc import Callable

from npmoe.runtime.device import cupy
from npmoe.runtime.graphs import Eager, Graph

WARM_UP_SECONDS = 0.4
REPLAYS = 100
CPU_SECONDS, CPU_LEAST = 2.0, 5


def replay_ms(
    graph: Graph | Eager, prepare: Callable[[], None], repeats: int | None = None
) -> float:
    """Median milliseconds of a replay on the GPU, over `repeats`, or REPLAYS.

    Events stand around whole replays, and all are queued before the first is waited for, so that
    the GPU never waits for Python. `prepare` enqueues what comes before each, outside the events.
    """
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP_SECONDS:
        for _ in range(10):
            _enqueue(graph, prepare)
        graph.stream.synchronize()
    pairs = []
    for _ in range(repeats or REPLAYS):
        with graph.stream:
            prepare()
        before, after = cupy().cuda.Event(), cupy().cuda.Event()
        before.record(graph.stream)
        graph.replay()
        after.record(graph.stream)
        pairs.append((before, after))
    graph.stream.synchronize()
    return statistics.median(cupy().cuda.get_elapsed_time(a, b) for a, b in pairs)


def _enqueue(graph: Graph | Eager, prepare: Callable[[], None]) -> None:
    with graph.stream:
        prepare()
    graph.replay()


def call_ms(function: Callable[[], object]) -> float:
    """Median milliseconds of a call on the CPU: of CPU_SECONDS of calls, at least CPU_LEAST."""
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP_SECONDS:
        function()
    times: list[float] = []
    while len(times) < CPU_LEAST or sum(times) < CPU_SECONDS:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)
