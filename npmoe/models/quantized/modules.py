"""The tensors of one quantised module in a checkpoint, checked and read."""

from collections.abc import Iterator

from npmoe.checkpoint import Checkpoint
from npmoe.errors import CheckpointError
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.models.quantized.config import Quantization
from npmoe.models.quantized.scheme import FindShape, Scheme, Shape

WEIGHT = ".weight"


def scheme_of(quantization: Quantization, checkpoint: Checkpoint, name: str) -> Scheme | None:
    """How the matrix that a plain checkpoint calls `name` is quantised; None where it is not."""
    if not name.endswith(WEIGHT):
        return None
    module = name.removesuffix(WEIGHT)
    return quantization.scheme(module, _finder(checkpoint, module))


def module_tensors(
    scheme: Scheme, checkpoint: Checkpoint, name: str, shape: Shape
) -> Iterator[tuple[str, Shape, tuple[str, ...]]]:
    """Names, shapes and legal dtype words of the tensors that hold a matrix of that shape.

    Raises CheckpointError where the scheme cannot hold it.
    """
    module = name.removesuffix(WEIGHT)
    rows, columns = shape
    try:
        tensors = scheme.tensors(rows, columns, _finder(checkpoint, module))
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint.folder}: {module} cannot be {scheme.words}: {error}"
        ) from None
    for suffix, expected, words in tensors:
        yield f"{module}.{suffix}", expected, words


def read_module(scheme: Scheme, checkpoint: Checkpoint, name: str, shape: Shape) -> QuantTensor:
    """The matrix. Raises CheckpointError where its values contradict the config."""
    prefix = name.removesuffix("weight")
    names = [n for n, *_ in module_tensors(scheme, checkpoint, name, shape)]
    rows, columns = shape
    try:
        arrays = {n.removeprefix(prefix): checkpoint.get(n) for n in names}
        return scheme.read(arrays, rows, columns)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.folder}: {prefix.rstrip('.')}: {error}") from None


def _finder(checkpoint: Checkpoint, module: str) -> FindShape:
    def find(suffix: str) -> Shape | None:
        info = checkpoint.tensors.get(f"{module}.{suffix}")
        return None if info is None else info.shape

    return find
