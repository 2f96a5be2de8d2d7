"""A checkpoint's parameters to the GPU: streamed as they are stored, prepared there.

Of what is not a weight of the model, the device holds one stored parameter at a time and the host
some pinned buffers.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npmoe.dtypes import SAFETENSORS_DTYPES, Array, gigabytes
from npmoe.formats.quant_tensor import DEFAULT_GROUP_SIZE, QuantTensor
from npmoe.models.conversion import cannot_be, format_bytes
from npmoe.models.kernel_layout import prepare_vector
from npmoe.models.own_layout import stored_arrays
from npmoe.models.parameters import VECTOR, Parameter
from npmoe.models.prepare import FLAG_WORDS, prepare_matrix
from npmoe.models.stored import OpenModel, expected_tensors, read_parameter
from npmoe.runtime.device import cupy, free_cached_memory, to_device
from npmoe.runtime.progress import progress, say
from npmoe.runtime.transfer import ALIGNMENT, BUFFER_BYTES, Piece, Uploader, array_piece

MOST_ARRAYS = 4  # of a QuantTensor


def staging_bytes(opened: OpenModel) -> int:
    """Device bytes of the largest stored matrix: what loading needs beside the weights."""
    matrices = [p for p in opened.parameters if p.part != VECTOR]
    return max((_most_bytes(opened, p) for p in matrices), default=0) + MOST_ARRAYS * ALIGNMENT


def _most_bytes(opened: OpenModel, parameter: Parameter) -> int:
    """At least the bytes of the stored matrix: scales of others may turn out to need float32."""
    storage = opened.storages[parameter.name]
    size = format_bytes(storage.format, parameter.shape, storage.group)
    if storage.group is None or not storage.format.startswith("int"):
        return size
    return size + 2 * math.prod(parameter.shape[:-1]) * -(-parameter.shape[-1] // storage.group)


def load_on_gpu(
    opened: OpenModel,
    formats: dict[str, str],
    quiet: bool = False,
    buffer_bytes: int = BUFFER_BYTES,
) -> dict[str, Any]:
    """Parameter name -> float32 vector or prepared matrix, all on the device.

    formats: matrix -> its format when prepared (`loaded_formats`). buffer_bytes: of one pinned
    buffer. Says the rate at the end. Raises ValueError, naming the parameter, where a format cannot
    hold a matrix.
    """
    started = time.perf_counter()
    weights, num_bytes = _stream(opened, formats, quiet, buffer_bytes)
    free_cached_memory()
    seconds = time.perf_counter() - started
    rate = num_bytes / 1e9 / seconds
    say(f"{gigabytes(num_bytes)} of weights in {seconds:.1f} s, {rate:.1f} GB/s", quiet)
    return weights


def _stream(
    opened: OpenModel, formats: dict[str, str], quiet: bool, buffer_bytes: int
) -> tuple[dict[str, Any], int]:
    """The prepared parameters, and how many bytes were uploaded for them."""
    weights: dict[str, Any] = {}
    matrices = [p for p in opened.parameters if p.part != VECTOR]
    uploader = Uploader(staging_bytes(opened), buffer_bytes)
    with uploader.stream:
        flags = cupy().zeros(len(matrices), np.int32)
    arriving = uploader.uploads(_jobs(opened, matrices, formats, quiet))
    for parameter in progress(opened.parameters, "loading weights", quiet):
        if parameter.part == VECTOR:
            vector = prepare_vector(parameter, read_parameter(opened, parameter))
            weights[parameter.name] = to_device(vector, "cuda")
            continue
        job, arrays = next(arriving)
        assert job.parameter is parameter
        flag = flags[job.number : job.number + 1]
        with uploader.stream:
            w = job.tensor(arrays)
            weights[parameter.name] = prepare_matrix(parameter, w, formats[parameter.name], flag)
    list(arriving)  # ends it: everything is on the device
    _check_flags(matrices, formats, flags)
    return weights, uploader.num_bytes


@dataclass(frozen=True)
class _Job:
    """A matrix on its way: its QuantTensor without arrays, and dtype and shape of each of them."""

    number: int
    parameter: Parameter
    empty: QuantTensor
    fields: dict[str, tuple[np.dtype, tuple[int, ...]]]

    def tensor(self, arrays: list[Array]) -> QuantTensor:
        """The matrix, from the bytes of its fields."""
        typed = {
            name: a.view(dtype).reshape(shape)
            for (name, (dtype, shape)), a in zip(self.fields.items(), arrays, strict=True)
        }
        return replace(self.empty, **typed)


def _jobs(
    opened: OpenModel, matrices: list[Parameter], formats: dict[str, str], quiet: bool
) -> Iterator[tuple[_Job, list[list[Piece]]]]:
    for number, parameter in enumerate(matrices):
        pieces = _pieces(opened, parameter)
        if pieces is not None:
            yield _stored_job(opened, number, parameter), pieces
            continue
        w = read_parameter(opened, parameter)
        rounds = w.format.startswith("int4") and formats[parameter.name] == w.format
        if rounds and w.scales.dtype == np.float32:
            say(f"{parameter.name}: fp16 cannot hold its scales exactly, rounded", quiet)
        arrays = w.arrays()
        fields = {name: (a.dtype, a.shape) for name, a in arrays.items()}
        job = _Job(number, parameter, w.map_arrays(lambda a: None), fields)
        yield job, [[array_piece(a)] for a in arrays.values()]


def _stored_job(opened: OpenModel, number: int, parameter: Parameter) -> _Job:
    """Of a matrix whose arrays are in the files as they are."""
    format_name = opened.storages[parameter.name].format
    stored = stored_arrays(format_name, parameter.shape)
    fields = {name: (_array_dtype(name, word), shape) for name, (word, shape) in stored.items()}
    columns = parameter.shape[-1]
    group = DEFAULT_GROUP_SIZE.get(format_name, columns) if "scales" in fields else 1
    empty = QuantTensor(format_name, parameter.shape, None, block=(1, group))
    return _Job(number, parameter, empty, fields)


def _array_dtype(field: str, word: str) -> np.dtype:
    """bf16 and fp16 codes are uint16 in a QuantTensor."""
    bits = field == "codes" and word in ("BF16", "F16")
    return np.dtype(np.uint16) if bits else SAFETENSORS_DTYPES[word]


def _pieces(opened: OpenModel, parameter: Parameter) -> list[list[Piece]] | None:
    """The bytes of each array, tensors in the files; None for what the host has to put together."""
    checkpoint = opened.checkpoint
    names = [name for name, *_ in expected_tensors(opened, parameter)]
    if opened.own_formats is not None:
        return [[checkpoint.piece(name)] for name in names]
    if _is_in_order(opened, parameter, names):
        return [[checkpoint.piece(name) for name in names]]
    return None


def _is_in_order(opened: OpenModel, parameter: Parameter, names: list[str]) -> bool:
    """Whether the parameter's bytes are those of its tensors, one after the other."""
    storage = opened.storages[parameter.name]
    if parameter.fused_layout != "rows" or parameter.interleaved or storage.words:
        return False
    tensors = opened.checkpoint.tensors
    sizes = sum(tensors[name].stop - tensors[name].start for name in names)
    same_type = len({tensors[name].dtype for name in names}) == 1
    return same_type and sizes == format_bytes(storage.format, parameter.shape)


def _check_flags(matrices: list[Parameter], formats: dict[str, str], flags: Array) -> None:
    for parameter, flag in zip(matrices, flags.get(), strict=True):
        for bit, words in FLAG_WORDS.items():
            if flag & bit:
                raise cannot_be(parameter, formats[parameter.name], words)
