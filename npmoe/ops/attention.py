"""Paged causal attention over a cache of any format, K and V independent.

out[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, h // ratio]) v[j, h // ratio]

over the cached positions j <= position of t, and j > position - window where there is a window.
A sink is one more score of its query head in the softmax, with no value behind it (gpt_oss).
The current token's key and value are read from the cache too, quantised like all others. Pages with
copies are read there at positions that the copies serve (`KVCopies`), and nowhere else.
"""

from functools import partial

import numpy as np

from npmoe.dtypes import Array
from npmoe.formats.floats import FP16_VALUES
from npmoe.formats.hadamard import hadamard
from npmoe.formats.minifloat import E2M1_VALUES, E4M3_VALUES, E8M0_VALUES
from npmoe.ops.linear import FEW_TOKENS
from npmoe.ops.quantize import KVPages, read_kv_copies, read_kv_pages
from npmoe.runtime.device import jit, parallel_ranges

QUERY_BLOCK = 128


def paged_attention_ref(
    q: Array,
    k_pages: KVPages,
    v_pages: KVPages,
    block_table: Array,
    cu_seqlens_q: Array,
    seq_lens: Array,
    scale: float,
    window: int | None = None,
    sinks: Array | None = None,
    state_slots: Array | None = None,
) -> Array:
    """The definition.

    q float32 `[T, num_heads, D]`, ragged: sequence s owns the rows from cu_seqlens_q[s] to
    cu_seqlens_q[s + 1], which are its last positions, up to seq_lens[s] - 1. block_table int32
    `[S, max_pages]`, seq_lens int32 `[S]` counts cached and new tokens. sinks float32
    `[num_heads]`. state_slots int32 `[S]`: where a sequence's copies are, if there are any.
    -> float32 like q.
    """
    out = np.empty_like(q)
    q = hadamard(q) if k_pages.rotated else q
    sinks = _no_sinks(q) if sinks is None else sinks
    for s, length in enumerate(map(int, seq_lens)):
        start, stop = int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1])
        k, v = (read_kv_pages(p, block_table[s], length) for p in (k_pages, v_pages))
        keys, copies = np.arange(length), k_pages.copies
        if copies is not None:
            assert state_slots is not None, "a cache with windows needs state slots"
            copied = copies.reach(length - stop + start, length)
            keys = np.concatenate([keys, copied])
            k = _with_copies(k, k_pages, int(state_slots[s]), copied)
            v = _with_copies(v, v_pages, int(state_slots[s]), copied)
        for first in range(start, stop, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, stop)
            positions = np.arange(first, last) - stop + length
            masked = _masked(positions, keys, window)
            if copies is not None:
                is_copy = np.arange(len(keys)) >= length
                masked |= copies.serves(positions, keys) != is_copy
            out[first:last] = _mix(q[first:last], k, v, masked, scale, sinks)
    return hadamard(out) if v_pages.rotated else out


def _no_sinks(q: Array) -> Array:
    return np.full(q.shape[1], -np.inf, np.float32)


def _with_copies(x: Array, pages: KVPages, state_slot: int, positions: Array) -> Array:
    """x `[L, heads, D]` as all tokens are cached, and behind it the copies of some."""
    assert pages.copies is not None
    return np.concatenate([x, read_kv_copies(pages.copies, state_slot, positions)])


def _masked(positions: Array, keys: Array, window: int | None) -> Array:
    """Whether a query does not see a key: positions `[T]`, keys `[L]` -> bool `[T, L]`."""
    masked = keys > positions[:, None]
    if window is not None:
        masked |= keys <= positions[:, None] - window
    return masked


def attend(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    scale: float,
    window: int | None = None,
    sinks: Array | None = None,
) -> Array:
    """One sequence, from arrays: q `[T, heads, D]` at positions `[T]` against k `[L, kv_heads, D]`
    and v `[L, kv_heads, V]` -> `[T, heads, V]`, all float32."""
    masked = _masked(positions, np.arange(k.shape[0]), window)
    return _mix(q, k, v, masked, scale, _no_sinks(q) if sinks is None else sinks)


def _mix(q: Array, k: Array, v: Array, masked: Array, scale: float, sinks: Array) -> Array:
    """`attend` with masked bool `[T, L]` for the keys that a query does not see."""
    num_tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(num_tokens, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3)
    scores = grouped @ k.transpose(1, 2, 0)[:, None] * np.float32(scale)  # [kv, ratio, T, L]
    scores = np.where(masked, np.float32(-np.inf), scores)
    sink = sinks.reshape(kv_heads, -1, 1, 1)
    top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    weights = np.exp(scores - top)
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    mixed = weights @ v.transpose(1, 0, 2)[:, None]
    return mixed.transpose(2, 0, 1, 3).reshape(num_tokens, heads, -1)


