"""Records of `measure_cells` for a reader: Markdown, a table for each batch."""

from collections import Counter
from typing import Any

from npmoe.bench.measure import format_words
from npmoe.config import KVCacheConfig
from npmoe.dtypes import gigabytes

Record = dict[str, Any]

LEGEND = (
    "Each cell: median time of a greedy step, which gives every sequence one token (its floor: the "
    "bytes that it must read over the read bandwidth), memory of the KV cache, and the rate at "
    "which the attention kernel alone reads keys and values. Tokens that fit: free memory beside "
    "the weights, as the driver reports it, over the bytes of a token."
)


def markdown(records: list[Record]) -> str:
    """The whole page; records of one shape, on one device."""
    first = records[0]
    lines = [
        f"# {first['shape']}: formats of the KV cache",
        "",
        _where(first),
        "",
        f"Weights {format_words(first['weights'])}, pages of {first['page_size']} tokens; read "
        f"bandwidth {first['read_gbps']:,.0f} GB/s, measured. {LEGEND}",
    ]
    for batch in dict.fromkeys(r["batch"] for r in records):
        lines += ["", f"## Batch {batch}", ""]
        lines += batch_table([r for r in records if r["batch"] == batch])
    return "\n".join(lines) + "\n"


def row_names(records: list[Record]) -> list[str]:
    """The name of the row of each record: the KV format, and the elements that share a scale where
    they are not the default, which records without the number have, or tell two rows apart."""
    default = KVCacheConfig.group_size
    rows = [(r["kv"], r.get("kv_group_size", default)) for r in records]
    alike = Counter(kv for kv, _ in set(rows))
    return [
        kv if alike[kv] == 1 and size == default else f"{kv} in groups of {size}"
        for kv, size in rows
    ]


def batch_table(records: list[Record]) -> list[str]:
    """Lines of the table of one batch; formats down, contexts across. What has no number to show
    is a note below, said once."""
    contexts, names = sorted({r["context"] for r in records}), row_names(records)
    headings = ["KV cache", "tokens that fit", *(f"{c:,} tokens" for c in contexts)]
    lines = [_row(headings), _row(["---"] * len(headings))]
    notes: list[str] = []
    for name in dict.fromkeys(names):
        row = [r for r, own in zip(records, names, strict=True) if own == name]
        fitting = next((f"{r['tokens_that_fit']:,}" for r in row if "tokens_that_fit" in r), "-")
        cells = {r["context"]: r for r in row}
        words = [cell_words(cells[c], notes) if c in cells else "-" for c in contexts]
        lines.append(_row([name, fitting, *words]))
    if notes:
        lines += ["", *(f"{i}. {words}" for i, words in enumerate(notes, 1))]
    return lines


def cell_words(record: Record, notes: list[str]) -> str:
    """A cell: what was measured, the GB that it would need, or the number of the note that says why
    it was refused, which is added to `notes` if it is new."""
    if "needs_gb" in record:
        return f"needs {gigabytes(1e9 * record['needs_gb'])}"
    if "refused" in record:
        if record["refused"] not in notes:
            notes.append(record["refused"])
        return f"refused, note {notes.index(record['refused']) + 1}"
    words = [
        f"{record['ms_per_token']:.2f} ms (floor {record['floor_ms']:.2f})",
        gigabytes(1e9 * record["kv_gb"]),
    ]
    rate = record["attention_gbps"]
    if rate is not None:
        words.append(f"{rate / 1e3:.2f} TB/s")
    return ", ".join(words)


def _where(record: Record) -> str:
    """GPU or processor, driver, versions, commit and date."""
    words = [record["gpu"] if "gpu" in record else f"CPU {record['machine']}"]
    if record.get("driver"):
        words.append(f"driver {record['driver']}")
    words += [f"{name} {version}" for name, version in record["versions"].items()]
    words += [f"commit {record['commit'] or 'unknown'}", record["date"]]
    return ", ".join(words)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
