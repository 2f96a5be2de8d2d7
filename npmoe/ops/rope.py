"""Rotary position embedding, in the half-split arrangement of Hugging Face models.

Element i of a head's first half and element i of its second half form a pair, turned by
position * inv_freq[i] (Su et al., 2021). Only the first `2 * len(inv_freq)` elements turn.
"""

import math

import numpy as np

from npmoe.config import RopeConfig
from npmoe.dtypes import Array
from npmoe.runtime.device import jit


def rope_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Array, float]:
    """Inverse frequencies float32 `[V, rotary_dim / 2]` and the factor on cos and sin.

    V is 2 for longrope (short, long) and 1 for every other type. `max_positions` is the config's
    max_position_embeddings. Formulas: linear: Chen et al., 2023; llama3: Llama 3.1's model card
    code; yarn: Peng et al., 2023; longrope: Ding et al., 2024.
    """
    dim = int(head_dim * rope.partial_rotary_factor)
    exponents = np.arange(0, dim, 2, dtype=np.int64).astype(np.float32) / np.float32(dim)
    # The power correctly rounded to float32, then its float32 inverse: one ulp here would turn far
    # positions by a visible angle.
    powers = (np.float64(rope.rope_theta) ** exponents.astype(np.float64)).astype(np.float32)
    base = np.float32(1) / powers
    if rope.rope_type == "linear":
        return (base / np.float32(rope.factor))[None], 1.0
    if rope.rope_type == "llama3":
        return _llama3(base, rope, max_positions)[None], 1.0
    if rope.rope_type == "yarn":
        return _yarn(powers, rope, dim, max_positions)
    if rope.rope_type == "longrope":
        return _longrope(powers, rope, max_positions)
    return base[None], 1.0


def _llama3(base: Array, rope: RopeConfig, max_positions: int) -> Array:
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    original = rope.original_max_position_embeddings or max_positions
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = np.float32(2 * math.pi) / base
    slowed = np.where(wavelength > original / low, base / np.float32(rope.factor), base)
    smooth = (original / wavelength - low) / np.float32(high - low)
    blended = (1 - smooth) * slowed / np.float32(rope.factor) + smooth * slowed
    middle = ~(wavelength < original / high) & ~(wavelength > original / low)
    return np.where(middle, blended, slowed).astype(np.float32)


def _yarn(powers: Array, rope: RopeConfig, dim: int, max_positions: int) -> tuple[Array, float]:
    original = rope.original_max_position_embeddings or max_positions
    factor = rope.factor or max_positions / original
    attention = rope.attention_factor
    if attention is None and rope.mscale and rope.mscale_all_dim:
        attention = _mscale(factor, rope.mscale) / _mscale(factor, rope.mscale_all_dim)
    elif attention is None:
        attention = _mscale(factor)

    def correction_dim(rotations: float) -> float:
        turns = original / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.rope_theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    keep = (1 - ramp).astype(np.float32)
    frequencies = 1 / (np.float32(factor) * powers) * (1 - keep) + 1 / powers * keep
    return frequencies.astype(np.float32)[None], float(attention)


def _mscale(factor: float, m: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0


def yarn_score_factor(rope: RopeConfig, max_positions: int) -> float:
    """What multi-head latent attention multiplies its scores by: m^2 with yarn's `mscale_all_dim`,
    1 without. cos and sin cannot carry it, as a part of each head does not turn."""
    if rope.rope_type != "yarn" or not rope.mscale_all_dim:
        return 1.0
    original = rope.original_max_position_embeddings or max_positions
    return _mscale(rope.factor or max_positions / original, rope.mscale_all_dim) ** 2


def _longrope(powers: Array, rope: RopeConfig, max_positions: int) -> tuple[Array, float]:
    original = rope.original_max_position_embeddings or max_positions
    factor = rope.factor or max_positions / original
    attention = rope.attention_factor
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    tables = [np.asarray(f, np.float32) for f in (rope.short_factor, rope.long_factor)]
    return np.stack([1 / (t * powers) for t in tables]).astype(np.float32), float(attention)


def rope_cos_sin(
    positions: Array, frequencies: Array, attention_factor: float, variant: Array | None = None
) -> tuple[Array, Array]:
    """cos and sin float32 `[T, rotary_dim / 2]` of positions int32 `[T]`.

    `variant` int32 `[T]` picks the row of `frequencies` for each token; None takes row 0.
    """
    chosen = frequencies[0] if variant is None else frequencies[variant]
    angles = positions.astype(np.float32)[:, None] * chosen
    factor = np.float32(attention_factor)
    return np.cos(angles) * factor, np.sin(angles) * factor


def rope_ref(x: Array, cos: Array, sin: Array) -> Array:
    """The definition. x float32 `[T, heads, D]`, cos and sin `[T, R]` with 2 R <= D -> like x."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([first * c - second * s, second * c + first * s, rest], axis=-1)


def split_pairs(x: Array) -> Array:
    """Pairs that are neighbours, (0, 1), (2, 3), ..., as pairs of halves: `[..., R]` copied."""
    return np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def rotate(x: Array, cos: Array, sin: Array) -> None:
    """Turns x float32 `[T, heads, D]` in place; see `rope_ref`."""
    _rotate_cpu(x, cos, sin)


@jit
def _rotate_cpu(x, cos, sin):  # type: ignore[no-untyped-def]
    """x [T, heads, D] in place."""
    half = cos.shape[1]
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            for i in range(half):
                a, b = x[t, h, i], x[t, h, half + i]
                x[t, h, i] = a * cos[t, i] - b * sin[t, i]
                x[t, h, half + i] = b * cos[t, i] + a * sin[t, i]
