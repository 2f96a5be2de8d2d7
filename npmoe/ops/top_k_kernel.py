"""The router's choice as a Numba CUDA kernel; ops/route.py defines and launches it.

Grid: a block a token, a thread an expert (rounded up to whole warps). Float32 throughout.
"""

import math

import numpy as np

from npmoe.runtime.device import cuda, cuda_device_jit, cuda_jit

MAX_EXPERTS = 1024
WARP = 32
ZERO, ONE = np.float32(0), np.float32(1)
LOWEST = np.float32(-np.inf)
TINY = np.float32(1e-20)
"""Added to a sum of chosen scores, so that scores that are all 0 give weights 0."""


@cuda_jit
def top_k_kernel(  # type: ignore[no-untyped-def]
    topk_weights,
    topk_ids,
    router_logits,
    logits_bias,
    has_logits_bias,
    selection_bias,
    has_selection_bias,
    sigmoid,
    num_groups,
    topk_groups,
    sums_two,
    renormalize,
    scaling,
):
    """A block is a token, a thread an expert: its place among the chosen is the number of experts
    that go before it. Threads past the last expert only help with sums."""
    keys = cuda.shared.array(MAX_EXPERTS, np.float32)
    values = cuda.shared.array(MAX_EXPERTS, np.float32)
    chosen = cuda.shared.array(MAX_EXPERTS, np.float32)
    group_scores = cuda.shared.array(MAX_EXPERTS, np.float32)
    lanes = cuda.shared.array(WARP, np.float32)
    token, expert = cuda.blockIdx.x, cuda.threadIdx.x
    num_experts, k = router_logits.shape[1], topk_ids.shape[1]
    is_expert = expert < num_experts
    group_size = num_experts // num_groups
    logit, value, key, best = ZERO, ZERO, LOWEST, ZERO
    if is_expert:
        logit = router_logits[token, expert]
        if has_logits_bias:
            logit += logits_bias[expert]
        keys[expert] = logit
    cuda.syncthreads()

    if not sigmoid:
        best = _best(keys, num_experts, lanes)
    if is_expert:
        value = _sigmoid(logit) if sigmoid else _exp(logit - best)
        values[expert] = value
    cuda.syncthreads()
    total = ONE if sigmoid else _sum(values, num_experts, lanes)

    if is_expert:
        key = value / total if has_selection_bias or sums_two else logit
        if has_selection_bias:
            key += selection_bias[expert]
        if key != key:
            key = LOWEST
        keys[expert] = key
    cuda.syncthreads()
    place = k
    if num_groups == 1:
        if is_expert:
            place = _place(keys, 0, num_experts, expert)
    else:
        if expert < num_groups:
            group_scores[expert] = _group_score(keys, expert * group_size, group_size, sums_two)
        cuda.syncthreads()
        if is_expert and _place(group_scores, 0, num_groups, expert // group_size) < topk_groups:
            place = 0
            for group in range(num_groups):
                if _place(group_scores, 0, num_groups, group) < topk_groups:
                    place += _place(keys, group * group_size, group_size, expert)
    if place < k:
        chosen[place] = value
    cuda.syncthreads()
    if place < k:
        if renormalize:
            total = ZERO
            for i in range(k):
                total += chosen[i]
            total += TINY
        topk_weights[token, place] = value / total * scaling
        topk_ids[token, place] = expert


@cuda_device_jit
def _exp(x):  # type: ignore[no-untyped-def]
    return np.float32(math.exp(x))


@cuda_device_jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    small = np.float32(math.exp(-abs(x)))
    return (ONE if x >= ZERO else small) / (ONE + small)


@cuda_device_jit
def _group_score(scores, start, count, sums_two):  # type: ignore[no-untyped-def]
    """The best score of a group, or the sum of its best two."""
    first, second = LOWEST, LOWEST
    for i in range(start, start + count):
        if scores[i] > first:
            first, second = scores[i], first
        elif scores[i] > second:
            second = scores[i]
    return first + second if sums_two else first


@cuda_device_jit
def _place(scores, start, count, index):  # type: ignore[no-untyped-def]
    """How many of scores[start : start + count] go before scores[index], by value, then by id."""
    place = 0
    for i in range(start, start + count):
        if scores[i] > scores[index] or (scores[i] == scores[index] and i < index):
            place += 1
    return place


@cuda_device_jit
def _sum(values, count, lanes):  # type: ignore[no-untyped-def]
    """Sum of values[:count], for all threads; every 32nd value, then the 32 sums by halving: in the
    order of warp_sum in cuda_src/common.cuh."""
    lane = cuda.threadIdx.x
    if lane < WARP:
        part = ZERO
        for i in range(lane, count, WARP):
            part += values[i]
        lanes[lane] = part
    cuda.syncthreads()
    half = WARP // 2
    while half > 0:
        if lane < half:
            lanes[lane] += lanes[lane + half]
        cuda.syncthreads()
        half //= 2
    return lanes[0]


@cuda_device_jit
def _best(values, count, lanes):  # type: ignore[no-untyped-def]
    """The largest of values[:count] that is not NaN, for all threads; found as `_sum` adds."""
    lane = cuda.threadIdx.x
    if lane < WARP:
        best = LOWEST
        for i in range(lane, count, WARP):
            if values[i] > best:
                best = values[i]
        lanes[lane] = best
    cuda.syncthreads()
    half = WARP // 2
    while half > 0:
        if lane < half and lanes[lane + half] > lanes[lane]:
            lanes[lane] = lanes[lane + half]
        cuda.syncthreads()
        half //= 2
    return lanes[0]
