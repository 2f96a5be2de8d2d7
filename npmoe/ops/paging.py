"""What the host decides about KV pages, carried out where the arrays are: block tables changed by
short lists of commands, slots of a step's tokens, copies of pages of any format."""

from collections.abc import Sequence

import numpy as np

from npmoe.dtypes import Array, array_namespace
from npmoe.runtime.check import check_array
from npmoe.runtime.device import cuda, cuda_jit

END, WRITE, CLEAR, SHARE = range(4)
"""Kinds of commands (kind, row, start, count, argument) on the rows of a block table.

END: the list stops here. WRITE: row[start : start + count] = page_ids[argument : argument + count].
CLEAR: row[start:] = empty. SHARE: row[:count] = the row `argument`'s [:count].
"""

COMMAND_WIDTH = 5
NO_PAGE = -1
THREADS = 256


def apply_page_commands(
    block_table: Array, commands: Array, page_ids: Array, empty: int = NO_PAGE
) -> None:
    """Changes block_table int32 `[S, max_pages]` as `apply_page_commands_ref` does.

    commands int32 `[C, 5]`, page_ids int32 `[P]`; what they say must lie inside the arrays.
    """
    if array_namespace(block_table) is np:
        apply_page_commands_ref(block_table, commands, page_ids, empty)
        return
    check_array("block_table", block_table, np.int32, None, None)
    check_array("commands", commands, np.int32, None, COMMAND_WIDTH)
    check_array("page_ids", page_ids, np.int32, None)
    _page_commands_kernel.launch(1, THREADS, block_table, commands, page_ids, np.int32(empty))


def apply_page_commands_ref(
    block_table: Array, commands: Array, page_ids: Array, empty: int = NO_PAGE
) -> None:
    """The definition: commands take effect one after the other, up to the first END."""
    for kind, row, start, count, argument in commands.tolist():
        if kind == END:
            break
        if kind == WRITE:
            block_table[row, start : start + count] = page_ids[argument : argument + count]
        elif kind == CLEAR:
            block_table[row, start:] = empty
        else:
            block_table[row, :count] = block_table[argument, :count]


@cuda_jit
def _page_commands_kernel(block_table, commands, page_ids, empty):  # type: ignore[no-untyped-def]
    """One block, since a command may read what the one before it wrote."""
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    for c in range(commands.shape[0]):
        kind, row, start = commands[c, 0], commands[c, 1], commands[c, 2]
        count, argument = commands[c, 3], commands[c, 4]
        if kind == END:
            break
        if kind == WRITE:
            for i in range(thread, count, threads):
                block_table[row, start + i] = page_ids[argument + i]
        elif kind == CLEAR:
            for i in range(start + thread, block_table.shape[1], threads):
                block_table[row, i] = empty
        else:
            for i in range(thread, count, threads):
                block_table[row, i] = block_table[argument, i]
        cuda.syncthreads()


def map_slots(
    block_table: Array,
    positions: Array,
    cu_seqlens_q: Array,
    page_size: int,
    out: Array | None = None,
) -> Array:
    """slot_mapping int32 `[T]` of a step's tokens, as `map_slots_ref` defines it; `out` is filled
    if given. Raises ValueError for a page_size below 1 or arrays that do not fit."""
    if page_size < 1:
        raise ValueError(f"page_size = {page_size}: legal is 1 or more")
    num_tokens = positions.shape[0]
    xp = array_namespace(positions)
    out = xp.empty(num_tokens, np.int32) if out is None else out
    if xp is np:
        out[...] = map_slots_ref(block_table, positions, cu_seqlens_q, page_size)
    else:
        _map_slots_cuda(out, block_table, positions, cu_seqlens_q, page_size)
    return out


def map_slots_ref(
    block_table: Array, positions: Array, cu_seqlens_q: Array, page_size: int
) -> Array:
    """The definition: slot = page * page_size + offset of each token's position in its sequence.

    block_table int32 `[S, max_pages]`, positions int32 `[T]`; sequence s has tokens cu_seqlens_q[s]
    to cu_seqlens_q[s + 1], int32 `[S + 1]`. -1, to be skipped, for a token of no sequence, a
    negative position, or a position that has no page.
    """
    tokens = np.arange(positions.shape[0])
    rows = np.searchsorted(cu_seqlens_q, tokens, side="right") - 1
    index, offset = np.divmod(positions, page_size)
    known = (rows >= 0) & (rows < len(block_table)) & (index >= 0) & (index < block_table.shape[1])
    pages = np.full(len(tokens), NO_PAGE, np.int32)
    pages[known] = block_table[rows[known], index[known]]
    return np.where(pages >= 0, pages * page_size + offset, -1).astype(np.int32)


