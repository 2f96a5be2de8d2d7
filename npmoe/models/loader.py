"""Stored weights -> prepared weights: converted as the user asks, laid out for the device."""

import math
from contextlib import suppress
from typing import Any

from npmoe.config import WeightsPolicy, parse_weights
from npmoe.dtypes import SAFETENSORS_DTYPES, gigabytes
from npmoe.errors import OutOfMemory
from npmoe.formats.quant_tensor import CODES_PER_BYTE, QuantTensor, quantize, stack
from npmoe.models.gpu import GpuModel, prepare_for_gpu
from npmoe.models.layers import CausalLM
from npmoe.models.parameters import TABLE, VECTOR, Parameter
from npmoe.models.stored import OpenModel, listing, read_parameter, stored_arrays, stored_format
from npmoe.ops.linear import prepare_linear
from npmoe.runtime.device import free_memory, to_device
from npmoe.runtime.progress import progress, say


def convert_parameter(parameter: Parameter, w: QuantTensor, policy: WeightsPolicy) -> QuantTensor:
    """The matrix in the format that the policy asks for; one expert at a time is ever expanded.

    Raises ValueError, naming the parameter, where the format cannot hold it.
    """
    target = policy.get(parameter.part, w.format)
    if target == w.format:
        return w
    try:
        if parameter.stacked:
            experts = range(parameter.shape[0])
            return stack([quantize(w[e].dequantize(), target) for e in experts])
        return quantize(w.dequantize(), target)
    except ValueError as error:
        raise cannot_be(parameter, target, error) from None


def cannot_be(parameter: Parameter, target: str, error: ValueError) -> ValueError:
    """The error that names the matrix which a format cannot hold."""
    return ValueError(
        f"weights: {parameter.name} {list(parameter.shape)} cannot be {target}: {error}"
    )


def format_bytes(format_name: str, shape: tuple[int, ...]) -> int:
    """Stored bytes of a matrix `[..., N, K]` in a format, scales included.

    Raises ValueError where K is not a multiple of the format's group.
    """
    arrays = stored_arrays(format_name, shape).values()
    return sum(math.prod(shape) * SAFETENSORS_DTYPES[word].itemsize for word, shape in arrays)


def running_bytes(format_name: str, shape: tuple[int, ...]) -> float:
    """Bytes of a prepared matrix on the CPU, where 4-bit codes take a byte."""
    if format_name in CODES_PER_BYTE:
        return format_bytes(format_name, shape) + math.prod(shape) / 2
    return format_bytes(format_name, shape)


def load_model(
    opened: OpenModel, policy: WeightsPolicy, device: str, quiet: bool = False
) -> CausalLM | GpuModel:
    """Reads, converts and lays out every parameter; on a GPU, conversion and layout run there.

    Raises OutOfMemory before reading when the weights do not fit, and ValueError where a format
    cannot hold a matrix.
    """
    _check_memory(opened, policy, device)
    weights: dict[str, Any] = {}
    for parameter in progress(opened.parameters, "loading weights", quiet):
        w = read_parameter(opened, parameter)
        if parameter.part == VECTOR:
            w = to_device(w, device)
        else:
            w = w.map_arrays(lambda a: to_device(a, device))
            w = convert_parameter(parameter, w, policy)
            if device == "cuda":
                w = prepare_for_gpu(parameter, w)
            elif parameter.part != TABLE:
                w = prepare_linear(w)
        weights[parameter.name] = w
    extra = [n for n in opened.checkpoint.unused() if not n.endswith("inv_freq")]
    if extra:
        say(f"left out {listing(extra)}: no part of this model's forward pass", quiet)
    return GpuModel(opened.spec, weights) if device == "cuda" else CausalLM(opened.spec, weights)


def _check_memory(opened: OpenModel, policy: WeightsPolicy, device: str) -> None:
    needed, free = _needed_bytes(opened, policy, device), free_memory(device)
    if needed <= free:
        return
    hint = ""
    with suppress(ValueError):  # a matrix that fp4 cannot hold
        smaller = _needed_bytes(opened, parse_weights("fp4"), device)
        hint = f"; weights='fp4' would take {gigabytes(smaller)}" if smaller < needed else ""
    raise OutOfMemory(f"the weights need {gigabytes(needed)}, {gigabytes(free)} are free{hint}")


def _needed_bytes(opened: OpenModel, policy: WeightsPolicy, device: str) -> float:
    """Bytes of all prepared matrices; on the CPU the embedding stays in the mapped file."""
    measure = running_bytes if device == "cpu" else format_bytes
    needed = 0.0
    for parameter in opened.parameters:
        stored = stored_format(opened, parameter)
        if stored is None or (parameter.part == TABLE and device == "cpu"):
            continue
        target = policy.get(parameter.part, stored)
        try:
            needed += measure(target, parameter.shape)
        except ValueError as error:
            raise cannot_be(parameter, target, error) from None
    return needed
