"""Distributions of two and three tokens, by hand."""

import math

import numpy as np
import pytest

from npmoe.eval.distributions import ROWS, Tally, bucket_edges, score, summary

LN2 = math.log(2)


def logits(*rows: list[float]) -> np.ndarray:
    """Logits of these probabilities, off by a constant that a softmax takes away."""
    return (np.log(rows) + 3).astype(np.float32)


def test_one_position_by_hand() -> None:
    """p = (1/2, 1/2), q = (1/4, 3/4): KL = ln 2 / 2 + ln(2/3) / 2 = ln(4/3) / 2."""
    scores = score(logits([0.5, 0.5]), logits([0.25, 0.75]), np.array([0]))
    assert scores.nats == pytest.approx([math.log(4)], rel=1e-6)
    assert scores.kl == pytest.approx([math.log(4 / 3) / 2], rel=1e-6)


def test_kl_is_of_the_reference_from_the_other() -> None:
    """D(p || q) and D(q || p) differ: .9 ln 1.8 + .1 ln .2, and ln(5/9) / 2 + ln 5 / 2."""
    sure, even = logits([0.9, 0.1]), logits([0.5, 0.5])
    forward = score(sure, even, np.array([0])).kl
    backward = score(even, sure, np.array([0])).kl
    assert forward == pytest.approx([0.9 * math.log(1.8) + 0.1 * math.log(0.2)], rel=1e-5)
    assert backward == pytest.approx([(math.log(5 / 9) + math.log(5)) / 2], rel=1e-5)


def test_agreement_is_of_the_likeliest_token() -> None:
    reference = logits([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7])
    other = logits([0.4, 0.35, 0.25], [0.3, 0.5, 0.2], [0.2, 0.2, 0.6])
    assert score(reference, other, np.zeros(3, int)).agrees.tolist() == [True, False, True]


def test_the_reference_from_itself_is_nothing() -> None:
    x = np.random.default_rng(0).normal(size=(2 * ROWS + 3, 7)).astype(np.float32) * 30
    scores = score(x, x, np.full(len(x), 2))
    assert scores.kl.tolist() == [0.0] * len(x)
    assert scores.agrees.all()
    wide = x.astype(np.float64)
    by_hand = np.log(np.exp(wide).sum(axis=1)) - wide[:, 2]
    assert scores.nats == pytest.approx(by_hand, rel=1e-9, abs=1e-9)


def test_logits_far_from_zero_do_not_overflow() -> None:
    scores = score(logits([0.5, 0.5]) + 5000, logits([0.25, 0.75]) - 5000, np.array([1]))
    assert scores.kl == pytest.approx([math.log(4 / 3) / 2], rel=1e-3)


@pytest.mark.parametrize(
    ("context", "edges"),
    [
        (1, (0, 1)),
        (512, (0, 512)),
        (513, (0, 512, 513)),
        (2048, (0, 512, 2048)),
        (32768, (0, 512, 2048, 8192, 32768)),
        (40000, (0, 512, 2048, 8192, 32768, 40000)),
    ],
)
def test_bucket_edges(context: int, edges: tuple[int, ...]) -> None:
    assert bucket_edges(context) == edges


def test_positions_fall_into_their_buckets() -> None:
    """Position 511 is the last of the first bucket, 512 the first of the second."""
    tally = Tally(bucket_edges(2048))
    scores = score(logits(*[[0.5, 0.5]] * 3), logits(*[[0.25, 0.75]] * 3), np.array([0, 0, 1]))
    tally.add(510, scores)
    assert tally.sums[:, 0].tolist() == [2, 1]
    assert tally.sums[:, 1] == pytest.approx([2 * math.log(4), math.log(4 / 3)], rel=1e-6)
    tally.add(2047, scores.__class__(*(a[:1] for a in vars(scores).values())))
    assert tally.sums[:, 0].tolist() == [2, 2]


def test_summary() -> None:
    """Four tokens of ln 2 nats are perplexity 2; over two bytes, two bits a byte."""
    found = summary(np.array([4, 4 * LN2, 0.02, 3]), 2)
    assert found["perplexity"] == pytest.approx(2)
    assert found["bits_per_byte"] == pytest.approx(2)
    assert found["kl_nats"] == pytest.approx(0.005)
    assert (found["tokens"], found["top1_agreement"]) == (4, 0.75)
    assert summary(np.array([1.0, LN2, 0, 1]), 0)["bits_per_byte"] is None
