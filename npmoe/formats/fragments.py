"""The layout in which the decode kernels read weights; cuda_src/weight_formats.cuh defines it.

Records of 16 rows x 128 columns, `[..., N / 16, K / 128, record bytes]`: lane 4 g + t of a warp
finds there the codes of rows g and g + 8, of every group of 32 columns the 8 from 8 t on.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from npmoe.dtypes import Array, array_namespace
from npmoe.formats.groups import fp16_scale, unpack_nibbles
from npmoe.formats.quant_tensor import QuantTensor

LAYOUT = "fragments"
ROWS, COLUMNS, GROUP, NARROW = 16, 128, 32, 2048


def padded(width: int) -> int:
    """The columns that kernels take for so many, of which the last may hold zeros: whole records,
    and of a wide matrix an even number of them, which can come in chunks of several."""
    unit = COLUMNS if width <= NARROW else 2 * COLUMNS
    return -(-width // unit) * unit


class RecordFormat(NamedTuple):
    """code: W_FORMAT of the kernels. record_bytes: of 16 rows x 128 columns.

    scale_columns: neighbours in a row that share a scale; 0 where there are no scales.
    """

    code: int
    record_bytes: int
    scale_columns: int


RECORDS = {
    "bf16": RecordFormat(0, 4096, 0),
    "fp4": RecordFormat(1, 1024 + 128, GROUP),
    "fp8": RecordFormat(2, 2048 + 64, COLUMNS),
    "int4": RecordFormat(3, 1024 + 128, GROUP),
    "int4_asym": RecordFormat(4, 1024 + 128 + 64, GROUP),
    "mxfp4": RecordFormat(5, 1024 + 64, GROUP),
    "nvfp4": RecordFormat(6, 1024 + 128 + 16, GROUP // 2),
}
"""The formats that decode kernels read."""

RECORD_BYTES = {name: record.record_bytes for name, record in RECORDS.items()}

Places = tuple[tuple[int, ...], ...]
E2M1_PLACES: Places = ((15, 8, 7, 6), (21, 14, 13, 12), (9, 2, 1, 0), (11, 4, 3, 10))
E4M3_PLACES: Places = ((15, 10, 9, 8, 7, 6, 5, 4), (19, 14, 13, 12, 11, 2, 1, 0))
INT4_PLACES: Places = ((3, 2, 1, 0), (7, 6, 5, 4), (11, 10, 9, 8), (15, 14, 13, 12))
"""Where the bits of pair 0, 1, ... lie in a word, those of the even column from the highest down;
those of the odd column lie 16 bits on, modulo 32."""


def to_fragments(w: QuantTensor) -> QuantTensor:
    """A weight in "rows" layout, `[..., N, K]`, as records; N is padded to 16 with zeros.

    Float32 scales of the 4-bit formats are rounded to fp16. Raises ValueError for a format or
    scales without kernels, and for K not a multiple of 128.
    """
    w = with_row_scales(w)
    *lead, rows, columns = w.shape
    if columns % COLUMNS:
        raise ValueError(f"decode kernels need columns in multiples of {COLUMNS}, not {columns}")
    xp = array_namespace(w.codes)
    grid = (*lead, -(-rows // ROWS), columns // COLUMNS)
    parts = [
        xp.ascontiguousarray(part).view(xp.uint8).reshape(*grid, -1)
        for part in (_ordered_codes(w), *_ordered_scales(w, grid))
    ]
    records = xp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    assert records.shape[-1] == RECORD_BYTES[w.format]
    return replace(w, codes=records, scales=None, zeros=None, global_scale=None, layout=LAYOUT)


def with_row_scales(w: QuantTensor) -> QuantTensor:
    """The same weight with scales and zeros for every row and every `scale_columns` columns.

    Scales of blocks, channels and larger groups are repeated. Raises ValueError for a format
    without kernels and for scales of fewer columns.
    """
    if w.format not in RECORDS:
        raise ValueError(f"no decode kernel reads {w.format}; there are {', '.join(RECORDS)}")
    width = RECORDS[w.format].scale_columns
    if w.scales is None or w.block == (1, width):
        return w
    rows, columns = w.shape[-2:]
    block_rows, block_columns = w.block
    if block_columns % width and block_columns < columns:
        raise ValueError(
            f"decode kernels take {w.format} scales for {width} columns or a multiple of that, "
            f"not for {block_columns}"
        )
    xp = array_namespace(w.codes)
    row, column = xp.arange(rows)[:, None] // block_rows, xp.arange(0, columns, width)

    def spread(a: Array) -> Array:
        return a[..., row, column // block_columns]

    zeros = None if w.zeros is None else spread(w.zeros)
    return replace(w, scales=spread(w.scales), zeros=zeros, block=(1, width))


def _ordered_codes(w: QuantTensor) -> Array:
    if w.format == "bf16":
        split = {"group": 4, "t": 4, "column": 8}
        return _arrange(w.codes, split, "group half g t column")
    if w.format == "fp8":
        split = {"group": 4, "t": 4, "word": 2, "column": 4}
        return _words(_arrange(w.codes, split, "group g t half word column"), E4M3_PLACES)
    split = {"two": 2, "group": 2, "t": 4, "column": 8}
    nibbles = _arrange(unpack_nibbles(w.codes), split, "two g t group half column")
    return _words(nibbles, INT4_PLACES if w.format.startswith("int4") else E2M1_PLACES)


def _ordered_scales(w: QuantTensor, grid: tuple[int, ...]) -> list[Array]:
    """What follows the codes in a record."""
    if w.format == "bf16":
        return []
    if w.format == "fp8":
        return [_arrange(w.scales, {}, "g half")]
    if w.format == "mxfp4":
        return [_arrange(w.scales, {"group": 4}, "g half group")]
    if w.format == "nvfp4":
        if bool((w.scales & 0x80).any()):
            raise ValueError("nvfp4 scales must not be negative")
        scales = _arrange(w.scales, {"group": 4, "part": 2}, "g part half group")
        return [scales, _global_scales(w, grid)]
    scales = _arrange(fp16_scale(w.scales), {"group": 4}, "g group half")
    if w.zeros is None:
        return [scales]
    if bool((w.zeros > 15).any()):
        raise ValueError("int4_asym zeros are 0 to 15")
    return [scales, _arrange(w.zeros, {"group": 4}, "g half group")]


def _global_scales(w: QuantTensor, grid: tuple[int, ...]) -> Array:
    """float32 `[*grid, 4]`: those of a record's even and odd rows, twice.

    Raises ValueError where a tile's even rows, or its odd rows, do not share one.
    """
    xp = array_namespace(w.codes)
    if not w.has_row_globals:
        global_scale = xp.asarray(w.global_scale, dtype=xp.float32)[..., None, None, None]
        return xp.broadcast_to(global_scale, (*grid, 4))
    *lead, rows = w.global_scale.shape
    missing = -rows % ROWS
    last = w.global_scale[..., rows - 2 :]
    filler = [last] * (missing // 2) + [last[..., : missing % 2]]
    pairs = xp.concatenate([w.global_scale, *filler], axis=-1).reshape(*lead, -1, ROWS // 2, 2)
    if bool((pairs != pairs[..., :1, :]).any()):
        raise ValueError(f"global scales change within a tile of {ROWS} rows")
    of_tile = xp.concatenate([pairs[..., 0, :]] * 2, axis=-1)
    return xp.broadcast_to(of_tile[..., None, :], (*grid, 4))


def _arrange(a: Array, split: dict[str, int], order: str) -> Array:
    """`[..., N, M]` as `[..., N / 16, K / 128, *order]`, N padded with zeros.

    split: axis names and sizes into which the M of one slice of 128 columns divide. A row is
    8 half + g of its tile.
    """
    a = _pad_rows(a)
    *lead, rows, width = a.shape
    names = ("tile", "half", "g", "slice", *split)
    slices = width // math.prod(split.values())
    divided = a.reshape(*lead, rows // ROWS, 2, 8, slices, *split.values())
    axes = [len(lead) + names.index(name) for name in ("tile", "slice", *order.split())]
    return divided.transpose(*range(len(lead)), *axes)


def _words(codes: Array, places: Places) -> Array:
    """Codes uint8 `[..., 2 pairs]` -> uint32 `[...]` as weight_formats.cuh unpacks them."""
    xp = array_namespace(codes)
    words = xp.zeros(codes.shape[:-1], xp.uint32)
    for pair, bits in enumerate(places):
        for odd in range(2):
            code = codes[..., 2 * pair + odd].astype(xp.uint32)
            for i, place in enumerate(reversed(bits)):
                words |= (code >> i & 1) << (place + 16 * odd) % 32
    return words


def _pad_rows(a: Array) -> Array:
    xp = array_namespace(a)
    padding = -a.shape[-2] % ROWS
    if not padding:
        return a
    filler = xp.zeros((*a.shape[:-2], padding, a.shape[-1]), a.dtype)
    return xp.concatenate([a, filler], axis=-2)
