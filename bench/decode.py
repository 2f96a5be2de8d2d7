"""`npmoe bench --check` of one configuration, added to the results of this GPU.

    python bench/decode.py --shape qwen3-30b-a3b --weights fp4 --kv-cache fp4 --context 1024

Takes the arguments of `npmoe bench`; the record gets GPU, driver, versions, commit and date.
"""

import argparse
import json
from pathlib import Path

from npmoe.bench import command
from npmoe.bench.measure import measure
from npmoe.bench.record import append, environment, results_file
from npmoe.llm import shipped_model
from npmoe.runtime.device import resolve_device

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Measures, prints the record, and appends it."""
    parser = argparse.ArgumentParser(description="decode step on the GPU, as a record")
    command.add_arguments(parser)
    parser.add_argument("--commit", help="what is measured, where git does not say")
    parser.add_argument("--out", type=Path, help="default: bench/results/decode-<GPU>.json")
    args = parser.parse_args()
    device = resolve_device("cuda")
    subject = command.read_subject(args, shipped_model())
    record = measure(subject, command.read_options(args, check=True), device)
    record |= environment(device, HERE)
    record["commit"] = args.commit or record["commit"]
    print(json.dumps(record))
    append(args.out or results_file(HERE / "results", "decode", record), record)


if __name__ == "__main__":
    main()
