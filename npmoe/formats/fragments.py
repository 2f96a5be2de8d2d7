"""The layout in which the decode kernels read weights; cuda_src/gemv.cuh defines it.

Records of 8 rows x 128 columns, `[..., N / 8, K / 128, record bytes]`: lane 4 g + t of a warp finds
the codes of row g there, of every group of 32 columns the 8 from 8 t on, in one 16-byte load.
"""

from dataclasses import replace

from npmoe.dtypes import Array, array_namespace
from npmoe.formats.groups import unpack_nibbles
from npmoe.formats.quant_tensor import QuantTensor

LAYOUT = "fragments"
ROWS, COLUMNS = 8, 128
RECORD_BYTES = {"bf16": 2048, "fp4": 576}
PAIR_SHIFTS = ((15, 9), (12, 6), (14, 3), (13, 0))
"""Where the sign bit and the lowest magnitude bit of pair 0 to 3 lie in a word's half."""


def to_fragments(w: QuantTensor) -> QuantTensor:
    """A weight in "rows" layout, `[..., N, K]`, as records; N is padded to 8 with zeros.

    Raises ValueError for a format without kernels and for K not a multiple of 128.
    """
    if w.format not in RECORD_BYTES:
        raise ValueError(f"no decode kernel reads {w.format}; there are {', '.join(RECORD_BYTES)}")
    *lead, rows, columns = w.shape
    if columns % COLUMNS:
        raise ValueError(f"decode kernels need columns in multiples of {COLUMNS}, not {columns}")
    grid = (*lead, -(-rows // ROWS), columns // COLUMNS)
    codes = w.codes if w.format == "bf16" else unpack_nibbles(w.codes)
    # [..., tile, row 8, slice, group 4, t 4, column 8]
    tiles = _pad_rows(codes).reshape(*lead, grid[-2], ROWS, grid[-1], 4, 4, 8)
    row, slice_, group, t, column = (tiles.ndim - 5 + i for i in range(5))
    front = tuple(range(tiles.ndim - 5))
    if w.format == "bf16":
        order = tiles.transpose(*front, slice_, group, row, t, column)
        xp = array_namespace(order)
        records = xp.ascontiguousarray(order).view(xp.uint8).reshape(*grid, RECORD_BYTES["bf16"])
    else:
        order = tiles.transpose(*front, slice_, row, t, group, column)
        records = _fp4_records(order, w.scales, grid)
    return replace(w, codes=records, scales=None, layout=LAYOUT)


def _pad_rows(a: Array) -> Array:
    xp = array_namespace(a)
    padding = -a.shape[-2] % ROWS
    if not padding:
        return a
    filler = xp.zeros((*a.shape[:-2], padding, a.shape[-1]), a.dtype)
    return xp.concatenate([a, filler], axis=-2)


def _fp4_records(nibbles: Array, scales: Array, grid: tuple[int, ...]) -> Array:
    """nibbles uint8 `[..., slice, row, t, group, 8]`, scales fp16 `[..., N, K / 32]`."""
    xp = array_namespace(nibbles)
    pairs = nibbles.reshape(*nibbles.shape[:-1], 4, 2).astype(xp.uint32)
    words = xp.zeros(pairs.shape[:-2], xp.uint32)
    for p, (sign, magnitude) in enumerate(PAIR_SHIFTS):
        for half in range(2):
            code = pairs[..., p, half]
            placed = (code >> 3) << sign | (code & 7) << magnitude
            words |= placed << (16 * half)
    codes = words.view(xp.uint8).reshape(*grid, 512)
    # [..., tile, t 4, row of pair 2, slice, group 4] -> [..., tile, slice, t, group, row of pair]
    s = _pad_rows(scales).reshape(*grid[:-1], 4, 2, grid[-1], 4)
    front = tuple(range(len(grid) - 1))
    n = len(front)
    s = s.transpose(*front, n + 2, n, n + 3, n + 1)
    s = xp.ascontiguousarray(s).view(xp.uint8).reshape(*grid, 64)
    return xp.concatenate([codes, s], axis=-1)
