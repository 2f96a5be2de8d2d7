"""A stored matrix on the device -> what the decode kernels read: quantised and re-laid out there.

The definition is `prepare_for_gpu(parameter, convert_parameter(parameter, w, ...))`; the kernel in
cuda_src/prepare.cu gives the same bits in one pass, for the formats it has.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from npmoe.dtypes import Array, array_namespace
from npmoe.formats.fragments import COLUMNS, LAYOUT, RECORD_BYTES, ROWS, padded
from npmoe.formats.quant_tensor import DEFAULT_GROUP_SIZE, QuantTensor
from npmoe.models.conversion import convert_parameter
from npmoe.models.kernel_layout import alternates, prepare_for_gpu, prepared_rows
from npmoe.models.parameters import ROUTER, TABLE, Parameter
from npmoe.models.stream import W_CODES
from npmoe.runtime.launch import launch
from npmoe.runtime.nvrtc import kernel

KERNELS = (("bf16", "bf16"), ("bf16", "fp4"), ("fp4", "fp4"))
"""Stored format and target of which cuda_src/prepare.cu has a version."""
WARPS = 4
PART_BYTES = 64 << 20
"""Float32 bytes that array code, for the other formats, expands at a time."""
NOT_FINITE, SCALE_TOO_LARGE = 1, 2
FLAG_WORDS = {
    NOT_FINITE: "it has values that are NaN or infinite",
    SCALE_TOO_LARGE: "a group needs a scale beyond float16",
}


def prepare_matrix(
    parameter: Parameter, w: QuantTensor, target: str, flags: Array
) -> QuantTensor | Array:
    """`w` in layout "rows" as new arrays in format `target`, laid out as `prepare_for_gpu` does it.

    flags: int32 `[1]` on the device, in which the kernel sets NOT_FINITE and SCALE_TOO_LARGE; array
    code raises ValueError instead.
    """
    if parameter.part in (ROUTER, TABLE):
        prepared = prepare_for_gpu(
            parameter, convert_parameter(parameter, w, {parameter.part: target})
        )
        assert not isinstance(prepared, QuantTensor)
        return prepared.copy()
    if has_kernel(w, target):
        return _prepare_cuda(parameter, w, target, flags)
    return _prepare_in_parts(parameter, w, target)


def has_kernel(w: QuantTensor, target: str) -> bool:
    """Whether cuda_src/prepare.cu can make `target` of `w`."""
    if "fp4" not in (w.format, target):
        return (w.format, target) in KERNELS and w.shape[-1] % 8 == 0
    fits = w.format != "fp4" or w.block == (1, DEFAULT_GROUP_SIZE["fp4"])
    return (w.format, target) in KERNELS and fits and w.shape[-1] % 32 == 0


def _prepare_cuda(parameter: Parameter, w: QuantTensor, target: str, flags: Array) -> QuantTensor:
    """Launches the kernel."""
    *lead, rows, columns = w.shape
    out_rows, paired = prepared_rows(parameter), alternates(parameter)
    tiles, slices = -(-out_rows // ROWS), padded(columns) // COLUMNS
    xp = array_namespace(w.codes)
    records = xp.empty((*lead, tiles, slices, RECORD_BYTES[target]), xp.uint8)
    macros = {"SOURCE": W_CODES[w.format], "W_FORMAT": W_CODES[target], "PAIRED": int(paired)}
    grid = (-(-slices // WARPS), tiles, math.prod(lead))
    arguments = (records, flags, w.codes, w.scales, rows, columns, slices)
    launch(kernel("prepare", "prepare", **macros), grid, 32 * WARPS, *arguments)
    block = (1, DEFAULT_GROUP_SIZE[target]) if target in DEFAULT_GROUP_SIZE else (1, 1)
    shape = (*lead, out_rows, slices * COLUMNS)
    return QuantTensor(target, shape, records, block=block, layout=LAYOUT)


def _prepare_in_parts(parameter: Parameter, w: QuantTensor, target: str) -> QuantTensor:
    """By array code, a few experts or rows at a time, so that what it expands stays small."""
    policy = {parameter.part: target}
    done = []
    for part in _parts(parameter, w, target):
        prepared = prepare_for_gpu(parameter, convert_parameter(parameter, part, policy))
        assert isinstance(prepared, QuantTensor)
        done.append(prepared)
    xp = array_namespace(w.codes)
    arrays = {
        name: xp.concatenate([getattr(p, name) for p in done])
        if getattr(done[0], name).ndim
        else getattr(done[0], name).copy()
        for name in done[0].arrays()
    }
    return replace(done[0], shape=(*_lead(parameter, w, done), *done[0].shape[-1:]), **arrays)


def _lead(parameter: Parameter, w: QuantTensor, done: list[QuantTensor]) -> tuple[int, ...]:
    """All but the last of the joined parts' shape."""
    if parameter.stacked:
        return (w.shape[0], done[0].shape[-2])
    return (sum(p.shape[-2] for p in done),)


def _parts(parameter: Parameter, w: QuantTensor, target: str) -> Iterator[QuantTensor]:
    """`w` along its first axis. A matrix whose rows share a scale, or will, or are filled up, stays
    whole."""
    each = 4 * math.prod(w.shape[1:])
    count = max(1, PART_BYTES // each)
    if not parameter.stacked:
        count = max(1, count // ROWS) * ROWS
        is_filled_up = prepared_rows(parameter) != w.shape[0]
        if is_filled_up or w.block[0] > 1 or "nvfp4" in (w.format, target):
            count = w.shape[0]
    if count >= w.shape[0]:
        yield w
        return
    for start in range(0, w.shape[0], count):
        place = slice(start, min(start + count, w.shape[0]))
        part = w.map_arrays(lambda a, place=place: a[place])
        yield replace(part, shape=(place.stop - start, *w.shape[1:]))
