"""Records of `measure_cells` for a reader: Markdown, a table for each batch."""

from typing import Any

from npmoe.bench.measure import format_words
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


def batch_table(records: list[Record]) -> list[str]:
    """Lines of the table of one batch; formats down, contexts across. What has no number to show
    is a note below, said once."""
    contexts = list(dict.fromkeys(r["context"] for r in records))
    headings = ["KV cache", "tokens that fit", *(f"{c:,} tokens" for c in contexts)]
    lines = [_row(headings), _row(["---"] * len(headings))]
    notes: list[str] = []
    for kv in dict.fromkeys(r["kv"] for r in records):
        row = [r for r in records if r["kv"] == kv]
        fitting = next((f"{r['tokens_that_fit']:,}" for r in row if "tokens_that_fit" in r), "-")
        lines.append(_row([kv, fitting, *(cell_words(r, notes) for r in row)]))
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
