"""Where a decode step's time goes: clock stamps inside every kernel of one replay of the graph.

    python bench/timeline.py qwen3-30b-a3b --weights fp4 --kv fp4 --context 1024

Per kernel, in microseconds, averaged over the layers: from the end of the kernel before to this
one's end, and the phases in between, each where the slowest block leaves it. Stamps cost a little:
compare phases, and take whole steps from bench/decode.py.
"""

import argparse
from typing import Any

import cupy as cp
import numpy as np
from decode import SHAPES, median_ms, model_spec, random_cache, random_weights

from npmoe.models import decode
from npmoe.models.decode import DecodeStep, Tuning
from npmoe.runtime import nvrtc
from npmoe.runtime.graphs import Graph

BLOCKS, LAUNCHES, STAMPS = 256, 128, 8
PHASES = {0: "entered", 1: "prepared", 3: "waited", 2: "staged", 4: "synced", 5: "math", 6: "met"}
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


def timeline(options: argparse.Namespace) -> None:
    """Prints the table."""
    spec = model_spec(options.shape)
    weights, _ = random_weights(spec, options.weights, options.batch)
    cache, table, _ = random_cache(spec, options.kv, options.batch, options.context)
    modules: dict[str, Any] = {}
    original = decode.kernel

    def stamped(stem: str, name: str, **macros: int) -> Any:
        macros["STAMPS"] = 1
        modules[name] = nvrtc._module(stem, tuple(sorted(macros.items())))
        return original(stem, name, **macros)

    decode.kernel = stamped
    step = DecodeStep(spec, weights, cache.layers, table, tuning=Tuning(options.splits))
    graph = Graph(step.enqueue)

    def prepare() -> None:
        with graph.stream:
            step.seq_lens[...] = options.context - 1

    whole = median_ms(graph, prepare)
    for module in modules.values():
        clear_stamps(module)
    prepare()
    graph.replay()
    graph.stream.synchronize()
    names = [n for n in ("qkv", "attention", "output", "route", "gate_up", "down") if n in modules]
    stamps = {n: read_stamps(modules[n]) for n in names}
    layers = range(SKIP, len(spec.layers) - SKIP)
    print(f"{options.shape} {options.weights}/{options.kv} {options.context}: {1e3 * whole:.0f} us")
    print("kernel      total" + "".join(f"{n:>16}" for n in PHASES.values()) + "      end min/max")
    for i, name in enumerate(names):
        rows = []
        for layer in layers:
            before_name, before_layer = (names[i - 1], layer) if i else (names[-1], layer - 1)
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
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--weights", default="fp4")
    parser.add_argument("--kv", default="fp4")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--splits", type=int)
    timeline(parser.parse_args())


if __name__ == "__main__":
    main()
