"""Steps 5 and 6 of a layer: gated expert MLPs, weighted combine, residual add; and the dense MLP.

mlp(x) = down(swiglu(gate(x), up(x))), with gate and up in one matrix `[2I, H]`, gate rows first.
"""

from dataclasses import dataclass

import numpy as np

from npmoe.dtypes import Array
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.ops.linear import linear, linear_ref
from npmoe.ops.route import sigmoid
from npmoe.runtime.device import jit


@dataclass(frozen=True)
class SwiGLU:
    """g * sigmoid(alpha * g) * (u + offset), with g = gate up to limit, u = up within +-limit.

    The defaults make it silu(gate) * up.
    """

    alpha: float = 1.0
    limit: float = np.inf
    offset: float = 0.0


PLAIN = SwiGLU()


def swiglu_ref(gate_up: Array, kind: SwiGLU = PLAIN) -> Array:
    """The definition: float32 `[T, 2I]` -> `[T, I]`."""
    gate, up = np.split(gate_up, 2, axis=-1)
    limit = np.float32(kind.limit)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-np.float32(kind.alpha) * gate)) * (up + np.float32(kind.offset))


def swiglu(gate_up: Array, kind: SwiGLU = PLAIN) -> Array:
    """float32 `[T, 2I]` -> `[T, I]`."""
    out = np.empty((gate_up.shape[0], gate_up.shape[1] // 2), np.float32)
    _swiglu_cpu(gate_up, *map(np.float32, (kind.alpha, kind.limit, kind.offset)), out)
    return out


@jit
def _swiglu_cpu(gate_up, alpha, limit, offset, out):  # type: ignore[no-untyped-def]
    """gate_up `[T, 2I]` -> out `[T, I]`."""
    for t in range(out.shape[0]):
        for i in range(out.shape[1]):
            gate = min(gate_up[t, i], limit)
            up = max(min(gate_up[t, out.shape[1] + i], limit), -limit)
            out[t, i] = gate / (np.float32(1) + np.exp(-alpha * gate)) * (up + offset)


def add_mlp(
    residual: Array,
    x: Array,
    gate_up_proj: QuantTensor,
    down_proj: QuantTensor,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    gate: QuantTensor | None = None,
) -> None:
    """residual `[T, H]` += mlp(x `[T, H]`), gate_up_proj `[2I, H]`, down_proj `[H, I]`.

    gate `[1, H]`: the MLP's output is multiplied by sigmoid(gate x), a number for each token.
    """
    out = linear(swiglu(linear(x, gate_up_proj, gate_up_bias)), down_proj, down_bias)
    if gate is not None:
        out *= sigmoid(linear(x, gate))
    residual += out


def experts_ref(
    x: Array,
    gate_up_proj: QuantTensor,
    down_proj: QuantTensor,
    topk_weights: Array,
    topk_ids: Array,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    activation: SwiGLU = PLAIN,
) -> Array:
    """The definition: sum over k of topk_weights[t, k] * mlp of expert topk_ids[t, k] -> `[T, H]`.

    x float32 `[T, H]`, gate_up_proj `[E, 2I, H]`, down_proj `[E, H, I]`, topk_weights float32 and
    topk_ids int32 `[T, K]`, gate_up_bias float32 `[E, 2I]`, down_bias float32 `[E, H]`.
    """
    out = np.zeros_like(x)
    for t in range(x.shape[0]):
        for weight, e in zip(topk_weights[t], topk_ids[t], strict=True):
            inner = None if gate_up_bias is None else gate_up_bias[e]
            outer = None if down_bias is None else down_bias[e]
            hidden = swiglu_ref(linear_ref(x[t : t + 1], gate_up_proj[e], inner), activation)
            out[t] += weight * linear_ref(hidden, down_proj[e], outer)[0]
    return out


def add_experts(
    residual: Array,
    x: Array,
    gate_up_proj: QuantTensor,
    down_proj: QuantTensor,
    topk_weights: Array,
    topk_ids: Array,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    activation: SwiGLU = PLAIN,
) -> None:
    """residual `[T, H]` += the combined experts; shapes as in `experts_ref`.

    Tokens are grouped by expert, so that each expert's weights are read once.
    """
    num_tokens, k = topk_ids.shape
    flat = topk_ids.reshape(-1)
    sorted_pair_ids = np.argsort(flat, kind="stable")
    pairs = np.empty((num_tokens * k, residual.shape[1]), np.float32)
    edges = np.flatnonzero(np.diff(flat[sorted_pair_ids], prepend=-1, append=-1))
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        chosen = sorted_pair_ids[start:stop]
        expert = int(flat[chosen[0]])
        inner = None if gate_up_bias is None else gate_up_bias[expert]
        outer = None if down_bias is None else down_bias[expert]
        hidden = swiglu(linear(x[chosen // k], gate_up_proj, inner, expert), activation)
        pairs[chosen] = linear(hidden, down_proj, outer, expert)
    for slot in range(k):  # in the router's order, whatever the batch
        residual += topk_weights[:, slot, None] * pairs[slot::k]
