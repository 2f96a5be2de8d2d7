"""Penalties, filters and the counter-based draw."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npmoe.ops.sample import (
    Chooser,
    candidates_ref,
    gumbel_ref,
    log_softmax,
    penalize,
    philox_ref,
    report,
    sample_ref,
)
from npmoe.sampling import SamplingParams

# Probabilities 0.1, 0.4, 0.05, 0.25, 0.2: best first they are tokens 1, 3, 4, 0, 2.
FIVE = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))


def filtered(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[int]:
    return candidates_ref(logits, temperature, top_k, top_p, min_p)[0].tolist()


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ("00000000 00000000 00000000 00000000", 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            0x299F31D0_A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_published_vectors(counter: str, key: int, want: str) -> None:
    """kat_vectors of Random123 (philox4x32 10); the first word of a key is its low half."""
    words = np.array([[int(word, 16) for word in counter.split()]], np.uint32)
    assert [f"{word:08x}" for word in philox_ref(words, key)[0]] == want.split()


def test_gumbel_depends_on_token_position_and_stream_only() -> None:
    everyone = gumbel_ref(np.arange(50), 7, 3, 1)
    some = np.array([41, 2, 3, 17])
    np.testing.assert_array_equal(gumbel_ref(some, 7, 3, 1), everyone[some])
    for other in ((8, 3, 1), (7 + 2**32, 3, 1), (7, 4, 1), (7, 3, 2)):
        assert not np.any(gumbel_ref(np.arange(50), *other) == everyone)


def test_gumbel_has_the_right_mean_and_variance() -> None:
    noise = gumbel_ref(np.arange(100_000), 1, 0, 0)
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.04)


def test_no_filter_keeps_every_token_best_first() -> None:
    assert filtered(FIVE) == [1, 3, 4, 0, 2]


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, [1]), (3, [1, 3, 4]), (5, [1, 3, 4, 0, 2]), (9, [1, 3, 4, 0, 2])]
)
def test_top_k(top_k: int, kept: list[int]) -> None:
    assert filtered(FIVE, top_k=top_k) == kept


def test_top_k_ties_go_to_the_lower_id() -> None:
    assert filtered(np.array([1, 2, 2, 3, 2], np.float32), top_k=3) == [3, 1, 2]
    assert filtered(np.zeros(5, np.float32), top_k=2) == [0, 1]
    assert sample_ref(np.array([0, 5, 5], np.float32), 0.0, 0, 1.0, 0.0, 0, 0) == 1


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        *[(1e-9, [1]), (0.39, [1]), (0.41, [1, 3]), (0.64, [1, 3]), (0.66, [1, 3, 4])],
        *[(0.84, [1, 3, 4]), (0.86, [1, 3, 4, 0]), (0.96, [1, 3, 4, 0, 2])],
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: list[int]) -> None:
    assert filtered(FIVE, top_p=top_p) == kept


def test_top_p_that_is_reached_exactly() -> None:
    assert filtered(np.zeros(4, np.float32), top_p=0.5) == [0, 1]
    assert filtered(np.zeros(4, np.float32), top_p=0.75) == [0, 1, 2]


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.12, [1, 3, 4, 0, 2]), (0.24, [1, 3, 4, 0]), (0.6, [1, 3]), (1, [1])]
)
def test_min_p(min_p: float, kept: list[int]) -> None:
    assert filtered(FIVE, min_p=min_p) == kept


def test_filters_follow_each_other_in_the_documented_order() -> None:
    # Temperature 0.5 squares: 0.16, 0.0625, 0.04, 0.01, 0.0025 of 0.275: the first has 0.58.
    assert filtered(FIVE, temperature=0.5, top_p=0.55) == [1]
    # top_k first: 0.4 of 0.65 reaches 0.6, which 0.4 of 1 would not.
    assert filtered(FIVE, top_k=2, top_p=0.6) == [1]
    assert filtered(FIVE, top_p=0.6) == [1, 3]
    assert filtered(FIVE, top_p=0.8, min_p=0.6) == [1, 3]


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-30, 1e30, 1e308])
def test_extreme_temperatures(temperature: float) -> None:
    kept = filtered(FIVE * 100, temperature=temperature, top_p=0.9)
    assert kept[0] == 1
    assert (kept == [1]) == (temperature < 1)
    assert 0 <= sample_ref(FIVE * 100, temperature, 0, 1.0, 0.0, 0, 0) < 5


def naive(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> list[int]:
    """The definition: one full sort, then the filters one after another."""
    values = logits.astype(np.float64)
    values = (values - values.max()) / temperature
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if top_k:
        order = order[:top_k]
    weights = {i: float(np.exp(values[i])) for i in order}
    if top_p < 1:
        total, mass, kept = sum(weights.values()), 0.0, []
        for i in order:
            if mass >= top_p * total:
                break
            kept.append(i)
            mass += weights[i]
        order = kept
    return [i for i in order if weights[i] >= min_p * weights[order[0]]]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 60),
    st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    st.sampled_from([0, 1, 2, 5, 40, 100]),
    st.sampled_from([1e-6, 0.31, 0.77, 0.93, 0.999, 1.0]),
    st.sampled_from([0.0, 0.013, 0.41, 1.0]),
    st.sampled_from([1, 30, 2000]),
)
def test_candidates_equal_the_naive_definition(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float, spread: int
) -> None:
    """Logits are rounded, so that ties are common."""
    logits = np.round(np.random.default_rng(seed).standard_normal(size) * spread, 1)
    logits = logits.astype(np.float32)
    ids, scaled = candidates_ref(logits, temperature, top_k, top_p, min_p)
    assert ids.tolist() == naive(logits, temperature, top_k, top_p, min_p)
    assert np.all(np.diff(scaled) <= 0)


def test_sampled_frequencies_match_probabilities() -> None:
    """Chi-square over 4,000 draws; 18.5 is the 0.1 % point for four degrees of freedom."""
    for seed in (0, 1, 2**63 + 5):
        drawn = [sample_ref(FIVE, 1.0, 0, 1.0, 0.0, seed, position) for position in range(4000)]
        counts = np.bincount(drawn, minlength=5)
        expected = np.exp(FIVE) * 4000
        assert ((counts - expected) ** 2 / expected).sum() < 18.5


def test_sampled_frequencies_match_after_filters_and_temperature() -> None:
    drawn = [sample_ref(FIVE, 2.0, 3, 1.0, 0.0, 3, 9, stream) for stream in range(3000)]
    counts = np.bincount(drawn, minlength=5)
    weights = np.sqrt(np.array([0, 0.4, 0, 0.25, 0.2]))
    expected = weights / weights.sum() * 3000
    assert counts[[0, 2]].tolist() == [0, 0]
    kept = expected > 0
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 13.8  # two degrees


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = FIVE.copy()
    logits[[1, 3]] = -np.inf
    drawn = {sample_ref(logits, 1.0, 0, 1.0, 0.0, 0, position) for position in range(300)}
    assert drawn == {0, 2, 4}


def test_repetition_penalty_by_hand() -> None:
    logits = np.array([2, -2, 3, 4, 0], np.float32)
    penalize(logits, np.array([0, 0, 1]), np.array([3]), 2.0, 0.0, 0.0)
    assert logits.tolist() == [1, -4, 3, 2, 0]


def test_presence_and_frequency_count_the_completion_only() -> None:
    logits = np.array([2, -2, 3, 4, 0], np.float32)
    penalize(logits, np.array([0, 1]), np.array([3, 3, 4]), 1.0, 0.5, 0.25)
    assert logits.tolist() == [2, -2, 3, 4 - 0.5 - 0.5, -0.5 - 0.25]


def test_penalties_before_the_first_token() -> None:
    logits = np.array([2, -2, 3], np.float32)
    penalize(logits, np.array([0]), np.array([], np.int64), 1.0, 0.5, 0.25)
    assert logits.tolist() == [2, -2, 3]


def test_log_softmax() -> None:
    np.testing.assert_allclose(log_softmax(FIVE + 100), FIVE, atol=1e-5)
    assert log_softmax(FIVE).dtype == np.float32
    extreme = log_softmax(np.array([1000, 0, -np.inf], np.float32))
    assert extreme.tolist() == [0, -1000, -np.inf]


def make_chooser(token_ids: list[int], num_prompt: int, **params: Any) -> Chooser:
    resolved = SamplingParams(**params).resolve({})
    return Chooser(resolved, token_ids, num_prompt, 5, 1, frozenset({2}))


def test_scores_by_hand() -> None:
    """Bias first, then penalties; then the end token is forbidden while there are too few."""
    logits = np.array([2, -2, 3, 4, 0], np.float32)
    params = {"logit_bias": {0: 2.0}, "repetition_penalty": 2.0, "presence_penalty": 0.5}
    chooser = make_chooser([0, 1, 3], 2, min_tokens=2, **params)
    assert chooser.scores(logits).tolist() == [2, -4, -np.inf, 1.5, 0]
    late = make_chooser([0, 1, 3, 3], 2, min_tokens=2, **params)
    assert late.scores(logits).tolist() == [2, -4, 3, 1.5, 0]
    assert logits.tolist() == [2, -2, 3, 4, 0]


def test_a_chooser_draws_at_its_position_and_stream() -> None:
    chooser = make_chooser([0, 1, 3], 2, temperature=1.0)
    assert chooser.choose(FIVE) == sample_ref(FIVE, 1.0, 0, 1.0, 0.0, 5, 3, 1)


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({}, True),
        ({"top_p": 0.5, "top_k": 3}, True),
        ({"temperature": 0.1}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"frequency_penalty": -1.0}, False),
        ({"min_tokens": 1}, True),  # there is one already
        ({"min_tokens": 2}, False),
    ],
    ids=str,
)
def test_whether_the_argmax_is_taken(params: dict[str, Any], plain: bool) -> None:
    assert make_chooser([0, 1, 3], 2, **params).takes_argmax == plain


def test_report() -> None:
    sampled = report(FIVE, 0, 2)
    assert sampled.token_id == 0
    assert sampled.logprob == pytest.approx(math.log(0.1))
    assert list(sampled.top) == [1, 3]
    assert list(sampled.top.values()) == pytest.approx([math.log(0.4), math.log(0.25)])
    assert report(FIVE, 0, 0).top == {}
