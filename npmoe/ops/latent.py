"""Multi-head latent attention (DeepSeek-V2, 2024): one cached latent a token serves all heads.

    latent = norm(kv_a x)                [C], cached as V; the first C rows of kv_a
    rope_key = turned(kv_a x)            [R], cached as K; the last R rows of kv_a
    k_nope[h], v[h] = kv_b[h] latent     [N] and [V]
    scores[h] = scale * (q_nope[h] . k_nope[h] + q_rope[h] . rope_key)

`latent_attention_ref` computes just that. As q_nope . (kv_b latent) = (kv_b^T q_nope) . latent,
few queries are taken to the latent instead, and their weighted sum of latents to the values: then
no cached token is ever expanded (absorbed projections).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from npmoe.dtypes import Array
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.ops.attention import QUERY_BLOCK, attend, read_rows
from npmoe.ops.linear import FEW_TOKENS, decoded, linear
from npmoe.ops.norm import rms_norm
from npmoe.ops.quantize import KVPages, write_kv_pages
from npmoe.ops.rope import rotate, split_pairs

LATENT_EPS = 1e-6
"""Of the norms of latent and compressed query, whatever the config's rms_norm_eps."""
EXPANDED_FLOATS = 1 << 24
"""Keys and values are expanded for as many heads at a time as this holds, at least one."""


@dataclass(frozen=True)
class LatentWeights:
    """Weights of the step, float32 vectors and matrices.

    q_a_proj `[Q, H]`, q_a_bias `[Q]` and q_a_norm `[Q]` compress the query, or are None.
    q_proj `[heads * (N + R), Q or H]`. kv_a_proj `[C + R, H]`: rows of the latent, then of the rope
    key. kv_a_bias `[C + R]` or None; input_norm `[H]`, kv_a_norm `[C]`.
    """

    input_norm: Array
    q_a_proj: QuantTensor | None
    q_a_bias: Array | None
    q_a_norm: Array | None
    q_proj: QuantTensor
    kv_a_proj: QuantTensor
    kv_a_bias: Array | None
    kv_a_norm: Array


def latent_qkv(
    x: Array,
    w: LatentWeights,
    eps: float,
    num_heads: int,
    interleaved: bool,
    cos: Array,
    sin: Array,
    k_pages: KVPages,
    v_pages: KVPages,
    slot_mapping: Array,
) -> Array:
    """x float32 `[T, H]` -> q float32 `[T, heads, N + R]`, the last R of each head turned; writes
    the rope key to k_pages and the latent to v_pages, which have one head.

    cos and sin `[T, R / 2]`; interleaved: neighbours form the pairs that turn, else halves do;
    slot_mapping int32 `[T]`, -1 = skip.
    """
    num_tokens, rank = len(x), len(w.kv_a_norm)
    normed = rms_norm(x, w.input_norm, eps)
    q = linear(_compressed(normed, w), w.q_proj).reshape(num_tokens, num_heads, -1)
    projected = linear(normed, w.kv_a_proj, w.kv_a_bias)[:, None]
    latent, rope_key = projected[..., :rank], projected[..., rank:]
    nope = q.shape[2] - rope_key.shape[2]
    q[..., nope:] = _turned(q[..., nope:], cos, sin, interleaved)
    write_kv_pages(k_pages, _turned(rope_key, cos, sin, interleaved), slot_mapping)
    write_kv_pages(v_pages, rms_norm(latent, w.kv_a_norm, LATENT_EPS), slot_mapping)
    return q


def _compressed(normed: Array, w: LatentWeights) -> Array:
    """What the queries are made of: `[T, Q]`, or normed x itself."""
    if w.q_a_proj is None or w.q_a_norm is None:
        return normed
    return rms_norm(linear(normed, w.q_a_proj, w.q_a_bias), w.q_a_norm, LATENT_EPS)


