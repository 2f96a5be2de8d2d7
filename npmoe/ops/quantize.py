"""Keys and values into their pages, and out of them: the cache's side of every format.

A slot is `page_id * page_size + offset`; a token's K or V of all heads is written to one slot.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from npmoe.dtypes import Array, array_namespace
from npmoe.formats.floats import decode_bf16, encode_bf16
from npmoe.formats.groups import Encoded, check_finite
from npmoe.formats.hadamard import hadamard
from npmoe.formats.kv_cache import GROUPED_KV_FORMATS
from npmoe.formats.page_words import from_page_words, to_page_words


@dataclass(frozen=True)
class KVPages:
    """The pages of K or of V of one layer.

    codes: float32 (fp32), uint16 (bf16) or uint8 `[num_pages, num_kv_heads, page_size, D]`, the
    last axis D / 2 for 4-bit formats. scales fp16, or as uint8 E8M0 (mxfp4) or E4M3 (nvfp4), and
    zeros uint8: the same with D / group_size.
    rotated: what is stored are heads times a Hadamard matrix; attention knows. copies: what is read
    of some tokens instead.
    """

    format: str
    codes: Array
    scales: Array | None = None
    zeros: Array | None = None
    rotated: bool = False
    copies: "KVCopies | None" = None

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.codes.shape[2]

    @property
    def token_bytes(self) -> int:
        """Bytes of one head of a token: codes, scales and zero points."""
        return sum(a.shape[-1] * a.itemsize for a in self.arrays())

    @property
    def num_groups(self) -> int:
        """Scales of one head of a token."""
        return 0 if self.scales is None else self.scales.shape[-1]

    def arrays(self) -> list[Array]:
        """The arrays that are present."""
        return [a for a in (self.codes, self.scales, self.zeros) if a is not None]


def to_kernel_pages(pages: KVPages) -> KVPages:
    """Pages of any format as the GPU's kernels hold them: codes of 4 bits move, the rest is
    shared."""
    return replace(pages, codes=to_page_words(pages.codes, pages.format))


def from_kernel_pages(pages: KVPages) -> KVPages:
    """The inverse of `to_kernel_pages`."""
    return replace(pages, codes=from_page_words(pages.codes, pages.format))


@dataclass(frozen=True)
class KVCopies:
    """K or V of the `first` tokens of each sequence and of its recent ones, at higher precision.

    A query at position i reads keys j < first and j > i - recent here, the others where all are.
    pages: one for each sequence, by its state slot: the first tokens, then a ring. The ring holds
    what the queries of one step reach: recent - 1 tokens and those of the step.
    """

    pages: KVPages
    first: int
    recent: int

    def offsets(self, positions: Array) -> Array:
        """Where in its page the copy of a token at int `[...]` positions is."""
        ring = self.pages.page_size - self.first
        return np.where(
            positions < self.first, positions, self.first + (positions - self.first) % ring
        )

    def slots(self, positions: Array, cu_seqlens_q: Array, state_slots: Array) -> Array:
        """Slots, int `[T]`, of a batch's tokens; positions `[T]`, state_slots `[S]`."""
        counts = np.diff(cu_seqlens_q)
        most = self.pages.page_size - self.first - self.recent + 1
        assert counts.max() <= most, f"{counts.max()} tokens of a sequence, the ring takes {most}"
        return np.repeat(state_slots, counts) * self.pages.page_size + self.offsets(positions)

    def reach(self, start: int, stop: int) -> Array:
        """Positions that queries from start to stop - 1 read here, int `[N]`."""
        first = min(self.first, stop)
        return np.concatenate(
            [np.arange(first), np.arange(max(first, start - self.recent + 1), stop)]
        )

    def serves(self, positions: Array, keys: Array) -> Array:
        """Whether the query reads the key here: positions `[T]`, keys `[L]` -> bool `[T, L]`."""
        return (keys < self.first) | (keys > positions[:, None] - self.recent)


class NotFinite(ValueError):
    """A key or value that is NaN or infinite; row: of its token."""

    def __init__(self, row: int) -> None:
        super().__init__(f"token {row}: a key or value is NaN or infinite and cannot be cached")
        self.row = row


def write_kv_pages(
    pages: KVPages, x: Array, slot_mapping: Array, copy_slots: Array | None = None
) -> None:
    """Rotates x float32 `[T, num_kv_heads, D]` if the pages are, quantises it, and stores it at
    slot_mapping int32 `[T]`, and in the pages of copies, if there are any, at copy_slots `[T]`.

    A slot of -1 is skipped. Raises NotFinite for NaN or infinity, and ValueError for what else a
    format cannot hold; then nothing is written.
    """
    given = x
    if pages.rotated:
        with np.errstate(invalid="ignore"):  # said below
            x = hadamard(x)
    try:
        _store(pages, x, slot_mapping)
    except ValueError:
        xp = array_namespace(x)
        finite = xp.isfinite(given).all(axis=(1, 2)) | (slot_mapping < 0)
        if bool(finite.all()):
            raise
        raise NotFinite(int(xp.flatnonzero(~finite)[0])) from None
    if pages.copies is not None:
        assert copy_slots is not None, "a cache with windows needs the copies' slots"
        _store(pages.copies.pages, x, copy_slots)


def _store(pages: KVPages, x: Array, slot_mapping: Array) -> None:
    xp = array_namespace(x)
    keep = slot_mapping >= 0
    if not bool(keep.all()):
        x, slot_mapping = x[keep], slot_mapping[keep]
    page, offset = xp.divmod(slot_mapping, pages.page_size)
    if pages.format == "fp32":
        check_finite(x)
        pages.codes[page, :, offset] = x
        return
    if pages.format == "bf16":
        pages.codes[page, :, offset] = encode_bf16(x)
        return
    assert pages.scales is not None
    encoded = GROUPED_KV_FORMATS[pages.format][0](x, x.shape[-1] // pages.scales.shape[-1])
    pages.codes[page, :, offset] = encoded.codes
    pages.scales[page, :, offset] = encoded.scales
    if pages.zeros is not None:
        pages.zeros[page, :, offset] = encoded.zeros


def read_kv_pages(pages: KVPages, block_table: Array, length: int) -> Array:
    """The first `length` cached tokens of one sequence, float32 `[length, num_kv_heads, D]`, as
    they are stored: rotated ones still are.

    block_table int32 `[max_pages]` names the sequence's pages in order.
    """
    count = -(-length // pages.page_size)

    def tokens(a: Array) -> Array:
        chosen = a[block_table[:count]]  # [pages, heads, page_size, C]
        flat = chosen.transpose(0, 2, 1, 3).reshape(-1, a.shape[1], a.shape[3])
        return flat[:length]

    return _decode(pages, tokens)


def read_kv_copies(copies: KVCopies, state_slot: int, positions: Array) -> Array:
    """A sequence's copies of the tokens at int `[N]` positions, float32 `[N, num_kv_heads, D]`."""
    offsets = copies.offsets(positions)
    return _decode(copies.pages, lambda a: a[state_slot][:, offsets].transpose(1, 0, 2))


def _decode(pages: KVPages, tokens: Callable[[Array], Array]) -> Array:
    """tokens: takes `[N, heads, C]` out of one of the pages' arrays."""
    codes = tokens(pages.codes)
    if pages.format == "fp32":
        return codes
    if pages.format == "bf16":
        return decode_bf16(codes)
    scales = tokens(pages.scales)
    zeros = None if pages.zeros is None else tokens(pages.zeros)
    return GROUPED_KV_FORMATS[pages.format][1](Encoded(codes, scales, zeros))
