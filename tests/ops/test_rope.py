"""Rotary embedding: the turn itself, and the frequencies of every rope type."""

import math
from dataclasses import replace

import numpy as np
import pytest

from npmoe.config import RopeConfig
from npmoe.ops.rope import (
    rope_cos_sin,
    rope_frequencies,
    rope_ref,
    rotate,
    split_pairs,
    yarn_score_factor,
)
from tests.helpers import normal


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    copy = x.copy()
    rotate(copy, cos, sin)
    return copy


@pytest.mark.parametrize("rope", [turned, rope_ref])
def test_a_turn_by_90_degrees(rope) -> None:
    # Pairs are (1, 3) and (2, 4); cos 0, sin 1 sends (a, b) to (-b, a).
    x = np.array([[[1, 2, 3, 4]]], np.float32)
    zeros, ones = np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32)
    assert rope(x, zeros, ones).tolist() == [[[-3, -4, 1, 2]]]
    assert rope(x, ones, zeros).tolist() == x.tolist()


@pytest.mark.parametrize("rope", [turned, rope_ref])
def test_elements_past_the_rotary_dimension_stay(rope) -> None:
    x = np.array([[[1, 2, 3, 4]]], np.float32)
    cos, sin = np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)
    assert rope(x, cos, sin).tolist() == [[[-2, 1, 3, 4]]]


def test_neighbours_turn_as_pairs_once_they_are_split() -> None:
    # A turn by 90 degrees sends the neighbours (1, 2) to (-2, 1) and (3, 4) to (-4, 3).
    x = np.array([[[1, 2, 3, 4]]], np.float32)
    assert split_pairs(x).tolist() == [[[1, 3, 2, 4]]]
    zeros, ones = np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32)
    assert turned(split_pairs(x), zeros, ones).tolist() == [[[-2, -4, 1, 3]]]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mscale_all_dim": 1.0}, (0.1 * math.log(40) + 1) ** 2),
        ({"mscale_all_dim": 0.707, "mscale": 1.0}, (0.0707 * math.log(40) + 1) ** 2),
        ({"mscale_all_dim": 1.0, "factor": None}, (0.1 * math.log(16) + 1) ** 2),
        ({"mscale_all_dim": 1.0, "factor": 1.0}, 1.0),
        ({"mscale": 1.0}, 1.0),
        ({"mscale_all_dim": 0.0}, 1.0),
        ({"mscale_all_dim": 1.0, "rope_type": "default"}, 1.0),
    ],
)
def test_yarn_scales_the_scores_of_latent_attention(changes, expected: float) -> None:
    rope = RopeConfig("yarn", factor=40.0, original_max_position_embeddings=4096)
    factor = yarn_score_factor(replace(rope, **changes), max_positions=16 * 4096)
    assert factor == pytest.approx(expected, rel=1e-12)


def test_every_head_of_a_token_turns_alike() -> None:
    cos, sin = rope_cos_sin(np.arange(5), np.array([[1, 0.1, 0.01, 0.001]], np.float32), 1.0)
    x = normal(5, 3, 8)
    np.testing.assert_allclose(turned(x, cos, sin), rope_ref(x, cos, sin), atol=1e-6)
    np.testing.assert_allclose(
        turned(x, cos, sin)[:, 1:2], rope_ref(x[:, 1:2], cos, sin), atol=1e-6
    )


def test_dot_products_depend_on_the_distance_only() -> None:
    frequencies, factor = rope_frequencies(RopeConfig(), 16, 64)
    q, k = normal(1, 1, 16), normal(1, 1, 16, seed=1)
    dots = []
    for start in (0, 7, 30):
        cos, sin = rope_cos_sin(np.array([start, start + 5]), frequencies, factor)
        dots.append(float((turned(q, cos[:1], sin[:1]) * turned(k, cos[1:], sin[1:])).sum()))
    np.testing.assert_allclose(dots, dots[0], rtol=1e-5)


def test_angles_are_position_times_frequency() -> None:
    frequencies = np.array([[math.pi / 4, 0], [math.pi / 2, 0]], np.float32)
    cos, sin = rope_cos_sin(np.array([2, 1]), frequencies, 3.0)
    np.testing.assert_allclose(cos, [[0, 3], [3 / math.sqrt(2), 3]], atol=1e-6)
    np.testing.assert_allclose(sin, [[3, 0], [3 / math.sqrt(2), 0]], atol=1e-6)
    cos, _ = rope_cos_sin(np.array([2, 2]), frequencies, 1.0, variant=np.array([0, 1]))
    np.testing.assert_allclose(cos, [[0, 1], [-1, 1]], atol=1e-6)


