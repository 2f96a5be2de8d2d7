"""The layout in which the decode kernels read weights; cuda_src/weight_formats.cuh defines it.

Records of 16 rows x 128 columns, `[..., N / 16, K / 128, record bytes]`: lane 4 g + t of a warp
finds there the codes of rows g and g + 8, of every group of 32 columns the 8 from 8 t on.
"""

from dataclasses import replace

from npmoe.dtypes import Array, array_namespace
from npmoe.formats.groups import unpack_nibbles
from npmoe.formats.quant_tensor import QuantTensor

LAYOUT = "fragments"
ROWS, COLUMNS = 16, 128
RECORD_BYTES = {"bf16": 4096, "fp4": 1152}
PAIR_BITS = ((15, 8, 7, 6), (21, 14, 13, 12), (9, 2, 1, 0), (11, 4, 3, 10))
"""Where sign, exponent (2 bits) and mantissa of the even column of pair 0 to 3 lie in a word; those
of the odd column lie 16 bits on, modulo 32."""


def to_fragments(w: QuantTensor) -> QuantTensor:
    """A weight in "rows" layout, `[..., N, K]`, as records; N is padded to 16 with zeros.

    Raises ValueError for a format without kernels and for K not a multiple of 128.
    """
    if w.format not in RECORD_BYTES:
        raise ValueError(f"no decode kernel reads {w.format}; there are {', '.join(RECORD_BYTES)}")
    *lead, rows, columns = w.shape
    if columns % COLUMNS:
        raise ValueError(f"decode kernels need columns in multiples of {COLUMNS}, not {columns}")
    xp = array_namespace(w.codes)
    grid = (*lead, -(-rows // ROWS), columns // COLUMNS)
    codes = w.codes if w.format == "bf16" else unpack_nibbles(w.codes)
    # [..., tile, half of the rows 2, g 8, slice, group 4, t 4, column 8]
    tiles = _pad_rows(codes).reshape(*lead, grid[-2], 2, 8, grid[-1], 4, 4, 8)
    front = tuple(range(tiles.ndim - 6))
    half, g, slice_, group, t, column = range(tiles.ndim - 6, tiles.ndim)
    if w.format == "bf16":
        order = tiles.transpose(*front, slice_, group, half, g, t, column)
        records = xp.ascontiguousarray(order).view(xp.uint8).reshape(*grid, RECORD_BYTES["bf16"])
        return replace(w, codes=records, layout=LAYOUT)
    # [..., tile, slice, pair of groups 2, g, t, group of the pair 2, half, column 8]
    tiles = tiles.reshape(*tiles.shape[:-3], 2, 2, 4, 8)
    half, g, slice_, pair, group, t, column = range(len(front), tiles.ndim)
    words = _words(tiles.transpose(*front, slice_, pair, g, t, group, half, column))
    scales = _pad_rows(w.scales).reshape(*grid[:-1], 2, 8, grid[-1], 4)
    half, g, slice_, group = range(len(front), scales.ndim)
    scales = scales.transpose(*front, slice_, g, group, half)
    parts = (words.view(xp.uint8), xp.ascontiguousarray(scales).view(xp.uint8))
    records = xp.concatenate([p.reshape(*grid, -1) for p in parts], axis=-1)
    return replace(w, codes=records, scales=None, layout=LAYOUT)


def _words(nibbles: Array) -> Array:
    """E2M1 codes uint8 `[..., 8]` -> uint32 `[...]` as weight_formats.cuh unpacks them."""
    xp = array_namespace(nibbles)
    words = xp.zeros(nibbles.shape[:-1], xp.uint32)
    for p, places in enumerate(PAIR_BITS):
        for odd in range(2):
            code = nibbles[..., 2 * p + odd].astype(xp.uint32)
            for i, place in enumerate(places):
                words |= (code >> (3 - i) & 1) << ((place + 16 * odd) % 32)
    return words


def _pad_rows(a: Array) -> Array:
    xp = array_namespace(a)
    padding = -a.shape[-2] % ROWS
    if not padding:
        return a
    filler = xp.zeros((*a.shape[:-2], padding, a.shape[-1]), a.dtype)
    return xp.concatenate([a, filler], axis=-2)
