"""Bandwidth that each kernel of a decode step reaches, beside the read bandwidth of this GPU.

    python bench/kernels.py --shape qwen3-30b-a3b --weights fp4 --kv-cache fp4

Takes the arguments of `npmoe bench`. Prints a table, or with --json the record, and adds the record
to the results of this GPU. See npmoe/bench/kernels.py for what is measured.
"""

import argparse
import json
from pathlib import Path

from npmoe.bench import command
from npmoe.bench.bandwidth import read_bandwidth
from npmoe.bench.kernels import as_records, kernel_times, table
from npmoe.bench.record import append, environment, results_file
from npmoe.llm import shipped_model
from npmoe.runtime.device import resolve_device

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Measures, prints and appends."""
    parser = argparse.ArgumentParser(description="each kernel of a decode step by itself")
    command.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the record")
    parser.add_argument("--commit", help="what is measured, where git does not say")
    parser.add_argument("--out", type=Path, help="default: bench/results/kernels-<GPU>.json")
    args = parser.parse_args()
    device = resolve_device("cuda")
    subject, options = command.read_subject(args, shipped_model()), command.read_options(args)
    ceiling = read_bandwidth(device)
    times = kernel_times(subject, options, ceiling)
    record = {
        "shape": subject.name,
        "weights": args.weights,
        "kv": args.kv_cache,
        "batch": options.batch,
        "context": options.context,
        "page_size": options.page_size,
        "read_gbps": round(ceiling / 1e9, 1),
        "kernels": as_records(times),
    }
    record |= environment(device, HERE)
    record["commit"] = args.commit or record["commit"]
    print(json.dumps(record) if args.json else table(times, ceiling))
    append(args.out or results_file(HERE / "results", "kernels", record), record)


if __name__ == "__main__":
    main()
