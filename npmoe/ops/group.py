"""Routed tokens grouped by expert: how many, where each expert's begin, and which they are.

A pair is one token's choice of one expert, `pair = token * K + k`. Expert e's pairs are
sorted_pair_ids[expert_offsets[e] : expert_offsets[e + 1]], in ascending order.
"""

import numpy as np

from npmoe.dtypes import Array, array_namespace
from npmoe.runtime.check import check_array
from npmoe.runtime.device import cuda, cuda_jit

MAX_PAIRS = 65536
MAX_GROUPED_EXPERTS = 512
PAIRS_PER_BLOCK = 256
NO_PAIR = -1

Groups = tuple[Array, Array, Array]
"""(expert_counts int32 `[E]`, expert_offsets int32 `[E + 1]`, sorted_pair_ids int32 `[T * K]`)."""


def group_by_expert(
    topk_ids: Array, num_experts: int, out: Groups | None = None, workspace: Array | None = None
) -> Groups:
    """Groups the pairs of topk_ids int32 `[T, K]`, as `group_by_expert_ref` defines it.

    `out` is filled if given; workspace int32 `group_workspace(T * K, E)`, for CuPy arrays only.
    Raises ValueError for more than 65,536 pairs or 512 experts, or arrays that do not fit.
    """
    num_pairs = topk_ids.size
    if not 1 <= num_experts <= MAX_GROUPED_EXPERTS:
        raise ValueError(f"num_experts = {num_experts}: legal are 1 to {MAX_GROUPED_EXPERTS}")
    if num_pairs > MAX_PAIRS:
        raise ValueError(f"T * K = {num_pairs} pairs: at most {MAX_PAIRS} are grouped at once")
    xp = array_namespace(topk_ids)
    if out is None:
        sizes = (num_experts, num_experts + 1, num_pairs)
        counts, offsets, pairs = (xp.empty(size, np.int32) for size in sizes)
        out = counts, offsets, pairs
    if xp is np:
        for target, value in zip(out, group_by_expert_ref(topk_ids, num_experts), strict=True):
            target[...] = value
        return out
    if workspace is None:
        workspace = xp.empty(group_workspace(num_pairs, num_experts), np.int32)
    _group_by_expert_cuda(*out, topk_ids, workspace)
    return out


