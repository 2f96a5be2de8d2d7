"""Read bandwidth of the memory that weights lie in, measured: the ceiling of every step."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from npmoe.bench.timing import replay_ms
from npmoe.runtime.device import cpu_threads, cupy
from npmoe.runtime.graphs import Graph
from npmoe.runtime.launch import launch
from npmoe.runtime.nvrtc import kernel

CPU_BYTES, CPU_RUNS = 1 << 28, 5
GPU_BYTES, GPU_RUNS = 1 << 32, 20


def read_bandwidth(device: str) -> float:
    """Bytes a second."""
    return _gpu_bandwidth() if device == "cuda" else cpu_bandwidth(cpu_threads())


def cpu_bandwidth(threads: int) -> float:
    """Bytes a second that `threads` threads read together from main memory, the best of some."""
    parts = [np.ones(CPU_BYTES // 8 // threads, np.uint64) for _ in range(threads)]
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(CPU_RUNS):
            start = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))
            best = min(best, time.perf_counter() - start)
    return sum(part.nbytes for part in parts) / best


def _gpu_bandwidth() -> float:
    """Of `roofline` over GPU_BYTES; the memory is given back."""
    milliseconds = _roofline_ms()
    cupy().get_default_memory_pool().free_all_blocks()
    return 1e3 * GPU_BYTES / milliseconds


def _roofline_ms() -> float:
    xp = cupy()
    data = xp.arange(GPU_BYTES // 4, dtype=xp.uint32)
    sink = xp.zeros(1, xp.uint32)
    blocks = 2 * xp.cuda.Device().attributes["MultiProcessorCount"]
    function = kernel("roofline", "roofline")
    graph = Graph(lambda: launch(function, (blocks,), 512, sink, data, data.nbytes // 16))
    return replay_ms(graph, lambda: None, GPU_RUNS)
