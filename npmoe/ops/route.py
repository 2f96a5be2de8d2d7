"""Step 4 of a layer: norm, router logits in float32, top-k expert ids and combine weights."""

import numpy as np

from npmoe.dtypes import Array
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.ops.linear import linear
from npmoe.ops.norm import rms_norm


def softmax(x: Array) -> Array:
    """Softmax over the last axis, float32."""
    shifted = np.exp(x - x.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def top_k_ref(router_logits: Array, k: int, renormalize: bool) -> tuple[Array, Array]:
    """The k most probable experts of each token; equal logits go to the lower expert id.

    router_logits float32 `[T, E]` -> (topk_weights float32 `[T, K]`, topk_ids int32 `[T, K]`), most
    probable first. Weights are softmax over all experts; `renormalize` makes them sum to 1:
    softmax over the k logits alone.
    """
    topk_ids = np.argsort(-router_logits, axis=-1, kind="stable")[:, :k].astype(np.int32)
    topk_weights = np.take_along_axis(softmax(router_logits), topk_ids, axis=-1)
    if renormalize:
        topk_weights = topk_weights / topk_weights.sum(axis=-1, keepdims=True)
    return topk_weights, topk_ids


def route(
    x: Array,
    norm: Array,
    eps: float,
    router: QuantTensor,
    k: int,
    renormalize: bool,
    bias: Array | None = None,
) -> tuple[Array, Array, Array]:
    """x float32 `[T, H]`, norm `[H]`, router `[E, H]` -> (normed x, topk_weights, topk_ids).

    bias float32 `[E]` is part of the logits.
    """
    normed = rms_norm(x, norm, eps)
    return normed, *top_k_ref(linear(normed, router, bias), k, renormalize)
