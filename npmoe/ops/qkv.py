"""Step 1 of a layer: norm, QKV projection, q/k norm, rotary, and K and V into their pages."""

from dataclasses import dataclass

import numpy as np

from npmoe.dtypes import Array
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.ops.linear import linear
from npmoe.ops.norm import rms_norm
from npmoe.ops.quantize import KVPages, write_kv_pages
from npmoe.ops.rope import rotate, split_pairs


@dataclass(frozen=True)
class QKVWeights:
    """Weights of the step. qkv_proj `[(heads + 2 kv_heads) * D, H]`: rows of q, then k, then v.

    input_norm float32 `[H]`, or None where x comes normed. bias float32 `[rows]` or None. q_norm
    and k_norm float32: `[D]` for a norm per head, `[heads * D]` and `[kv_heads * D]` for one over
    the projection, or None.
    """

    input_norm: Array | None
    qkv_proj: QuantTensor
    bias: Array | None
    q_norm: Array | None
    k_norm: Array | None


def qkv(
    x: Array,
    w: QKVWeights,
    eps: float,
    head_dim: int,
    cos: Array,
    sin: Array,
    k_pages: KVPages,
    v_pages: KVPages,
    slot_mapping: Array,
    clip: float | None = None,
    interleaved: bool = False,
    norm_after_rotary: bool = False,
    copy_slots: Array | None = None,
) -> Array:
    """x float32 `[T, H]` -> q float32 `[T, heads, D]`; writes k and v to their slots.

    cos and sin `[T, R]` as for `rope`; slot_mapping int32 `[T]`, -1 = skip; `clip` bounds q, k
    and v after the norm (olmoe). interleaved: rotary turns neighbours; q and k then come with the
    first of each pair before all the second ones, which leaves every q . k as it is.
    norm_after_rotary: of the norms per head. copy_slots int32 `[T]`: see `write_kv_pages`.
    """
    q, k, v = _project(x, w, eps, k_pages.codes.shape[1] * head_dim)
    if not norm_after_rotary:
        q, k = _norm(q, w.q_norm, eps), _norm(k, w.k_norm, eps)
    if clip is not None:
        q, k, v = (np.clip(a, -clip, clip) for a in (q, k, v))
    q, k, v = (_heads(a, head_dim) for a in (q, k, v))
    if interleaved:
        q, k = (_halves(a, 2 * cos.shape[1]) for a in (q, k))
    rotate(q, cos, sin)
    rotate(k, cos, sin)
    if norm_after_rotary:
        q, k = _norm(q, w.q_norm, eps), _norm(k, w.k_norm, eps)
    write_kv_pages(k_pages, k, slot_mapping, copy_slots)
    write_kv_pages(v_pages, v, slot_mapping, copy_slots)
    return q


def gated_qkv(
    x: Array,
    w: QKVWeights,
    eps: float,
    head_dim: int,
    cos: Array,
    sin: Array,
    k_pages: KVPages,
    v_pages: KVPages,
    slot_mapping: Array,
    copy_slots: Array | None = None,
) -> tuple[Array, Array]:
    """Like `qkv` where each head of q is followed by as many gates: qkv_proj
    `[(2 heads + 2 kv_heads) * D, H]` -> q and gates, float32 `[T, heads, D]`."""
    both, k, v = _project(x, w, eps, k_pages.codes.shape[1] * head_dim)
    q, gates = np.split(both.reshape(x.shape[0], -1, 2 * head_dim), 2, axis=-1)
    q, k = _norm(q, w.q_norm, eps), _norm(k, w.k_norm, eps)
    q, k, v = (_heads(a, head_dim) for a in (q, k, v))
    rotate(q, cos, sin)
    rotate(k, cos, sin)
    write_kv_pages(k_pages, k, slot_mapping, copy_slots)
    write_kv_pages(v_pages, v, slot_mapping, copy_slots)
    return q, gates


def _project(x: Array, w: QKVWeights, eps: float, kv_rows: int) -> tuple[Array, Array, Array]:
    """x `[T, H]` -> the projection's columns of q, k and v."""
    normed = x if w.input_norm is None else rms_norm(x, w.input_norm, eps)
    projected = linear(normed, w.qkv_proj, w.bias)
    q, k, v = np.split(projected, [projected.shape[1] - 2 * kv_rows, -kv_rows], axis=1)
    return q, k, v


def _heads(x: Array, head_dim: int) -> Array:
    """T rows, in any shape, -> contiguous `[T, heads, D]`."""
    return np.ascontiguousarray(x).reshape(x.shape[0], -1, head_dim)


def _halves(x: Array, rotary_dim: int) -> Array:
    """x `[T, heads, D]` with the even rotary elements of each head before the odd ones."""
    return np.concatenate([split_pairs(x[..., :rotary_dim]), x[..., rotary_dim:]], axis=-1)


def _norm(x: Array, weight: Array | None, eps: float) -> Array:
    """Per head where the weight has head_dim elements, else over the whole projection."""
    if weight is None:
        return x
    return rms_norm(x.reshape(-1, weight.shape[0]), weight, eps).reshape(x.shape)
