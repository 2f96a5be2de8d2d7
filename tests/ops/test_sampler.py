"""What the sampler's kernel is told, packed by hand."""

import numpy as np

from npmoe.ops.sample import Chooser
from npmoe.ops.sampler import (
    BIASED,
    CHOOSES,
    COUNTS,
    REPORT_WORDS,
    REPORTS,
    ROW,
    needs_sampler,
    pack_row,
    pack_states,
    read_report,
)
from npmoe.sampling import MAX_LOGPROBS, SamplingParams


def chooser(**params: object) -> Chooser:
    resolved = SamplingParams(**params).resolve({})  # type: ignore[arg-type]
    return Chooser(resolved, [1, 4, 4, 6, 4], 2, (7 << 32) + 9, 3, frozenset({0, 4}))


def test_a_row_is_64_bytes_without_gaps() -> None:
    assert ROW.itemsize == 64
    assert [offset for _, offset in (ROW.fields or {}).values()] == list(range(0, 56, 4))


def test_what_a_row_says() -> None:
    row = pack_row(chooser(temperature=0.5, top_k=10**12, top_p=0.25, min_p=0.125), 100)
    assert row["flags"] == CHOOSES
    assert (row["temperature"], row["top_k"]) == (0.5, 100)
    assert (row["top_p"], row["min_p"], row["repetition"]) == (0.25, 0.125, 1)
    assert (row["seed_low"], row["seed_high"], row["stream"]) == (9, 7, 3)
    row = pack_row(chooser(min_tokens=5, logprobs=7, logit_bias={1: 2.0}), 100)
    assert row["flags"] == CHOOSES | COUNTS | BIASED | REPORTS
    assert (row["temperature"], row["free_from"], row["alternatives"]) == (0, 7, 7)


def test_only_what_the_greedy_choice_cannot_do_needs_the_sampler() -> None:
    assert not needs_sampler(chooser(min_tokens=3))
    assert pack_row(chooser(), 100)["flags"] == 0
    assert needs_sampler(chooser(logprobs=0))
    assert pack_row(chooser(logprobs=0), 100)["flags"] == REPORTS
    assert needs_sampler(chooser(temperature=1.0))


def test_temperatures_that_float32_does_not_hold() -> None:
    for temperature in (5e-324, 1e308):
        packed = pack_row(chooser(temperature=temperature), 100)["temperature"]
        assert 0 < packed < np.inf
        assert 0 < np.float32(1) / packed < np.inf


def test_states() -> None:
    """Prompt 1, 4; completion 4, 6, 4; 0 and 4 end it."""
    want = [0b10, 0b1, 0, 0, 2 << 2 | 0b11, 0, 1 << 2, 0]
    assert pack_states(chooser(), 8).tolist() == want


def test_a_report() -> None:
    words = np.zeros(REPORT_WORDS, np.int32)
    values = words.view(np.float32)
    values[0] = -1.5
    words[1:3], values[1 + MAX_LOGPROBS : 3 + MAX_LOGPROBS] = [8, 2], [-0.5, -0.75]
    sampled = read_report(words, 5, 2)
    assert (sampled.token_id, sampled.logprob) == (5, -1.5)
    assert sampled.top == {8: -0.5, 2: -0.75}
