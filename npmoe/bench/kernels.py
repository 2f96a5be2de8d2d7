"""Each kernel of a decode step by itself: the bandwidth it reaches beside the ceiling."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from npmoe.bench.bandwidth import read_bandwidth
from npmoe.bench.measure import BenchOptions, check_options
from npmoe.bench.on_gpu import GpuSetup, greedy_step, pages_for
from npmoe.bench.subject import Subject, check_subject, weights_of
from npmoe.bench.timing import replay_ms
from npmoe.bench.traffic import Traffic, step_traffic
from npmoe.models.decode import DecodeStep
from npmoe.runtime.device import cupy
from npmoe.runtime.graphs import Graph
from npmoe.runtime.recording import Launch, recorded

FLUSH_BYTES, REPLAYS = 1 << 28, 30


@dataclass(frozen=True)
class KernelTime:
    """name: the symbol, which says op and format. launches: of a step. us: microseconds of one.
    num_bytes: what one must read. gbps: the two divided. percent: of the measured ceiling."""

    name: str
    launches: int
    us: float
    num_bytes: float
    gbps: float
    percent: float


def kernel_times(
    subject: Subject, options: BenchOptions, bandwidth: float | None = None
) -> list[KernelTime]:
    """Every kernel of a step in a chain of its own, over all layers, in the order of the step.

    A chain is one CUDA graph. Before each replay a buffer larger than L2 is written, so that
    weights come from memory. What kernels wait for while they run (the choice of experts, hidden)
    is there from the step before: by itself none waits. bandwidth: bytes a second, measured if
    None.
    Raises ValueError for an option out of range, and what `check_subject` raises.
    """
    check_options(subject, options, "cuda")
    spec, batch = subject.spec, options.batch
    tokens = batch * pages_for(spec, options.context, options.page_size) * options.page_size
    check_subject(subject, options.weights, options.kv_cache, tokens, "cuda")
    ceiling = bandwidth or read_bandwidth("cuda")
    weights = weights_of(subject, options.weights, "cuda", options.quiet)
    setup = GpuSetup.make(
        *(spec, weights, options.kv_cache, batch, options.page_size, options.context)
    )
    step = greedy_step(setup, options.context)
    whole = Graph(step.enqueue)  # routing and lengths as in a step
    with whole.stream:
        step.seq_lens[...] = options.context - 1
    whole.replay()
    whole.stream.synchronize()
    traffic = step_traffic(
        *(spec, subject.parameters, weights, setup.cache, batch, options.context, "cuda")
    )
    return chain_times(step, options.context, traffic, ceiling)


def chain_times(
    step: DecodeStep, context: int, traffic: Traffic, ceiling: float, stem: str = ""
) -> list[KernelTime]:
    """`kernel_times` of a step that has run at this context; of kernels whose names begin with
    `stem` alone. ceiling: bytes a second."""
    with recorded() as launches:
        step.enqueue()
    scratch = cupy().zeros(FLUSH_BYTES, "uint8")

    def prepare() -> None:
        step.seq_lens[...] = context
        scratch[...] = 1

    found = []
    for name, chain in by_kernel(launches).items():
        if name.startswith(stem):
            milliseconds = replay_ms(Graph(partial(run, chain)), prepare, REPLAYS)
            found.append(achieved(chain, milliseconds, traffic, ceiling))
    return found


def by_kernel(launches: list[Launch]) -> dict[str, list[Launch]]:
    """Launches grouped by the kernel's name, in order of the first of each."""
    groups: dict[str, list[Launch]] = {}
    for launch in launches:
        groups.setdefault(launch.kernel.name, []).append(launch)
    return groups


def run(chain: list[Launch]) -> None:
    """Puts a chain on the current stream."""
    for launch in chain:
        launch.again()


def achieved(
    chain: list[Launch], milliseconds: float, traffic: Traffic, ceiling: float
) -> KernelTime:
    """Of a chain that took so long; ceiling in bytes a second."""
    count = len(chain)
    total = sum(traffic.of(launch.arguments) for launch in chain)
    rate = 1e3 * total / milliseconds
    return KernelTime(
        chain[0].kernel.name,
        count,
        1e3 * milliseconds / count,
        total / count,
        rate / 1e9,
        100 * rate / ceiling,
    )


def table(times: list[KernelTime], ceiling: float) -> str:
    """The kernels as text, with their sum; ceiling in bytes a second."""
    lines = [f"{'kernel':24} {'launches':>8} {'us':>8} {'MB':>9} {'GB/s':>7} {'%':>6}"]
    for t in times:
        lines.append(
            f"{t.name:24} {t.launches:8} {t.us:8.2f} {t.num_bytes / 1e6:9.3f} "
            f"{t.gbps:7.0f} {t.percent:6.1f}"
        )
    total = sum(t.us * t.launches for t in times) / 1e3
    lines.append(f"{total:.3f} ms in all, each by itself; ceiling {ceiling / 1e9:,.0f} GB/s")
    return "\n".join(lines)


def as_records(times: list[KernelTime]) -> list[dict[str, Any]]:
    """The kernels as JSON."""
    return [
        {
            "kernel": t.name,
            "launches": t.launches,
            "us": round(t.us, 3),
            "bytes": round(t.num_bytes),
            "gbps": round(t.gbps, 1),
            "percent": round(t.percent, 1),
        }
        for t in times
    ]
