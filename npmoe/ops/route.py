"""Step 4 of a layer: norm, router logits in float32, top-k expert ids and combine weights."""

from dataclasses import dataclass

import numpy as np

from npmoe.dtypes import Array, array_namespace
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.ops.linear import linear
from npmoe.ops.norm import rms_norm
from npmoe.ops.top_k_kernel import LOWEST, MAX_EXPERTS, ONE, TINY, WARP, top_k_kernel
from npmoe.runtime.check import check_array

SCORINGS = ("softmax", "sigmoid", "sparsemixer")


@dataclass(frozen=True)
class TopKRule:
    """How experts are scored and chosen; the defaults are softmax over all and the best k of all.

    scoring: "softmax" over all experts, "sigmoid" of each logit, or "sparsemixer": one expert after
    the other, each weighed by softmax over those left whose logits are near the best of them, that
    is, apart by at most 2 jitter relative to the larger (Liu et al., 2024).

    num_groups: experts stand in groups of E / num_groups neighbours, and only those of the
    topk_groups best groups can be chosen. group_score: a group counts as its best expert ("best")
    or as the sum of its best two ("sum_of_two"). scaling multiplies the weights.
    """

    scoring: str = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "best"
    scaling: float = 1.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for a word or a number of groups that is not legal."""
        if self.scoring not in SCORINGS:
            raise ValueError(
                f"scoring = {self.scoring!r}: legal values are {', '.join(map(repr, SCORINGS))}"
            )
        if self.group_score not in ("best", "sum_of_two"):
            raise ValueError(
                f"group_score = {self.group_score!r}: legal values are 'best', 'sum_of_two'"
            )
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(
                f"topk_groups = {self.topk_groups}: legal are 1 to num_groups = {self.num_groups}"
            )

    @property
    def sums_two(self) -> bool:
        """Whether groups are compared by sums of scores."""
        return self.num_groups > 1 and self.group_score == "sum_of_two"


BEST_OF_ALL = TopKRule()


def softmax(x: Array) -> Array:
    """Softmax over the last axis, float32."""
    shifted = np.exp(x - x.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow, float32."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, ONE, small) / (ONE + small)


def top_k(
    router_logits: Array,
    k: int,
    renormalize: bool,
    rule: TopKRule = BEST_OF_ALL,
    selection_bias: Array | None = None,
    logits_bias: Array | None = None,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """The k best experts of each token, as `top_k_ref` defines it; `out` is filled if given.

    CuPy arrays must be C-contiguous, with at most 1,024 experts.
    Raises ValueError for shapes, dtypes, k or groups that do not fit each other.
    """
    num_tokens, num_experts = router_logits.shape
    _check_choice(num_experts, k, rule)
    xp = array_namespace(router_logits)
    if out is None:
        out = xp.empty((num_tokens, k), np.float32), xp.empty((num_tokens, k), np.int32)
    if xp is np:
        chosen = top_k_ref(router_logits, k, renormalize, rule, selection_bias, logits_bias)
        out[0][...], out[1][...] = chosen
    else:
        _top_k_cuda(*out, router_logits, renormalize, rule, selection_bias, logits_bias)
    return out


def _check_choice(num_experts: int, k: int, rule: TopKRule) -> None:
    groups = rule.num_groups
    if num_experts % groups or (rule.sums_two and num_experts < 2 * groups):
        least = "two or more" if rule.sums_two else "one or more"
        raise ValueError(f"num_groups = {groups}: {num_experts} experts, {least} in each group")
    eligible = num_experts // groups * rule.topk_groups
    if not 1 <= k <= eligible:
        raise ValueError(f"k = {k}: legal are 1 to {eligible}, the experts that can be chosen")


def top_k_ref(
    router_logits: Array,
    k: int,
    renormalize: bool,
    rule: TopKRule = BEST_OF_ALL,
    selection_bias: Array | None = None,
    logits_bias: Array | None = None,
) -> tuple[Array, Array]:
    """The definition: best first, equal ones by lower expert id; groups likewise.

    router_logits float32 `[T, E]` -> (topk_weights float32 `[T, K]`, topk_ids int32 `[T, K]`).
    logits_bias float32 `[E]` is added to the logits. selection_bias float32 `[E]` is added to the
    scores for the choice alone and never enters the weights. Without it, and unless scores are
    summed, experts are compared by their logits, which order them as exact scores would.

    Weights are the scores of the chosen; `renormalize` makes them sum to 1 before scaling: with
    softmax, that is softmax over the k logits alone. A NaN logit is chosen last. With sparsemixer,
    neither groups nor a selection bias, `renormalize` or scaling have a meaning.
    """
    logits = router_logits if logits_bias is None else router_logits + logits_bias
    if rule.scoring == "sparsemixer":
        return _sparsemixer_ref(logits, k, rule.jitter)
    if rule.scoring == "softmax":
        values = np.exp(logits - np.fmax.reduce(logits, axis=-1, keepdims=True))
        total = values.sum(axis=-1, keepdims=True)
    else:
        values = sigmoid(logits)
        total = np.ones((len(logits), 1), np.float32)
    keys = logits
    if selection_bias is not None or rule.sums_two:
        keys = values / total
    if selection_bias is not None:
        keys = keys + selection_bias
    keys = np.where(np.isnan(keys), LOWEST, keys)
    topk_ids = _order_ref(keys, rule)[:, :k].astype(np.int32)
    topk_weights = np.take_along_axis(values, topk_ids, axis=-1)
    if renormalize:
        total = topk_weights.sum(axis=-1, keepdims=True) + TINY
    return topk_weights / total * np.float32(rule.scaling), topk_ids


def _sparsemixer_ref(logits: Array, k: int, jitter: float) -> tuple[Array, Array]:
    """logits float32 `[T, E]` -> weights and ids `[T, K]`; the chosen are out of later rounds."""
    left, rows = logits.copy(), np.arange(len(logits))
    weights = np.empty((len(logits), k), np.float32)
    ids = np.empty((len(logits), k), np.int32)
    for slot in range(k):
        ids[:, slot] = left.argmax(axis=-1)
        best = left.max(axis=-1, keepdims=True)
        size = np.maximum(np.abs(logits), best)
        far = best - logits > np.float32(2 * jitter) * size
        values = np.where(far, np.float32(0), np.exp(left - best))
        weights[:, slot] = ONE / values.sum(axis=-1)
        left[rows, ids[:, slot]] = LOWEST
    return weights, ids


def _order_ref(keys: Array, rule: TopKRule) -> Array:
    """keys `[T, E]` -> expert ids, best first, those outside the best groups last."""
    if rule.num_groups == 1:
        return np.argsort(-keys, axis=-1, kind="stable")
    num_tokens, num_experts = keys.shape
    group_size = num_experts // rule.num_groups
    members = np.sort(keys.reshape(num_tokens, rule.num_groups, group_size), axis=-1)
    score = members[..., -1] + members[..., -2] if rule.sums_two else members[..., -1]
    best = np.argsort(-score, axis=-1, kind="stable")[:, : rule.topk_groups]
    outside = np.ones(score.shape, bool)
    np.put_along_axis(outside, best, False, axis=-1)
    return np.lexsort((-keys, np.repeat(outside, group_size, axis=-1)))


def _top_k_cuda(
    topk_weights: Array,
    topk_ids: Array,
    router_logits: Array,
    renormalize: bool,
    rule: TopKRule,
    selection_bias: Array | None,
    logits_bias: Array | None,
) -> None:
    """Checks, and launches one block a token."""
    if rule.scoring == "sparsemixer":
        raise ValueError("scoring = 'sparsemixer': has no kernel")
    num_tokens, num_experts = router_logits.shape
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"{num_experts} experts: the router takes at most {MAX_EXPERTS}")
    check_array("router_logits", router_logits, np.float32, num_tokens, num_experts)
    check_array("topk_weights", topk_weights, np.float32, num_tokens, None)
    check_array("topk_ids", topk_ids, np.int32, *topk_weights.shape)
    for name, bias in (("selection_bias", selection_bias), ("logits_bias", logits_bias)):
        if bias is not None:
            check_array(name, bias, np.float32, num_experts)
    if num_tokens == 0:
        return
    unread = router_logits[0]
    top_k_kernel.launch(
        *(num_tokens, -(-num_experts // WARP) * WARP, topk_weights, topk_ids, router_logits),
        *(unread if logits_bias is None else logits_bias, logits_bias is not None),
        *(unread if selection_bias is None else selection_bias, selection_bias is not None),
        *(rule.scoring == "sigmoid", np.int32(rule.num_groups), np.int32(rule.topk_groups)),
        *(rule.sums_two, renormalize, np.float32(rule.scaling)),
    )


def route(
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
    """x float32 `[T, H]`, norm `[H]`, router `[E, H]` -> (normed x, topk_weights, topk_ids).

    norm is None where x comes normed. bias float32 `[E]` is part of the logits; selection_bias as
    for `top_k_ref`.
    """
    normed = x if norm is None else rms_norm(x, norm, eps)
    logits = linear(normed, router, bias)
    return normed, *top_k(logits, k, renormalize, rule, selection_bias)
