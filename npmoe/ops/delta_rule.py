"""The gated delta rule: linear attention whose state forgets, corrects and remembers each token.

S = decay * S;  S += k (beta * (v - S^T k))^T;  out = S^T q

for each value head, with k and q of unit length and q scaled by Dk^-0.5 (Yang et al., 2024). The
state S `[Dk, Dv]` stands for all tokens before; tokens come one by one, so chunks of any size give
the same bits.
"""

from functools import partial

import numpy as np

from npmoe.dtypes import Array
from npmoe.ops.route import sigmoid
from npmoe.runtime.device import jit, parallel_ranges

NORM_EPS = 1e-6


def delta_gates(b: Array, a: Array, a_log: Array, dt_bias: Array) -> tuple[Array, Array]:
    """b and a `[T, Hv]`, a_log and dt_bias `[Hv]` -> decay and beta, float32 `[T, Hv]` in 0 to 1.

    decay = exp(-exp(a_log) * softplus(a + dt_bias)), beta = sigmoid(b).
    """
    rate = np.exp(a_log) * np.logaddexp(np.float32(0), a + dt_bias)
    return np.exp(-rate), sigmoid(b)


def delta_rule_ref(
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    state: Array,
    cu_seqlens_q: Array,
    state_slots: Array,
) -> Array:
    """The definition.

    q and k float32 `[T, Hk, Dk]`, v float32 `[T, Hv, Dv]`, decay and beta float32 `[T, Hv]`,
    ragged: sequence s owns the rows from cu_seqlens_q[s] to cu_seqlens_q[s + 1]. Value head h
    takes the key head h // (Hv / Hk). state float32 `[slots, Hv, Dk, Dv]`: the row state_slots[s]
    of each sequence is brought up to its last token. -> float32 like v.
    """
    out = np.empty_like(v)
    ratio = v.shape[1] // k.shape[1]
    q = np.repeat(_unit(q) * np.float32(q.shape[-1] ** -0.5), ratio, axis=1)
    k = np.repeat(_unit(k), ratio, axis=1)
    for s, slot in enumerate(state_slots):
        memory = state[slot]
        for t in range(int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1])):
            memory *= decay[t, :, None, None]
            recalled = (memory * k[t, :, :, None]).sum(axis=1)
            memory += k[t, :, :, None] * (beta[t, :, None] * (v[t] - recalled))[:, None]
            out[t] = (memory * q[t, :, :, None]).sum(axis=1)
    return out


def _unit(x: Array) -> Array:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + np.float32(NORM_EPS))


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    state: Array,
    cu_seqlens_q: Array,
    state_slots: Array,
) -> Array:
    """See `delta_rule_ref`. Heads run in threads."""
    q, k, v = (np.ascontiguousarray(a) for a in (q, k, v))
    out = np.empty_like(v)
    arguments = q, k, v, decay, beta, state, cu_seqlens_q, state_slots, out
    work = 3 * v.size * k.shape[-1]
    parallel_ranges(v.shape[1], work, partial(_delta_rule_cpu, *arguments))
    return out


@jit
def _unit_row(x, factor, out):  # type: ignore[no-untyped-def]
    """x [D] -> out [D], of length `factor`."""
    total = np.float32(0)
    for d in range(x.shape[0]):
        total += x[d] * x[d]
    scale = factor / np.sqrt(total + np.float32(NORM_EPS))
    for d in range(x.shape[0]):
        out[d] = x[d] * scale


@jit
def _delta_rule_cpu(  # type: ignore[no-untyped-def]
    q, k, v, decay, beta, state, edges, slots, out, first_head, last_head
):
    """Value heads first to last of every sequence; shapes as in `delta_rule_ref`."""
    key_dim, value_dim = k.shape[2], v.shape[2]
    ratio = v.shape[1] // k.shape[1]
    scale = np.float32(1) / np.sqrt(np.float32(key_dim))
    query, key = np.empty(key_dim, np.float32), np.empty(key_dim, np.float32)
    change = np.empty(value_dim, np.float32)
    for s in range(slots.shape[0]):
        for h in range(first_head, last_head):
            memory = state[slots[s], h]
            for t in range(edges[s], edges[s + 1]):
                _unit_row(q[t, h // ratio], scale, query)
                _unit_row(k[t, h // ratio], np.float32(1), key)
                change[:] = 0
                keep = decay[t, h]
                for i in range(key_dim):
                    for j in range(value_dim):
                        memory[i, j] *= keep
                        change[j] += memory[i, j] * key[i]
                for j in range(value_dim):
                    change[j] = beta[t, h] * (v[t, h, j] - change[j])
                row = out[t, h]
                row[:] = 0
                for i in range(key_dim):
                    for j in range(value_dim):
                        memory[i, j] += key[i] * change[j]
                        row[j] += memory[i, j] * query[i]