def _turned(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """x `[T, heads, R]` after rotary, each head's pairs as halves."""
    turned = split_pairs(x) if interleaved else x.copy()
    rotate(turned, cos, sin)
    return turned


def latent_attention_ref(
    q: Array,
    kv_b_proj: QuantTensor,
    value_dim: int,
    k_pages: KVPages,
    v_pages: KVPages,
    block_table: Array,
    cu_seqlens_q: Array,
    seq_lens: Array,
    scale: float,
) -> Array:
    """The definition: keys and values of every head expanded from the latents.

    q float32 `[T, heads, N + R]`, ragged as for `paged_attention_ref`; kv_b_proj
    `[heads * (N + V), C]`: of each head N rows of the key, then V = value_dim of the value; k_pages
    hold rope keys `[R]` and v_pages latents `[C]`, one head each. -> float32 `[T, heads, V]`.
    """
    sequences = _sequences(k_pages, v_pages, block_table, cu_seqlens_q, seq_lens)
    return _attend(q, kv_b_proj, value_dim, sequences, scale, absorb_up_to=0)


def latent_attention(
    q: Array,
    kv_b_proj: QuantTensor,
    value_dim: int,
    k_pages: KVPages,
    v_pages: KVPages,
    block_table: Array,
    cu_seqlens_q: Array,
    seq_lens: Array,
    scale: float,
) -> Array:
    """See `latent_attention_ref`. Few queries of a sequence run absorbed."""
    sequences = _sequences(k_pages, v_pages, block_table, cu_seqlens_q, seq_lens)
    return _attend(q, kv_b_proj, value_dim, sequences, scale, absorb_up_to=FEW_TOKENS)


def _attend(
    q: Array,
    kv_b_proj: QuantTensor,
    value_dim: int,
    sequences: Iterator[tuple[slice, Array, Array, Array]],
    scale: float,
    absorb_up_to: int,
) -> Array:
    """Sequences of up to so many queries run absorbed, longer ones expanded."""
    out = np.empty((*q.shape[:2], value_dim), np.float32)
    kv_b = decoded(kv_b_proj).reshape(q.shape[1], -1, kv_b_proj.shape[1])
    for rows, positions, rope_keys, latents in sequences:
        run = _attend_absorbed if len(positions) <= absorb_up_to else _attend_expanded
        out[rows] = run(q[rows], kv_b, value_dim, rope_keys, latents, positions, scale)
    return out


def _sequences(
    k_pages: KVPages, v_pages: KVPages, block_table: Array, cu_seqlens_q: Array, seq_lens: Array
) -> Iterator[tuple[slice, Array, Array, Array]]:
    """Of each sequence: its rows, their positions, cached rope keys `[L, R]`, latents `[L, C]`."""
    for s, length in enumerate(map(int, seq_lens)):
        start, stop = int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1])
        cached = [read_rows(pages, block_table[s], length)[:, 0] for pages in (k_pages, v_pages)]
        yield slice(start, stop), np.arange(start, stop) - stop + length, cached[0], cached[1]


def _attend_expanded(
    q: Array,
    kv_b: Array,
    value_dim: int,
    rope_keys: Array,
    latents: Array,
    positions: Array,
    scale: float,
) -> Array:
    """q `[T, heads, N + R]`, kv_b float32 `[heads, N + V, C]` -> `[T, heads, V]`."""
    length, (heads, rows, _) = len(latents), kv_b.shape
    out = np.empty((len(q), heads, value_dim), np.float32)
    step = max(1, EXPANDED_FLOATS // (length * rows))
    for head in range(0, heads, step):
        some = slice(head, min(head + step, heads))
        expanded = latents @ kv_b[some].transpose(0, 2, 1)  # [heads, L, N + V]
        k_nope, v = np.split(expanded.transpose(1, 0, 2), [rows - value_dim], axis=2)
        shared = np.broadcast_to(rope_keys[:, None], (*k_nope.shape[:2], rope_keys.shape[1]))
        k = np.concatenate([k_nope, shared], axis=2)
        for first in range(0, len(q), QUERY_BLOCK):
            block = slice(first, first + QUERY_BLOCK)
            out[block, some] = attend(q[block, some], k, v, positions[block], scale)
    return out


def _attend_absorbed(
    q: Array,
    kv_b: Array,
    value_dim: int,
    rope_keys: Array,
    latents: Array,
    positions: Array,
    scale: float,
) -> Array:
    """The same without expanding keys and values: all heads share the latents."""
    num_tokens, heads, _ = q.shape
    nope = kv_b.shape[1] - value_dim
    key_part, value_part = kv_b[:, :nope], kv_b[:, nope:]
    q_latent = (q[:, :, None, :nope] @ key_part)[:, :, 0]  # [T, heads, C]
    queries = np.concatenate([q_latent, q[..., nope:]], axis=2)
    keys = np.concatenate([latents, rope_keys], axis=1)[:, None]
    rows = queries.reshape(num_tokens * heads, 1, -1)
    mixed = attend(rows, keys, latents[:, None], np.repeat(positions, heads), scale)
    mixed = mixed.reshape(num_tokens, heads, -1, 1)
    return (value_part @ mixed)[..., 0]
