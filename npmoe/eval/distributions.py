"""Distributions of the next token, compared position by position and summed by position."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

EDGES = (0, 512, 2048, 8192, 32768)
ROWS = 64
"""Positions at a time: float64 copies of logits are of this many rows."""


@dataclass(frozen=True)
class Scores:
    """Of T positions, each `[T]`: nats = -log q(target), kl = D(p || q) in nats, and whether the
    likeliest token of p is that of q. p is the reference, q what is scored."""

    nats: np.ndarray
    kl: np.ndarray
    agrees: np.ndarray


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log p in float64, `[T, V]`."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def score(reference: np.ndarray, logits: np.ndarray, targets: np.ndarray) -> Scores:
    """Logits float32 `[T, V]` of the same positions, targets int `[T]`."""
    assert reference.shape == logits.shape
    parts = []
    for first in range(0, len(targets), ROWS):
        rows = slice(first, first + ROWS)
        log_p, log_q = log_softmax(reference[rows]), log_softmax(logits[rows])
        nats = -np.take_along_axis(log_q, targets[rows, None], axis=1)[:, 0]
        kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
        parts.append((nats, kl, log_p.argmax(axis=1) == log_q.argmax(axis=1)))
    return Scores(*map(np.concatenate, zip(*parts, strict=True)))


def bucket_edges(context: int) -> tuple[int, ...]:
    """Buckets of positions in a window: edges[i] <= position < edges[i + 1]; the last edge is the
    context itself."""
    return (*(edge for edge in EDGES if edge < context), context)


class Tally:
    """Sums of scores in each bucket: `sums` float64 `[buckets, 4]`, tokens, nats, kl, agreeing."""

    def __init__(self, edges: tuple[int, ...]) -> None:
        self.edges = edges
        self.sums = np.zeros((len(edges) - 1, 4))

    def add(self, first: int, scores: Scores) -> None:
        """Scores of the positions from `first` on."""
        positions = first + np.arange(len(scores.nats))
        bucket = np.searchsorted(self.edges, positions, side="right") - 1
        columns = np.ones(len(positions)), scores.nats, scores.kl, scores.agrees
        np.add.at(self.sums, bucket, np.stack(columns, axis=1))


def summary(sums: np.ndarray, num_bytes: int) -> dict[str, Any]:
    """Means of a row of `Tally.sums`, or of the sum of rows, over tokens that stand for num_bytes.

    bits_per_byte is None where the tokens stand for no text.
    """
    tokens, nats, kl, agreeing = sums.tolist()
    return {
        "tokens": int(tokens),
        "bytes": num_bytes,
        "nats_per_token": nats / tokens,
        "perplexity": math.exp(nats / tokens),
        "bits_per_byte": nats / math.log(2) / num_bytes if num_bytes else None,
        "kl_nats": kl / tokens,
        "top1_agreement": agreeing / tokens,
    }