def group_by_expert_ref(topk_ids: Array, num_experts: int) -> Groups:
    """The definition. An id outside 0 .. E - 1 is not routed: its pair is left out, and
    sorted_pair_ids ends with as many -1."""
    ids = topk_ids.reshape(-1)
    routed = np.flatnonzero((ids >= 0) & (ids < num_experts))
    counts = np.bincount(ids[routed], minlength=num_experts)
    pairs = np.full(ids.size, NO_PAIR, np.int32)
    pairs[: routed.size] = routed[np.argsort(ids[routed], kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return counts.astype(np.int32), offsets.astype(np.int32), pairs


def group_workspace(num_pairs: int, num_experts: int) -> tuple[int, int]:
    """The shape of the workspace: counts of each block of pairs."""
    return -(-num_pairs // PAIRS_PER_BLOCK), num_experts


def _group_by_expert_cuda(
    expert_counts: Array,
    expert_offsets: Array,
    sorted_pair_ids: Array,
    topk_ids: Array,
    workspace: Array,
) -> None:
    """Checks, and launches a block for every PAIRS_PER_BLOCK pairs: twice, unless it is one."""
    num_experts, num_pairs = expert_counts.shape[0], topk_ids.size
    blocks, _ = group_workspace(num_pairs, num_experts)
    check_array("topk_ids", topk_ids, np.int32, None, None)
    check_array("expert_counts", expert_counts, np.int32, num_experts)
    check_array("expert_offsets", expert_offsets, np.int32, num_experts + 1)
    check_array("sorted_pair_ids", sorted_pair_ids, np.int32, num_pairs)
    check_array("workspace", workspace, np.int32, blocks, num_experts)
    if num_pairs == 0:
        expert_counts[...] = expert_offsets[...] = 0
        return
    ids = topk_ids.reshape(-1)
    if blocks == 1:
        _group_kernel.launch(
            1, PAIRS_PER_BLOCK, expert_counts, expert_offsets, sorted_pair_ids, ids
        )
        return
    _count_kernel.launch(blocks, PAIRS_PER_BLOCK, workspace, ids)
    _place_kernel.launch(
        *(blocks, PAIRS_PER_BLOCK),
        *(expert_counts, expert_offsets, sorted_pair_ids, ids, workspace),
    )


@cuda_jit
def _group_kernel(  # type: ignore[no-untyped-def]
    expert_counts, expert_offsets, sorted_pair_ids, ids
):
    """One block for all pairs, which are few: whoever needs a number counts by itself."""
    all_ids = cuda.shared.array(PAIRS_PER_BLOCK, np.int32)
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    num_experts, num_pairs = expert_counts.shape[0], ids.shape[0]
    if thread < num_pairs:
        all_ids[thread] = ids[thread]
    cuda.syncthreads()
    expert = all_ids[thread] if thread < num_pairs else NO_PAIR
    before, own, place, routed = 0, 0, 0, 0  # the first two of the expert that is this thread's
    for i in range(num_pairs):
        found = all_ids[i]
        if 0 <= found < num_experts:
            routed += 1
            before += found < thread
            own += found == thread
            place += found < expert or (found == expert and i < thread)
    if thread < num_pairs:
        if 0 <= expert < num_experts:
            sorted_pair_ids[place] = thread
        if thread >= routed:
            sorted_pair_ids[thread] = NO_PAIR
    for e in range(thread, num_experts + 1, threads):
        if e != thread:
            before, own = 0, 0
            for i in range(num_pairs):
                before += 0 <= all_ids[i] < e
                own += all_ids[i] == e
        expert_offsets[e] = before
        if e < num_experts:
            expert_counts[e] = own


@cuda_jit
def _count_kernel(block_counts, ids):  # type: ignore[no-untyped-def]
    """block_counts[b, e]: the pairs of expert e in block b, out. A thread is a pair."""
    counts = cuda.shared.array(MAX_GROUPED_EXPERTS, np.int32)
    block, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    num_experts = block_counts.shape[1]
    for e in range(thread, num_experts, threads):
        counts[e] = 0
    cuda.syncthreads()
    pair = block * threads + thread
    if pair < ids.shape[0] and 0 <= ids[pair] < num_experts:
        cuda.atomic.add(counts, ids[pair], 1)
    cuda.syncthreads()
    for e in range(thread, num_experts, threads):
        block_counts[block, e] = counts[e]


@cuda_jit
def _place_kernel(  # type: ignore[no-untyped-def]
    expert_counts, expert_offsets, sorted_pair_ids, ids, block_counts
):
    """A thread is a pair. It goes behind all pairs of lower experts, behind those of its own expert
    in earlier blocks, and behind those of its own expert that stand before it in its block.

    Every block sums the counts for itself; block 0 writes them.
    """
    first = cuda.shared.array(MAX_GROUPED_EXPERTS, np.int32)  # of the expert's pairs in this block
    ends = cuda.shared.array(MAX_GROUPED_EXPERTS, np.int32)  # inclusive sums of counts
    moved = cuda.shared.array(MAX_GROUPED_EXPERTS, np.int32)
    mine = cuda.shared.array(PAIRS_PER_BLOCK, np.int32)
    block, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    num_blocks, num_experts = block_counts.shape
    for e in range(thread, num_experts, threads):
        total, before = 0, 0
        for b in range(num_blocks):
            if b == block:
                before = total
            total += block_counts[b, e]
        first[e], ends[e] = before - total, total
        if block == 0:
            expert_counts[e] = total
    pair = block * threads + thread
    mine[thread] = ids[pair] if pair < ids.shape[0] else NO_PAIR
    cuda.syncthreads()

    step = 1
    while step < num_experts:
        for e in range(thread, num_experts, threads):
            moved[e] = ends[e] + (ends[e - step] if e >= step else 0)
        cuda.syncthreads()
        for e in range(thread, num_experts, threads):
            ends[e] = moved[e]
        cuda.syncthreads()
        step *= 2
    if block == 0:
        for e in range(thread, num_experts + 1, threads):
            expert_offsets[e] = ends[e - 1] if e > 0 else 0

    expert = mine[thread]
    if 0 <= expert < num_experts:
        place = ends[expert] + first[expert]
        for i in range(thread):
            if mine[i] == expert:
                place += 1
        sorted_pair_ids[place] = pair
    if ends[num_experts - 1] <= pair < ids.shape[0]:
        sorted_pair_ids[pair] = NO_PAIR
