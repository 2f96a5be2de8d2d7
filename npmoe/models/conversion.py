"""What a weights policy makes of the stored matrices: the format of each, and its bytes."""

import math

from npmoe.config import WeightsPolicy
from npmoe.dtypes import SAFETENSORS_DTYPES
from npmoe.errors import UnsupportedModel
from npmoe.formats.quant_tensor import CODES_PER_BYTE, QuantTensor, quantize, stack
from npmoe.models.parameters import VECTOR, Parameter
from npmoe.models.stored import MIXED, OpenModel, stored_arrays, stored_formats

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
        stored = "fp32" if found == MIXED else found
        formats[part] = policy.get(part, stored)
        if stored not in EXACT and formats[part] not in (stored, "fp32"):
            raise UnsupportedModel(
                f"{opened.checkpoint.folder}: {part} is {stored} already; making it "
                f"{formats[part]} would lose twice. Take the original checkpoint, or leave {part} "
                "as it is."
            )
    for parameter in opened.parameters:
        if parameter.part != VECTOR:
            try:
                format_bytes(formats[parameter.part], parameter.shape)
            except ValueError as error:
                raise cannot_be(parameter, formats[parameter.part], error) from None
    return formats


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
