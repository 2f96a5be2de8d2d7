"""Near-tied routers: where rounding decides which of two experts a token takes."""

import numpy as np

from npmoe.dtypes import Array
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.ops.linear import linear
from npmoe.ops.norm import rms_norm
from npmoe.ops.route import BEST_OF_ALL, TopKRule, top_k


class WatchedRouter:
    """`route` for one forward pass of a CausalLM whose layers all have experts: notes how far each
    token's last expert, the k-th best, is ahead of the next one, and takes that one where told to.

    leads: float32 `[T]` of each layer so far, the difference of these two router logits over the
    token's largest router logit. With as many experts as a token takes there is no next one, and
    the last is its own.
    """

    def __init__(self, takes_next: Array) -> None:
        """takes_next: bool `[layers, T]`, whether the token takes the next expert in place of its
        last in that layer."""
        self.takes_next = takes_next
        self.leads: list[Array] = []

    def __call__(
        self,
        x: Array,
        norm: Array | None,
        eps: float,
        router: QuantTensor,
        k: int,
        renormalize: bool,
        bias: Array | None = None,
        rule: TopKRule = BEST_OF_ALL,
        selection_bias: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """As `route`, for the rule that has kernels: the k largest logits of more than k."""
        assert rule == BEST_OF_ALL
        assert selection_bias is None
        normed = x if norm is None else rms_norm(x, norm, eps)
        logits = linear(normed, router, bias)
        order = np.argsort(-logits, axis=1, kind="stable")
        rows, last = np.arange(len(x)), order[:, k - 1]
        following = order[:, min(k, logits.shape[1] - 1)]
        lead = logits[rows, last] - logits[rows, following]
        largest = np.abs(logits).max(axis=1)
        takes_next = self.takes_next[len(self.leads)]
        self.leads.append(lead / np.maximum(largest, np.finfo(np.float32).tiny))
        below = np.nextafter(logits[rows, following], np.float32(-np.inf))
        logits[rows, last] = np.where(takes_next, below, logits[rows, last])
        return normed, *top_k(logits, k, renormalize)
