"""Formats of the KV cache beside each other: a decode step by format, context and batch.

    python bench/kv_table.py                                             # seed-67b, on a GPU
    python bench/kv_table.py --kv-cache bf16 fp8,fp4 --context 1024 8192 --batch 1
    python bench/kv_table.py --redraw bench/results/kv-table-h200.json   # measures nothing

Writes kv-table-<GPU>.json after every cell, then the same as a Markdown table and, where matplotlib
is installed (pip install 'npmoe[bench]'), as a plot; --redraw draws both elsewhere. For what is
measured, and what a cell says that cannot be, see npmoe/bench/kv_table.py.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from npmoe.bench.kv_plot import NoPlot, write_plot
from npmoe.bench.kv_report import cell_words, markdown, row_names
from npmoe.bench.kv_table import BATCHES, CONTEXTS, KV_CACHES, TableOptions, measure_cells
from npmoe.bench.record import environment, results_file
from npmoe.bench.shapes import SHAPES
from npmoe.bench.subject import named_shape
from npmoe.config import KVCacheConfig, formats_by_part, parse_weights
from npmoe.runtime.device import resolve_device

HERE = Path(__file__).resolve().parent


def measure(args: argparse.Namespace) -> Path:
    """Measures and prints cell by cell; the JSON file, which is written anew after each."""
    device = resolve_device(args.device)
    options = TableOptions(
        weights=parse_weights(formats_by_part(args.weights)),
        kv_caches=tuple(map(KVCacheConfig.parse, args.kv_cache)),
        contexts=tuple(args.context),
        batches=tuple(args.batch),
        page_size=args.page_size,
        quiet=args.quiet,
    )
    where = environment(device, HERE)
    where["commit"] = args.commit or where["commit"]
    path = results_file(args.out, "kv-table", where)
    path.parent.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    for record in measure_cells(named_shape(args.shape), options, device):
        records.append(record | where)
        path.write_text(json.dumps(records, indent=1) + "\n")
        words = record.get("refused") or cell_words(record, [])
        (name,) = row_names([record])
        print(f"{name}, batch {record['batch']}, {record['context']:,} tokens: {words}", flush=True)
    return path


def draw(path: Path) -> None:
    """The table and the plot beside a JSON file; if there is no plot, standard error says why."""
    records = json.loads(path.read_text())
    path.with_suffix(".md").write_text(markdown(records))
    try:
        write_plot(records, path.with_suffix(".png"))
    except NoPlot as error:
        print(f"no plot: {error}", file=sys.stderr)


def main() -> None:
    """Measures, unless told to redraw, and draws."""
    parser = argparse.ArgumentParser(description="KV cache formats by context and batch")
    parser.add_argument("--shape", default="seed-67b", metavar="S", help=f"of {', '.join(SHAPES)}")
    parser.add_argument(
        "--weights", default="fp4", metavar="F", help="a format, or part=format,part=format"
    )
    parser.add_argument(
        *("--kv-cache",), nargs="+", default=KV_CACHES, metavar="F", help="formats, each F or K,V"
    )
    parser.add_argument("--context", type=int, nargs="+", default=CONTEXTS, metavar="N")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES, metavar="N")
    parser.add_argument("--page-size", type=int, default=TableOptions.page_size, metavar="N")
    parser.add_argument("--device", default="cuda", metavar="D", help="auto, cpu or cuda")
    parser.add_argument("--commit", help="what is measured, where git does not say")
    parser.add_argument("--out", type=Path, default=HERE / "results", metavar="FOLDER")
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="table and plot of a JSON file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    draw(args.redraw or measure(args))


if __name__ == "__main__":
    main()
