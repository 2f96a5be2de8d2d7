"""Where a decode step's time goes: clock stamps inside every kernel of one replay of the graph.

    python bench/timeline.py --shape qwen3-30b-a3b --weights fp4 --kv-cache fp4 --context 1024

Per kernel of CUDA C, in microseconds, averaged over the layers: from the end of the one before to
this one's end, and the phases in between, each where the slowest block leaves it. Stamps cost a
little: compare phases, and take whole steps from bench/decode.py.
"""

import argparse
from typing import Any

import cupy as cp
import numpy as np

from npmoe.bench import command
from npmoe.bench.measure import BenchOptions, check_options
from npmoe.bench.on_gpu import GpuSetup, pages_for
from npmoe.bench.subject import Subject, check_subject, weights_of
from npmoe.bench.timing import replay_ms
from npmoe.llm import shipped_model
from npmoe.models import decode, grouped
from npmoe.models.decode import DecodeStep, Tuning
from npmoe.runtime import nvrtc
from npmoe.runtime.device import resolve_device
from npmoe.runtime.graphs import Graph

BLOCKS, LAUNCHES, STAMPS = 256, 128, 8
PHASES = {0: "entered", 1: "prepared", 3: "waited", 2: "staged", 4: "synced", 5: "math", 6: "met"}
KERNELS = (
    *("qkv", "attention", "output", "route", "gate_up", "down", "experts", "experts_qkv"),
    *("grouped_gate_up", "grouped_down", "combine"),
)
SKIP = 4  # layers at either end


def read_stamps(module: Any) -> np.ndarray:
    """Stamps int64 `[blocks, launches, 8]` of a module, 0 where there was none."""
    count = BLOCKS * LAUNCHES * STAMPS
    memory = cp.ndarray((count,), cp.uint64, module.get_global("stamps"))
    return memory.get().astype(np.int64).reshape(BLOCKS, LAUNCHES, STAMPS)


def clear_stamps(module: Any) -> None:
    """As before the first launch."""
    for name, count, kind in (
        ("stamps", BLOCKS * LAUNCHES * STAMPS, cp.uint64),
        ("stamp_launches", BLOCKS, cp.uint32),
    ):
        cp.ndarray((count,), kind, module.get_global(name))[...] = 0


def stamped_modules() -> dict[str, Any]:
    """From now on steps get kernels with stamps; each kernel's module by name, as they are made."""
    modules: dict[str, Any] = {}
    original = decode.kernel

    def stamped(stem: str, name: str, **macros: int) -> Any:
        macros["STAMPS"] = 1
        modules[name] = nvrtc._module(stem, name, tuple(sorted(macros.items())))
        return original(stem, name, **macros)

    decode.kernel = grouped.kernel = stamped
    return modules


def stamped_step(
    subject: Subject, options: BenchOptions, splits: int | None
) -> tuple[float, dict[str, np.ndarray]]:
    """Milliseconds of a step, and the stamps of one by kernel.

    Raises ValueError for an option out of range, and what `check_subject` raises.
    """
    check_options(subject, options, "cuda")
    pages = options.batch * pages_for(subject.spec, options.context, options.page_size)
    kv, size = options.kv_cache, options.page_size
    check_subject(subject, options.weights, kv, pages * size, "cuda")
    weights = weights_of(subject, options.weights, "cuda", options.quiet)
    setup = GpuSetup.make(subject.spec, weights, kv, options.batch, size, options.context)
    modules = stamped_modules()
    cache, table = setup.cache.pages, setup.block_table
    step = DecodeStep(subject.spec, weights, cache, table, tuning=Tuning(splits))
    step = step.for_context(options.context)
    graph = Graph(step.enqueue)

    def prepare() -> None:
        step.seq_lens[...] = options.context - 1

    milliseconds = replay_ms(graph, prepare)
    with graph.stream:
        for module in modules.values():
            clear_stamps(module)
        prepare()
    graph.replay()
    graph.stream.synchronize()
    rare = ("qkv", "experts") if "experts_qkv" in modules else ()  # of one layer only
    return milliseconds, {
        n: read_stamps(modules[n]) for n in KERNELS if n in modules and n not in rare
    }


def print_table(layers: range, stamps: dict[str, np.ndarray]) -> None:
    """The phases of every kernel, the mean over these layers."""
    print("kernel      total" + "".join(f"{n:>16}" for n in PHASES.values()) + "      end min/max")
    kernels = list(stamps)
    for i, name in enumerate(kernels):
        rows = []
        for layer in layers:
            before_name, before_layer = (kernels[i - 1], layer if i else layer - 1)
            start = stamps[before_name][:, before_layer, 7].max()
            mine = stamps[name][:, layer, :]
            row = []
            for phase in (7, *PHASES):
                times = mine[:, phase][mine[:, phase] > 0] - start
                row += [times.min(), times.max()] if times.size else [np.nan, np.nan]
            rows.append(row)
        mean = np.mean(rows, axis=0) / 1e3
        cells = "".join(f"{a:8.2f}{b:8.2f}" for a, b in mean[2:].reshape(-1, 2))
        print(f"{name:10}{mean[1]:7.2f}{cells}   {mean[0]:6.2f}{mean[1]:6.2f}")


def main() -> None:
    """Reads the command line, that of `npmoe bench`, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command.add_arguments(parser)
    parser.add_argument("--splits", type=int, help="parts of the context a head is spread over")
    args = parser.parse_args()
    resolve_device("cuda")
    subject = command.read_subject(args, shipped_model())
    milliseconds, stamps = stamped_step(subject, command.read_options(args), args.splits)
    print(f"{subject.name}, context {args.context}: {1e3 * milliseconds:.0f} us")
    print_table(range(SKIP, len(subject.spec.layers) - SKIP), stamps)


if __name__ == "__main__":
    main()
