"""Parameters as the decode kernels read them: their layouts, and the zeros that fill them up.

These are the definitions, in array code; models/prepare.py makes some of them by a kernel.
"""

import math
from dataclasses import replace

import numpy as np

from npmoe.dtypes import Array, array_namespace
from npmoe.formats.fragments import (
    COLUMNS,
    RECORDS,
    ROWS,
    padded,
    to_fragments,
    with_row_scales,
)
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.models.parameters import ROUTER, TABLE, Parameter


def prepare_for_gpu(parameter: Parameter, w: QuantTensor) -> QuantTensor | Array:
    """A matrix in layout "rows", `[N, K]` or `[E, N, K]`, as the decode kernels read it: tables and
    routers as bf16 bits, others as fragments; expert gate and up rows alternate.
    Widths are filled up with zeros as `padded` has it, that of the hidden state, whether it is a
    matrix's rows or its columns, among them."""
    if parameter.part in (ROUTER, TABLE):
        return _pad_columns(w).codes
    w = with_row_scales(w)  # of blocks of rows nothing is left when rows move
    if alternates(parameter):
        w = _alternate(w)
    if adds_to_hidden(parameter):
        w = _pad_rows(w)
    return to_fragments(_pad_columns(w))


def prepare_vector(parameter: Parameter, v: Array) -> Array:
    """A vector float32 `[N]`, or one of each expert `[E, N]`, as the decode kernels read it beside
    such matrices: N is filled up like their columns, gate and up alternate like their rows."""
    if alternates(parameter):
        gate, up = np.split(v, 2, axis=-1)
        v = np.stack([_pad_last(gate), _pad_last(up)], axis=-1).reshape(*v.shape[:-1], -1)
    return _pad_last(v)


def prepared_bytes(parameter: Parameter, format_name: str) -> int:
    """Bytes of what `prepare_for_gpu` makes of a matrix in one of RECORDS' formats."""
    *lead, rows, columns = parameter.shape
    if parameter.part in (ROUTER, TABLE):
        return 2 * rows * padded(columns)
    rows = prepared_rows(parameter)
    tiles = math.prod(lead) * -(-rows // ROWS)
    return tiles * (padded(columns) // COLUMNS) * RECORDS[format_name].record_bytes


def prepared_rows(parameter: Parameter) -> int:
    """Rows of a matrix that is laid out as fragments, of an expert where it is stacked."""
    rows = parameter.shape[-2]
    if alternates(parameter):
        return 2 * padded(rows // 2)
    return padded(rows) if adds_to_hidden(parameter) else rows


def alternates(parameter: Parameter) -> bool:
    """Whether it is the experts' gate and up, whose rows alternate for the kernels."""
    return parameter.stacked and parameter.name.endswith(("gate_up_proj", "gate_up_bias"))


def adds_to_hidden(parameter: Parameter) -> bool:
    """Whether its rows are the hidden state's."""
    return parameter.name.endswith(("o_proj", "down_proj"))


def _alternate(w: QuantTensor) -> QuantTensor:
    """gate and up rows `[..., 2I, K]` as gate 0, up 0, gate 1, ...; I is padded with zero rows."""
    xp = array_namespace(w.codes)
    *lead, rows, columns = w.shape
    width = padded(rows // 2)

    def pair(a: Array) -> Array:
        halves = a.reshape(*lead, 2, rows // 2, a.shape[-1])
        out = xp.zeros((*lead, width, 2, a.shape[-1]), a.dtype)
        out[..., : rows // 2, :, :] = xp.swapaxes(halves, -2, -3)
        return out.reshape(*lead, 2 * width, a.shape[-1])

    changed = {name: pair(a) for name, a in w.arrays().items() if name != "global_scale"}
    if w.has_row_globals:
        halves = w.global_scale.reshape(*lead, 2, rows // 2)
        padding = xp.broadcast_to(halves[..., -1:], (*lead, 2, width - rows // 2))
        halves = xp.concatenate([halves, padding], axis=-1)
        changed["global_scale"] = xp.swapaxes(halves, -1, -2).reshape(*lead, 2 * width)
    return replace(w, shape=(*lead, 2 * width, columns), **changed)


def _pad_columns(w: QuantTensor) -> QuantTensor:
    """K padded, as `padded` has it, with zero codes and zero scales."""
    *lead, columns = w.shape
    target = padded(columns)
    if target == columns:
        return w
    widths = {"codes": w.codes.shape[-1] * target // columns}
    changed = {
        name: _widen(a, widths.get(name, target // w.block[1]))
        for name, a in w.arrays().items()
        if name != "global_scale"
    }
    return replace(w, shape=(*lead, target), **changed)


def _pad_rows(w: QuantTensor) -> QuantTensor:
    """Rows padded to as many as such columns would be, likewise."""
    xp = array_namespace(w.codes)
    *lead, rows, columns = w.shape
    target = padded(rows)
    if target == rows:
        return w
    changed = {
        name: xp.swapaxes(_widen(xp.swapaxes(a, -1, -2), target), -1, -2)
        for name, a in w.arrays().items()
        if name != "global_scale"
    }
    if w.has_row_globals:  # of the last rows: those of a tile must share one
        last = w.global_scale[..., rows - 2 + np.arange(target - rows) % 2]
        changed["global_scale"] = xp.concatenate([w.global_scale, last], axis=-1)
    return replace(w, shape=(*lead, target, columns), **changed)


def _widen(a: Array, width: int) -> Array:
    """The last axis filled up with zeros."""
    out = array_namespace(a).zeros((*a.shape[:-1], width), a.dtype)
    out[..., : a.shape[-1]] = a
    return out


def _pad_last(a: Array) -> Array:
    return _widen(a, padded(a.shape[-1]))
