"""The record of `npmoe eval` for a person: tables for a terminal, and the plot."""

from typing import Any

from npmoe.dtypes import gigabytes
from npmoe.eval.plot import scatter_svg

HEADINGS = ("KV cache", "bytes/token", "position", "perplexity", "bits/byte", "KL, nats", "top-1")


def describe_evaluation(record: dict[str, Any]) -> str:
    """A table of losses, and one of passkeys where there were any."""
    r = record
    parts = r["weights"]
    weights = parts if isinstance(parts, str) else ",".join(f"{p}={f}" for p, f in parts.items())
    lines = [
        f"{r['model']} on {r['text']}: {r['tokens']:,} tokens, {r['bytes']:,} bytes, in windows of "
        f"{r['window']:,}; weights {weights}",
        f"KL divergence from, and top-1 agreement with, the {r['reference']} cache",
        "",
        *_table([HEADINGS, *(row for cache in r["caches"] for row in _loss_rows(cache))]),
        *(_copies(cache) for cache in r["caches"] if cache["bytes_per_sequence"]),
    ]
    asked = r["caches"][0]["passkey"]
    if asked:
        contexts = [f"{key['context']:,}" for key in asked]
        lines += [
            "",
            f"passkeys found (digits right), of {asked[0]['trials']} at each context",
            *_table([("KV cache", *contexts), *map(_passkey_row, r["caches"])]),
        ]
    return "\n".join(lines)


def plot_evaluation(record: dict[str, Any]) -> str:
    """An SVG: loss of all positions against bytes per token."""
    points = [
        (cache["kv_cache"], cache["bytes_per_token"], cache["overall"]["nats_per_token"])
        for cache in record["caches"]
    ]
    title = f"{record['model']} on {record['text']}, {record['tokens']:,} tokens"
    return scatter_svg(points, title, "KV cache, bytes per token", "loss, nats per token")


def _loss_rows(cache: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [(cache["kv_cache"], f"{cache['bytes_per_token']:,.0f}", "all", *_row(cache["overall"]))]
    for bucket in cache["buckets"]:
        rows.append(("", "", f"{bucket['from']:,}-{bucket['to']:,}", *_row(bucket)))
    return rows


def _row(losses: dict[str, Any]) -> tuple[str, ...]:
    bits = losses["bits_per_byte"]
    return (
        f"{losses['perplexity']:.3f}",
        "-" if bits is None else f"{bits:.4f}",
        f"{losses['kl_nats']:.2e}",
        f"{losses['top1_agreement']:.2%}",
    )


def _copies(cache: dict[str, Any]) -> str:
    """What a cache with windows takes besides."""
    return f"{cache['kv_cache']}: and copies of {gigabytes(cache['bytes_per_sequence'])} a sequence"


def _passkey_row(cache: dict[str, Any]) -> tuple[str, ...]:
    cells = [f"{key['found']:.0%} ({key['digits']:.0%})" for key in cache["passkey"]]
    return cache["kv_cache"], *cells


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