def paged_attention(
    q: Array,
    k_pages: KVPages,
    v_pages: KVPages,
    block_table: Array,
    cu_seqlens_q: Array,
    seq_lens: Array,
    scale: float,
    window: int | None = None,
    sinks: Array | None = None,
    state_slots: Array | None = None,
) -> Array:
    """See `paged_attention_ref`. Few queries run compiled, straight from the pages."""
    out = np.empty_like(q)
    sinks = _no_sinks(q) if sinks is None else sinks
    for s, length in enumerate(seq_lens):
        start, stop = int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1])
        rows = q[start:stop]
        if stop - start > FEW_TOKENS:
            ragged = np.array([0, stop - start]), seq_lens[s : s + 1]
            table = block_table[s : s + 1]
            slots = None if state_slots is None else state_slots[s : s + 1]
            out[start:stop] = paged_attention_ref(
                rows, k_pages, v_pages, table, *ragged, scale, window, sinks, slots
            )
            continue
        rows = hadamard(rows) if k_pages.rotated else np.ascontiguousarray(rows)
        mixed = np.empty_like(rows)
        position = int(length) - (stop - start)
        reach = min(int(length), window or int(length))
        arguments = (
            *(rows, *_decoder(k_pages), *_decoder(v_pages)),
            *_copies(k_pages, v_pages, -1 if state_slots is None else int(state_slots[s])),
            *(block_table[s], position, np.float32(scale), window or 0, sinks, mixed),
        )
        run = partial(_attention_cpu, *arguments)
        parallel_ranges(k_pages.codes.shape[1], 2 * reach * rows.size, run)
        out[start:stop] = hadamard(mixed) if v_pages.rotated else mixed
    return out


_KINDS = {
    **{"fp32": 0, "bf16": 1, "fp8": 2, "int8": 2},
    **{"int4": 3, "int4_asym": 3, "fp4": 3, "mxfp4": 3, "nvfp4": 3},
}
_CODE_VALUES = {
    "fp8": E4M3_VALUES,
    "int8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
    "int4": np.arange(16, dtype=np.float32) - 8,
    "int4_asym": np.arange(16, dtype=np.float32),
}  # of the others E2M1
_SCALE_VALUES = {"mxfp4": E8M0_VALUES, "nvfp4": E4M3_VALUES}  # of the others fp16
_NONE = np.zeros((1, 1, 1, 1), np.uint8)
_NO_SCALES = _NONE.astype(np.uint16)
_NO_COPIES = _NO_SCALES, _NO_SCALES, _NONE, E2M1_VALUES, FP16_VALUES, _KINDS["bf16"]


def _decoder(pages: KVPages) -> tuple:
    """Codes, scales as bits, zeros, value of each code and of each scale, kind; a dummy where there
    is none.

    Numba compiles one version per dtype of the codes, float32, uint16 (bf16) or uint8, and of the
    scales, uint16 (fp16) or uint8.
    """
    scales = _NO_SCALES if pages.scales is None else pages.scales
    if scales.dtype == np.float16:
        scales = scales.view(np.uint16)
    zeros = _NONE if pages.zeros is None else pages.zeros
    table = _CODE_VALUES.get(pages.format, E2M1_VALUES)
    scale_table = _SCALE_VALUES.get(pages.format, FP16_VALUES)
    return pages.codes, scales, zeros, table, scale_table, _KINDS[pages.format]


def _copies(k_pages: KVPages, v_pages: KVPages, state_slot: int) -> tuple:
    """Decoders of the copies of K and of V, their page, first and recent; with recent = 0, dummies
    that are never read."""
    keys, values = k_pages.copies, v_pages.copies
    if keys is None or values is None:
        return _NO_COPIES, _NO_COPIES, -1, 0, 0
    return _decoder(keys.pages), _decoder(values.pages), state_slot, keys.first, keys.recent


@jit
def _decode_row(codes, scales, zeros, table, scale_table, kind, p, h, i, row):  # type: ignore[no-untyped-def]
    """Page p, head h, offset i -> row float32 [D]. kind: 0 fp32, 1 bf16, 2 bytes, 3 nibbles."""
    width = row.shape[0]
    if kind == 0:
        for d in range(width):
            row[d] = np.float32(codes[p, h, i, d])
    elif kind == 1:
        for d in range(width):
            row[d] = np.uint32(np.uint32(codes[p, h, i, d]) << np.uint32(16)).view(np.float32)
    else:
        groups = scales.shape[3]
        group = width // groups
        for g in range(groups):
            scale = scale_table[scales[p, h, i, g]]
            zero = np.float32(zeros[p, h, i, g]) if zeros.shape == scales.shape else np.float32(0)
            if kind == 2:
                for d in range(g * group, (g + 1) * group):
                    row[d] = table[np.int64(codes[p, h, i, d])] * scale
            else:
                for d in range(g * group, (g + 1) * group, 2):
                    pair = np.int64(codes[p, h, i, d >> 1])
                    row[d] = (table[pair & 15] - zero) * scale
                    row[d + 1] = (table[pair >> 4] - zero) * scale


