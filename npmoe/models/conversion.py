"""What a weights policy makes of the stored matrices: the format of each, and its bytes."""

import math

from npmoe.config import WeightsPolicy
from npmoe.dtypes import SAFETENSORS_DTYPES
from npmoe.errors import UnsupportedModel
from npmoe.formats.fragments import RECORDS
from npmoe.formats.quant_tensor import CODES_PER_BYTE, QuantTensor, quantize, stack
from npmoe.models.own_layout import stored_arrays
from npmoe.models.parameters import ROUTER, TABLE, VECTOR, Parameter
from npmoe.models.stored import MIXED, OpenModel, Storage, stored_formats

EXACT = ("fp32", "bf16", "fp16")


def chosen_formats(opened: OpenModel, policy: WeightsPolicy) -> dict[str, str]:
    """Part -> the format that the policy gives it, for every part that the model has.

    A part whose own tensors differ in type is fp32 where the policy is silent, which holds them
    all. Raises UnsupportedModel where a part that is quantised already would change its format:
    that would lose twice, except in fp32, which holds every value. Raises ValueError where a format
    cannot hold a matrix.
    """
    formats = {}
    for part, found in stored_formats(opened).items():
        formats[part] = policy.get(part, "fp32" if found == MIXED else found)
    for parameter in opened.parameters:
        if parameter.part != VECTOR:
            _check_change(opened, parameter, policy)
            storage = opened.storages[parameter.name]
            if formats[parameter.part] != storage.format or storage.words is None:
                _check_shape(parameter, formats[parameter.part])
    return formats


def _check_change(opened: OpenModel, parameter: Parameter, policy: WeightsPolicy) -> None:
    part, stored = parameter.part, opened.storages[parameter.name].format
    target = policy.get(part, stored)
    if stored not in EXACT and target not in (stored, "fp32"):
        raise UnsupportedModel(
            f"{opened.checkpoint.folder}: {part} is {stored} already; making it {target} would "
            f"lose twice. Take the original checkpoint, or leave {part} as it is."
        )


def _check_shape(parameter: Parameter, format_name: str) -> None:
    try:
        format_bytes(format_name, parameter.shape)
    except ValueError as error:
        raise cannot_be(parameter, format_name, error) from None


def loaded_formats(opened: OpenModel, policy: WeightsPolicy, device: str) -> dict[str, str]:
    """Matrix -> the format in which it runs: the policy's, else the one it is stored in.

    In a checkpoint that others quantised, what no GPU kernel reads is bf16 on a GPU. Raises as
    `chosen_formats` does.
    """
    chosen_formats(opened, policy)
    formats = {}
    for p in opened.parameters:
        if p.part == VECTOR:
            continue
        storage = opened.storages[p.name]
        stored = storage.format
        if device == "cuda" and opened.quantization is not None and not _has_kernel(p, storage):
            stored = "bf16"
        formats[p.name] = policy.get(p.part, stored)
    return formats


def _has_kernel(parameter: Parameter, storage: Storage) -> bool:
    """Whether a GPU's kernels read a matrix in its own format and groups."""
    if parameter.part in (ROUTER, TABLE):
        return storage.format == "bf16"
    if storage.format not in RECORDS:
        return False
    width = RECORDS[storage.format].scale_columns
    return (
        not storage.group
        or not width
        or storage.group % width == 0
        or storage.group >= parameter.shape[-1]
    )


def part_formats(opened: OpenModel, formats: dict[str, str]) -> dict[str, str]:
    """Part -> the format of its matrices by `formats`; where they differ, one that no GPU kernel
    reads, if there is one."""
    found: dict[str, str] = {}
    for p in opened.parameters:
        if p.part != VECTOR and (p.part not in found or formats[p.name] not in RECORDS):
            found[p.part] = formats[p.name]
    return found


def conversions(opened: OpenModel, policy: WeightsPolicy, formats: dict[str, str]) -> list[str]:
    """A line for each kind of stored matrix that runs in another format than it has, and not
    because the policy says so."""
    lines: dict[str, None] = {}
    for p in opened.parameters:
        if p.part == VECTOR or p.part in policy:
            continue
        storage, target = opened.storages[p.name], formats[p.name]
        if target != storage.format or (storage.words and storage.format in EXACT):
            what = storage.words or storage.format
            lines[f"{p.part}: {what} has no equal here, converted to {target}"] = None
    return list(lines)


def convert_parameter(parameter: Parameter, w: QuantTensor, policy: WeightsPolicy) -> QuantTensor:
    """The matrix in the format that the policy asks for; one expert at a time is ever expanded.

    `w` may hold some of the experts only. Raises ValueError, naming the parameter, where the format
    cannot hold it.
    """
    target = policy.get(parameter.part, w.format)
    if target == w.format:
        return w
    try:
        if parameter.stacked:
            return stack([quantize(w[e].dequantize(), target) for e in range(w.shape[0])])
        return quantize(w.dequantize(), target)
    except ValueError as error:
        raise cannot_be(parameter, target, error) from None


def cannot_be(parameter: Parameter, target: str, error: ValueError | str) -> ValueError:
    """The error that names the matrix which a format cannot hold."""
    return ValueError(
        f"weights: {parameter.name} {list(parameter.shape)} cannot be {target}: {error}"
    )


def format_bytes(format_name: str, shape: tuple[int, ...], group: int | None = None) -> int:
    """Stored bytes of a matrix `[..., N, K]` in a format, scales included.

    group: columns under one scale, None for the format's own. Raises ValueError where K is not a
    multiple of the format's group.
    """
    if group is None or format_name in EXACT:
        arrays = stored_arrays(format_name, shape).values()
        return sum(math.prod(shape) * SAFETENSORS_DTYPES[word].itemsize for word, shape in arrays)
    *lead, columns = shape
    scale_bytes = {"fp8": 4, "mxfp4": 1, "nvfp4": 1, "int4_asym": 3}.get(format_name, 2)
    scales = math.prod(lead) * -(-columns // group)
    of_rows = 4 * math.prod(lead) if format_name == "nvfp4" else 0
    codes = math.prod(shape) // CODES_PER_BYTE.get(format_name, 1)
    return codes + scales * scale_bytes + of_rows


def running_bytes(format_name: str, shape: tuple[int, ...], group: int | None = None) -> float:
    """Bytes of a prepared matrix on the CPU, where 4-bit codes take a byte."""
    size = format_bytes(format_name, shape, group)
    if format_name == "int4_asym" and group is not None:  # zero points are in the codes
        size -= math.prod(shape[:-1]) * -(-shape[-1] // group)
    return size + (math.prod(shape) / 2 if format_name in CODES_PER_BYTE else 0)


def group_as(storage: Storage, format_name: str) -> int | None:
    """The group of a stored matrix in a format: its own where it keeps its format."""
    return storage.group if storage.format == format_name else None