def _map_slots_cuda(
    slot_mapping: Array, block_table: Array, positions: Array, cu_seqlens_q: Array, page_size: int
) -> None:
    """Checks, and launches a thread a token."""
    num_tokens = positions.shape[0]
    check_array("slot_mapping", slot_mapping, np.int32, num_tokens)
    check_array("block_table", block_table, np.int32, None, None)
    check_array("positions", positions, np.int32, num_tokens)
    check_array("cu_seqlens_q", cu_seqlens_q, np.int32, block_table.shape[0] + 1)
    if num_tokens:
        threads = min(THREADS, num_tokens)
        _map_slots_kernel.launch(
            *(-(-num_tokens // threads), threads, slot_mapping),
            *(block_table, positions, cu_seqlens_q, np.int32(page_size)),
        )


@cuda_jit
def _map_slots_kernel(  # type: ignore[no-untyped-def]
    slot_mapping, block_table, positions, cu_seqlens_q, page_size
):
    """A thread is a token; it finds its row by bisection."""
    token = cuda.grid(1)
    if token >= positions.shape[0]:
        return
    num_rows, max_pages = block_table.shape
    low, high = 0, num_rows + 1  # cu_seqlens_q[:low] <= token < cu_seqlens_q[high:]
    while low < high:
        middle = (low + high) // 2
        if cu_seqlens_q[middle] <= token:
            low = middle + 1
        else:
            high = middle
    row, position, page = low - 1, positions[token], NO_PAGE
    if 0 <= row < num_rows and 0 <= position < max_pages * page_size:
        page = block_table[row, position // page_size]
    slot_mapping[token] = page * page_size + position % page_size if page >= 0 else -1


def copy_kv_pages(slabs: Sequence[Array], copies: Array) -> None:
    """Copies pages in every layer: what lies in page copies[i, 0] goes to page copies[i, 1].

    slabs: arrays `[num_layers, num_pages, ...]` of any dtype; copies int32 `[C, 2]`, a negative
    source is skipped. No page may be a target twice, or a target and a source.
    """
    for slab in slabs:
        if not slab.flags.c_contiguous:
            raise ValueError("a slab of KV pages is not C-contiguous")
        words = _as_words(slab)
        if array_namespace(slab) is np:
            copy_pages_ref(words, copies)
        else:
            _copy_pages_cuda(words, copies)


def _as_words(slab: Array) -> Array:
    """The same bytes as `[num_layers, num_pages, words]`, words as wide as a page's size allows."""
    flat = slab.reshape(*slab.shape[:2], -1)
    size = flat.shape[2] * flat.itemsize
    return flat.view(np.uint64 if size % 8 == 0 else np.uint8)


def copy_pages_ref(words: Array, copies: Array) -> None:
    """The definition, on one slab `[num_layers, num_pages, words]`."""
    wanted = copies[copies[:, 0] >= 0]
    words[:, wanted[:, 1]] = words[:, wanted[:, 0]]


def _copy_pages_cuda(words: Array, copies: Array) -> None:
    """Checks, and launches a block for each copy in each layer."""
    num_layers, _, size = words.shape
    check_array("copies", copies, np.int32, None, 2)
    if len(copies):
        _copy_pages_kernel.launch((len(copies), num_layers), min(THREADS, size), words, copies)


@cuda_jit
def _copy_pages_kernel(words, copies):  # type: ignore[no-untyped-def]
    source, target = copies[cuda.blockIdx.x, 0], copies[cuda.blockIdx.x, 1]
    layer = cuda.blockIdx.y
    if source >= 0:
        for i in range(cuda.threadIdx.x, words.shape[2], cuda.blockDim.x):
            words[layer, target, i] = words[layer, source, i]
