"""Depthwise causal convolution over each sequence, then SiLU; the last inputs are kept as state.

out[t, c] = silu(sum_w weight[c, w] * input[t - W + 1 + w, c])

Inputs before a step's first token come from the state, so chunks of any size give the same.
"""

import numpy as np

from npmoe.dtypes import Array
from npmoe.runtime.device import jit


def causal_conv_ref(
    x: Array, weight: Array, state: Array, cu_seqlens_q: Array, state_slots: Array
) -> Array:
    """The definition.

    x float32 `[T, C]`, ragged: sequence s owns the rows from cu_seqlens_q[s] to
    cu_seqlens_q[s + 1]. weight float32 `[C, W]`. state float32 `[slots, W - 1, C]`: the inputs
    before x, oldest first; the row state_slots[s] of each sequence is replaced. -> like x.
    """
    out = np.empty_like(x)
    width = weight.shape[1]
    for s, slot in enumerate(state_slots):
        start, stop = int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1])
        inputs = np.concatenate([state[slot], x[start:stop]])
        for t in range(stop - start):
            y = (inputs[t : t + width] * weight.T).sum(axis=0)
            out[start + t] = y / (1 + np.exp(-y))
        state[slot] = inputs[stop - start :]
    return out


def causal_conv(
    x: Array, weight: Array, state: Array, cu_seqlens_q: Array, state_slots: Array
) -> Array:
    """See `causal_conv_ref`."""
    x = np.ascontiguousarray(x)
    out = np.empty_like(x)
    taps = np.ascontiguousarray(weight.T)
    _causal_conv_cpu(x, taps, state, cu_seqlens_q, state_slots, out)
    return out


@jit
def _causal_conv_cpu(x, taps, state, edges, slots, out):  # type: ignore[no-untyped-def]
    """x [T, C], taps [W, C], state [slots, W - 1, C] -> out [T, C]; replaces the states."""
    width, channels = taps.shape
    past = width - 1
    for s in range(slots.shape[0]):
        start, slot = edges[s], slots[s]
        count = edges[s + 1] - start
        for t in range(count):
            row = out[start + t]
            row[:] = 0
            for w in range(width):
                i = t + w
                source = state[slot, i] if i < past else x[start + i - past]
                for c in range(channels):
                    row[c] += taps[w, c] * source[c]
            for c in range(channels):
                row[c] = row[c] / (np.float32(1) + np.exp(-row[c]))
        for i in range(past):  # from the oldest on: what is read lies at a later row
            j = i + count
            if j < past:
                state[slot, i] = state[slot, j]
            else:
                state[slot, i] = x[start + j - past]