# Frequencies of a head of 8 with theta 10^4 are 1, 0.1, 0.01, 0.001.


def test_default_and_linear() -> None:
    frequencies, factor = rope_frequencies(RopeConfig(), 8, 100)
    np.testing.assert_allclose(frequencies, [[1, 0.1, 0.01, 0.001]], rtol=1e-6)
    assert factor == 1
    frequencies, factor = rope_frequencies(RopeConfig("linear", factor=4.0), 8, 100)
    np.testing.assert_allclose(frequencies, [[0.25, 0.025, 0.0025, 0.00025]], rtol=1e-6)
    assert factor == 1


def test_partial_rotary_has_fewer_frequencies() -> None:
    frequencies, _ = rope_frequencies(RopeConfig(partial_rotary_factor=0.5), 8, 100)
    np.testing.assert_allclose(frequencies, [[1, 0.01]], rtol=1e-6)


def test_llama3_slows_long_waves_and_blends_in_between() -> None:
    # Wavelengths are 2 pi times 1, 10, 100, 1000. With original length 400 pi, waves shorter than
    # 400 pi / 4 = 50 * 2 pi stay, those longer than 400 pi / 1 = 200 * 2 pi are slowed, and the one
    # of 100 * 2 pi makes 2 turns: smooth = (2 - 1) / (4 - 1).
    original = 400 * math.pi
    rope = RopeConfig(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=original,  # type: ignore[arg-type]
    )
    frequencies, factor = rope_frequencies(rope, 8, 100)
    blended = 0.01 * (1 / 3 + 2 / 3 / 8)
    np.testing.assert_allclose(frequencies, [[1, 0.1, blended, 0.001 / 8]], rtol=1e-5)
    assert factor == 1


def test_yarn_keeps_fast_turns_and_slows_slow_ones() -> None:
    # Dimension i makes original / (2 pi 10^i) turns: 1000, 100, 10, 1 for original = 2000 pi.
    # beta_fast 1000 and beta_slow 1 put the ramp from 0 to 3.
    rope = RopeConfig(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=2000 * math.pi,  # type: ignore[arg-type]
        beta_fast=1000.0,
        beta_slow=1.0,
        truncate=False,
    )
    frequencies, factor = rope_frequencies(rope, 8, 10**6)
    slowed = np.array([0, 1 / 3, 2 / 3, 1])
    expected = np.array([1, 0.1, 0.01, 0.001]) * (slowed / 4 + 1 - slowed)
    np.testing.assert_allclose(frequencies[0], expected, rtol=1e-5)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"attention_factor": 1.3, "mscale": 2.0, "mscale_all_dim": 1.0}, 1.3),
        (
            {"mscale": 2.0, "mscale_all_dim": 0.5},
            (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
        ),
        ({"mscale": 2.0}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
        ({"factor": None}, 0.1 * math.log(256 / 64) + 1),
    ],
)
def test_yarn_attention_factor(settings: dict[str, float], expected: float) -> None:
    rope = RopeConfig(
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64} | settings  # type: ignore[arg-type]
    )
    assert rope_frequencies(rope, 8, 256)[1] == pytest.approx(expected)


def test_yarn_truncates_the_ramp_to_whole_dimensions() -> None:
    # 32 turns at 4 log10(64 / 64 pi) / 4 = -0.497, cut to 0; 1 turn at log10(64 / 2 pi) = 1.008,
    # raised to 2, so the ramp is 0, 1/2, 1, 1.
    rope = RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64)
    frequencies, _ = rope_frequencies(rope, 8, 256)
    slowed = np.array([0, 0.5, 1, 1])
    expected = np.array([1, 0.1, 0.01, 0.001]) * (slowed / 4 + 1 - slowed)
    np.testing.assert_allclose(frequencies[0], expected, rtol=1e-5)


def test_longrope_has_short_and_long_frequencies() -> None:
    rope = RopeConfig(
        "longrope",
        original_max_position_embeddings=64,
        short_factor=(1.0, 2.0),
        long_factor=(4.0, 5.0),
    )
    frequencies, factor = rope_frequencies(rope, 4, 256)
    np.testing.assert_allclose(frequencies, [[1, 0.005], [0.25, 0.002]], rtol=1e-6)
    assert factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    assert rope_frequencies(rope, 4, 64)[1] == 1
    named = replace(rope, factor=2.0)
    assert rope_frequencies(named, 4, 256)[1] == pytest.approx(
        math.sqrt(1 + math.log(2) / math.log(64))
    )
    assert rope_frequencies(replace(rope, attention_factor=1.5), 4, 256)[1] == 1.5