def read_rows(pages: KVPages, block_table: Array, length: int) -> Array:
    """What `read_kv_pages` gives, compiled."""
    heads, columns = pages.codes.shape[1], pages.codes.shape[3]
    width = 2 * columns if _KINDS[pages.format] == 3 else columns
    out = np.empty((length, heads, width), np.float32)
    run = partial(_read_rows, *_decoder(pages), block_table, out)
    parallel_ranges(length, out.size, run)
    return out


@jit
def _read_rows(codes, scales, zeros, table, scale_table, kind, pages, out, first, last):  # type: ignore[no-untyped-def]
    """Tokens first to last of out [L, heads, D]."""
    page_size = codes.shape[2]
    for j in range(first, last):
        for h in range(out.shape[1]):
            page = pages[j // page_size]
            row, i = out[j, h], j % page_size
            _decode_row(codes, scales, zeros, table, scale_table, kind, page, h, i, row)


@jit
def _place(j, stop, pages, page_size, slot, first, recent, ring):  # type: ignore[no-untyped-def]
    """Where the query at stop - 1 reads key j: whether among the copies, which page, which row."""
    if j < first:
        return True, slot, j
    if j >= stop - recent:
        return True, slot, first + (j - first) % ring
    return False, pages[j // page_size], j % page_size


@jit
def _attention_cpu(  # type: ignore[no-untyped-def]
    q,
    k_codes,
    k_scales,
    k_zeros,
    k_table,
    k_scale_table,
    k_kind,
    v_codes,
    v_scales,
    v_zeros,
    v_table,
    v_scale_table,
    v_kind,
    k_copies,
    v_copies,
    slot,
    first,
    recent,
    pages,
    position,
    scale,
    window,
    sinks,
    out,
    first_head,
    last_head,
):
    """q and out [T, heads, D] of one sequence from `position` on; kv heads first to last."""
    ring = k_copies[0].shape[2] - first
    num_tokens, heads, dim = q.shape
    page_size = k_codes.shape[2]
    ratio = heads // k_codes.shape[1]
    row = np.empty(dim, np.float32)
    part = np.empty(8, np.float32)
    for t in range(num_tokens):
        stop = position + t + 1
        start = max(0, stop - window) if window > 0 else 0
        scores = np.empty((ratio, stop - start), np.float32)
        for kv in range(first_head, last_head):
            for j in range(start, stop):
                copied, page, i = _place(j, stop, pages, page_size, slot, first, recent, ring)
                if copied:
                    _decode_row(*k_copies, page, kv, i, row)
                else:
                    _decode_row(
                        k_codes, k_scales, k_zeros, k_table, k_scale_table, k_kind, page, kv, i, row
                    )
                for h in range(ratio):
                    part[:] = 0
                    for d in range(0, dim - dim % 8, 8):
                        for i in range(8):
                            part[i] += q[t, kv * ratio + h, d + i] * row[d + i]
                    for d in range(dim - dim % 8, dim):
                        part[0] += q[t, kv * ratio + h, d] * row[d]
                    dot = np.float32(0)
                    for i in range(8):
                        dot += part[i]
                    scores[h, j - start] = dot * scale
            for h in range(ratio):
                sink = sinks[kv * ratio + h]
                top = max(scores[h].max(), sink)
                total = np.float64(np.exp(sink - top))
                for j in range(stop - start):
                    scores[h, j] = np.exp(scores[h, j] - top)
                    total += scores[h, j]
                for j in range(stop - start):
                    scores[h, j] /= np.float32(total)
                out[t, kv * ratio + h, :] = 0
            for j in range(start, stop):
                copied, page, i = _place(j, stop, pages, page_size, slot, first, recent, ring)
                if copied:
                    _decode_row(*v_copies, page, kv, i, row)
                else:
                    _decode_row(
                        v_codes, v_scales, v_zeros, v_table, v_scale_table, v_kind, page, kv, i, row
                    )
                for h in range(ratio):
                    weight = scores[h, j - start]
                    for d in range(dim):
                        out[t, kv * ratio + h, d] += weight * row[d]
