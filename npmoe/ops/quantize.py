"""Keys and values into their pages, and out of them: the cache's side of every format.

A slot is `page_id * page_size + offset`; a token's K or V of all heads is written to one slot.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from npmoe.dtypes import Array, array_namespace
from npmoe.formats.floats import decode_bf16, encode_bf16
from npmoe.formats.groups import Encoded
from npmoe.formats.hadamard import hadamard
from npmoe.formats.kv_cache import GROUPED_KV_FORMATS
from npmoe.formats.page_words import from_page_words, to_page_words


@dataclass(frozen=True)
class KVPages:
    """The pages of K or of V of one layer.

    codes: float32 (fp32), uint16 (bf16) or uint8 `[num_pages, num_kv_heads, page_size, D]`, the
    last axis D / 2 for 4-bit formats. scales fp16 and zeros uint8: the same with D / group_size.
    rotated: what is stored are heads times a Hadamard matrix; attention knows.
    """

    format: str
    codes: Array
    scales: Array | None = None
    zeros: Array | None = None
    rotated: bool = False

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.codes.shape[2]

    def arrays(self) -> list[Array]:
        """The arrays that are present."""
        return [a for a in (self.codes, self.scales, self.zeros) if a is not None]


def to_kernel_pages(pages: KVPages) -> KVPages:
    """Pages of any format as the GPU's kernels hold them: fp4 codes move, the rest is shared."""
    return _with_words(pages, to_page_words)


def from_kernel_pages(pages: KVPages) -> KVPages:
    """The inverse of `to_kernel_pages`."""
    return _with_words(pages, from_page_words)


def _with_words(pages: KVPages, move: Callable[[Array], Array]) -> KVPages:
    return replace(pages, codes=move(pages.codes)) if pages.format == "fp4" else pages


def write_kv_pages(pages: KVPages, x: Array, slot_mapping: Array) -> None:
    """Rotates x float32 `[T, num_kv_heads, D]` if the pages are, quantises it, and stores it at
    slot_mapping int32 `[T]`.

    A slot of -1 is skipped. Raises ValueError for NaN or infinity.
    """
    xp = array_namespace(x)
    keep = slot_mapping >= 0
    if not bool(keep.all()):
        x, slot_mapping = x[keep], slot_mapping[keep]
    if pages.rotated:
        x = hadamard(x)
    page, offset = xp.divmod(slot_mapping, pages.page_size)
    if pages.format in ("fp32", "bf16"):
        codes = x if pages.format == "fp32" else encode_bf16(x)
        pages.codes[page, :, offset] = codes
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

    codes = tokens(pages.codes)
    if pages.format == "fp32":
        return codes
    if pages.format == "bf16":
        return decode_bf16(codes)
    scales = tokens(pages.scales)
    zeros = None if pages.zeros is None else tokens(pages.zeros)
    return GROUPED_KV_FORMATS[pages.format][1](Encoded(codes, scales, zeros))
