"""The linear attention block of qwen3_next: projections, convolution, delta rule, gated norm."""

from typing import Any

import numpy as np

from npmoe.batch import Batch
from npmoe.dtypes import Array
from npmoe.kv.states import RecurrentState
from npmoe.models.specs import DeltaNetSpec
from npmoe.ops.causal_conv import causal_conv
from npmoe.ops.delta_rule import delta_gates, delta_rule
from npmoe.ops.linear import linear
from npmoe.ops.norm import rms_norm
from npmoe.ops.output import add_output
from npmoe.ops.route import sigmoid


def add_delta_net(
    residual: Array,
    x: Array,
    spec: DeltaNetSpec,
    eps: float,
    w: dict[str, Any],
    batch: Batch,
    state: RecurrentState,
) -> None:
    """residual `[T, H]` += the block's output for x float32 `[T, H]`, which may be the same array;
    brings the batch's states up to its last tokens.

    w: input_layernorm `[H]`; qkvz_proj `[2 key_width + 2 value_width, H]`, rows of q, k, v, then of
    the gate z; ba_proj `[2 Hv, H]`; conv `[C * W]`; a_log and dt_bias `[Hv]`; delta_norm `[Dv]`;
    out_proj `[H, value_width]`.
    """
    slots, edges = batch.state_slots, batch.cu_seqlens_q
    assert slots is not None, "a model with recurrent states needs their slots"
    state.clear(slots[batch.seq_lens == np.diff(edges)])  # sequences that begin in this batch
    normed = rms_norm(x, w["input_layernorm"], eps)
    qkvz, ba = linear(normed, w["qkvz_proj"]), linear(normed, w["ba_proj"])
    channels, heads = spec.conv_channels, spec.num_value_heads
    taps = w["conv"].reshape(channels, spec.conv_width)
    qkv = causal_conv(qkvz[:, :channels], taps, state.conv, edges, slots)
    decay, beta = delta_gates(ba[:, :heads], ba[:, heads:], w["a_log"], w["dt_bias"])
    q, k, v = _heads(qkv, spec)
    out = delta_rule(q, k, v, decay, beta, state.memory, edges, slots)
    z = qkvz[:, channels:].reshape(out.shape)
    gated = rms_norm(out, w["delta_norm"], eps) * (z * sigmoid(z))
    add_output(residual, gated, w["out_proj"], None)


def _heads(qkv: Array, spec: DeltaNetSpec) -> tuple[Array, Array, Array]:
    """`[T, C]` -> q and k `[T, Hk, Dk]`, v `[T, Hv, Dv]`."""
    width, dim = spec.key_width, spec.key_head_dim
    rows = qkv.shape[0]
    q, k = (a.reshape(rows, -1, dim) for a in (qkv[:, :width], qkv[:, width : 2 * width]))
    return q, k, qkv[:, 2 * width :].reshape(rows, -1, spec.value_head_dim)
