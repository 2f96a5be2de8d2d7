"""What a checkpoint holds: checked by name and shape from its headers, then read tensor by tensor.

Hugging Face's layout has one tensor per projection and expert, or several where it is quantised
(`quantized`); ours is `own_layout`.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from npmoe.checkpoint import Checkpoint
from npmoe.config import ModelConfig
from npmoe.errors import CheckpointError, UnsupportedModel
from npmoe.formats.quant_tensor import (
    DEFAULT_GROUP_SIZE,
    QuantTensor,
    concatenate_rows,
    quantize,
    stack,
)
from npmoe.models.families import read_model
from npmoe.models.own_layout import (
    NATIVE_WORDS,
    QUANT_METHOD,
    read_own_formats,
    shares_table,
    stored_arrays,
)
from npmoe.models.parameters import VECTOR, Parameter
from npmoe.models.quantized.config import Quantization, read_quantization
from npmoe.models.quantized.modules import module_tensors, read_module, scheme_of
from npmoe.models.quantized.scheme import Scheme
from npmoe.models.specs import ModelSpec

MIXED = "mixed"
_NATIVE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
FLOAT_WORDS = tuple(NATIVE_WORDS)
MXFP4_GROUP = DEFAULT_GROUP_SIZE["mxfp4"]


class Storage(NamedTuple):
    """How a checkpoint holds a matrix.

    format: of its QuantTensor; fp32, which holds them all, where its tensors differ. group: columns
    under one scale, None for the format's own. words: what others call it, where they quantised it.
    """

    format: str
    group: int | None = None
    words: str | None = None


@dataclass(frozen=True)
class OpenModel:
    """A checkpoint whose headers were read and checked; no weight has been touched yet.

    own_formats: part -> format where `npmoe convert` wrote it, None for Hugging Face's layout.
    quantization: how others quantised it, None where they did not. schemes: by tensor name, found
    so far. storages: by parameter name, of the matrices.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    spec: ModelSpec
    parameters: list[Parameter]
    own_formats: dict[str, str] | None
    quantization: Quantization | None = None
    schemes: dict[str, Scheme | None] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)


def open_model(path: str | os.PathLike, ignored: tuple[str, ...] = ()) -> OpenModel:
    """Reads config and headers and checks that every tensor is there, fits, and is used.

    Raises CheckpointError and UnsupportedModel.
    """
    checkpoint = Checkpoint(path)
    raw = dict(checkpoint.config)
    stated = raw.get("quantization_config")
    method = stated.get("quant_method") if isinstance(stated, dict) else None
    own_formats = quantization = None
    if method == QUANT_METHOD:
        own_formats = read_own_formats(checkpoint, raw.pop("quantization_config"))
    elif method != "mxfp4" and "quantization_config" not in ignored:  # its family reads mxfp4
        quantization = read_quantization(stated, checkpoint.folder)
        raw.pop("quantization_config", None)
    where = str(checkpoint.folder / "config.json")
    config, spec, parameters = read_model(raw, where, ignored)
    if spec.tied and _has_own_head(checkpoint, parameters[0]):
        raw["tie_word_embeddings"] = False
        config, spec, parameters = read_model(raw, where, ignored)
    opened = OpenModel(checkpoint, config, spec, parameters, own_formats, quantization)
    _check_tensors(opened)
    for parameter in parameters:
        if parameter.part != VECTOR:
            opened.storages[parameter.name] = _storage(opened, parameter)
    return opened


def _has_own_head(checkpoint: Checkpoint, embedding: Parameter) -> bool:
    """Whether a head that the config calls tied is there with other values; it counts then."""
    head, table = "lm_head.weight", embedding.sources[0][0]
    if head not in checkpoint or table not in checkpoint:
        return False
    return not np.array_equal(checkpoint.get(head), checkpoint.get(table))


def _check_tensors(opened: OpenModel) -> None:
    checkpoint = opened.checkpoint
    missing = []
    for parameter in opened.parameters:
        for name, shape, words in expected_tensors(opened, parameter):
            if name not in checkpoint:
                missing.append(name)
                continue
            checkpoint.mark_used(name)
            if checkpoint.shape(name) != shape:
                raise CheckpointError(
                    f"{checkpoint.folder}: tensor {name!r} has shape "
                    f"{list(checkpoint.shape(name))}, the config asks for {list(shape)}"
                )
            word = checkpoint.tensors[name].dtype
            if word not in words:
                raise UnsupportedModel(
                    f"{checkpoint.folder}: tensor {name!r} has dtype {word}; it is read as "
                    f"{' or '.join(words)}"
                )
    if missing:
        raise CheckpointError(f"{checkpoint.folder}: {listing(missing)} missing")
    unused = [name for name in checkpoint.unused() if not _may_be_left(opened, name)]
    if unused:
        raise CheckpointError(
            f"{checkpoint.folder}: {listing(unused)} not used by model_type "
            f"{opened.config.model_type!r} with this config; the checkpoint and its config.json "
            "do not belong together"
        )


def listing(names: list[str]) -> str:
    """Tensor names for a message, the first three."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' * (len(names) > 1)} {', '.join(map(repr, names[:3]))}{more}"


def _may_be_left(opened: OpenModel, name: str) -> bool:
    """Tensors that are no part of the computation: buffers, a tied head, layers past the last and
    other multi-token prediction."""
    if name.endswith("rotary_emb.inv_freq") or (opened.spec.tied and name == "lm_head.weight"):
        return True
    if name.startswith(opened.spec.left_out):
        return True
    if opened.quantization is not None and opened.quantization.may_stay_unread(name):
        return True
    parts = name.split(".")
    if name.startswith(("mtp.", "model.mtp_")):
        return True
    is_layer = parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdigit()
    return is_layer and int(parts[2]) >= opened.config.num_hidden_layers


def expected_tensors(
    opened: OpenModel, parameter: Parameter
) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """Names, shapes and legal dtype words of the checkpoint tensors behind a parameter."""
    if opened.own_formats is not None:
        if parameter.part == VECTOR:
            yield parameter.name, parameter.shape, ("F32",)
            return
        format_name = _own_format(opened, parameter)
        name = _stored_name(opened, parameter)
        for field, (word, shape) in _fields(opened, parameter, format_name).items():
            yield f"{name}.{field}", shape, (word,)
        return
    if _is_fused(opened, parameter):
        yield from _fused_tensors(parameter)
    elif parameter.stored_shape is not None:
        yield parameter.sources[0][0], parameter.stored_shape, FLOAT_WORDS
    else:
        for group in parameter.sources:
            for name, rows in zip(group, parameter.rows, strict=True):
                yield from _source_tensors(opened, parameter, name, rows)


def _source_tensors(
    opened: OpenModel, parameter: Parameter, name: str, rows: int
) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """The tensors behind one source of Hugging Face's layout: itself, or those of its scheme."""
    scheme = _scheme(opened, parameter, name)
    shape = (rows, *parameter.shape[2 if parameter.stacked else 1 :])
    if scheme is None:
        yield name, shape, FLOAT_WORDS
    else:
        yield from module_tensors(scheme, opened.checkpoint, name, shape)


def _scheme(opened: OpenModel, parameter: Parameter, name: str) -> Scheme | None:
    if opened.quantization is None or parameter.part == VECTOR:
        return None
    if name not in opened.schemes:
        opened.schemes[name] = scheme_of(opened.quantization, opened.checkpoint, name)
    return opened.schemes[name]


def _is_fused(opened: OpenModel, parameter: Parameter) -> bool:
    if parameter.fused is None:
        return False
    return not parameter.sources or parameter.fused in opened.checkpoint


def _fused_tensors(
    parameter: Parameter,
) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    *lead, rows, columns = parameter.shape
    assert parameter.fused is not None
    if parameter.fused_layout == "mxfp4":
        groups = (*lead, rows, columns // MXFP4_GROUP)
        yield f"{parameter.fused}_blocks", (*groups, MXFP4_GROUP // 2), ("U8",)
        yield f"{parameter.fused}_scales", groups, ("U8",)
    elif parameter.fused_layout == "columns":
        yield parameter.fused, (*lead, columns, rows), FLOAT_WORDS
    else:
        yield parameter.fused, parameter.shape, FLOAT_WORDS


def stored_format(opened: OpenModel, parameter: Parameter) -> str | None:
    """The format that `read_parameter` gives a matrix; None for vectors.

    fp32 where its tensors differ in type, since fp32 holds them all.
    """
    return None if parameter.part == VECTOR else opened.storages[parameter.name].format


def _storage(opened: OpenModel, parameter: Parameter) -> Storage:
    if opened.own_formats is not None:
        return Storage(_own_format(opened, parameter))
    if parameter.fused_layout == "mxfp4":
        return Storage("mxfp4")
    if opened.quantization is None or _is_fused(opened, parameter):
        return Storage(_float_format(opened, [n for n, *_ in expected_tensors(opened, parameter)]))
    columns, found = parameter.shape[-1], set()
    for name in (name for group in parameter.sources for name in group):
        scheme = _scheme(opened, parameter, name)
        if scheme is None:
            found.add(Storage(_float_format(opened, [name])))
        else:
            found.add(Storage(scheme.format, scheme.group(columns), scheme.words))
    if len(found) == 1:
        return found.pop()
    words = " and ".join(sorted({s.words or s.format for s in found}))
    quantised = any(s.words for s in found)
    kinds = {(s.format, s.group) for s in found}
    format_name, group = kinds.pop() if len(kinds) == 1 else ("fp32", None)
    return Storage(format_name, group, words if quantised else None)


def _own_format(opened: OpenModel, parameter: Parameter) -> str:
    assert opened.own_formats is not None
    if parameter.part not in opened.own_formats:
        raise CheckpointError(
            f"{opened.checkpoint.folder}: quantization_config names no format for "
            f"{parameter.part!r}"
        )
    return opened.own_formats[parameter.part]


def _float_format(opened: OpenModel, names: list[str]) -> str:
    words = {opened.checkpoint.tensors[name].dtype for name in names}
    return NATIVE_WORDS[words.pop()] if len(words) == 1 else "fp32"


def stored_formats(opened: OpenModel) -> dict[str, str]:
    """Part -> the format in which the checkpoint holds its matrices; "mixed" where they differ."""
    found: dict[str, str] = {}
    for parameter in opened.parameters:
        name = stored_format(opened, parameter)
        if name is not None and found.setdefault(parameter.part, name) != name:
            found[parameter.part] = MIXED
    return found


def stored_words(opened: OpenModel) -> dict[str, str]:
    """Part -> formats of its matrices, for people: what others call them too."""
    found: dict[str, set[str]] = {}
    for parameter in opened.parameters:
        if parameter.part != VECTOR:
            storage = opened.storages[parameter.name]
            words = f" ({storage.words})" if storage.words else ""
            found.setdefault(parameter.part, set()).add(storage.format + words)
    return {part: " and ".join(sorted(words)) for part, words in found.items()}


def _stored_name(opened: OpenModel, parameter: Parameter) -> str:
    assert opened.own_formats is not None
    shared = shares_table(parameter, opened.spec.tied, opened.own_formats)
    return "embed_tokens" if shared else parameter.name


def _fields(
    opened: OpenModel, parameter: Parameter, format_name: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    try:
        return stored_arrays(format_name, parameter.shape)
    except ValueError as error:
        raise CheckpointError(
            f"{opened.checkpoint.folder}: {parameter.name} cannot be {format_name}: {error}"
        ) from None


def read_parameter(opened: OpenModel, parameter: Parameter) -> Any:
    """A vector as float32, a matrix as QuantTensor in the format that the checkpoint has."""
    get = opened.checkpoint.get
    if opened.own_formats is not None and parameter.part == VECTOR:
        return np.asarray(get(parameter.name), np.float32)
    if opened.own_formats is not None:
        name = _own_format(opened, parameter)
        stored = _stored_name(opened, parameter)
        fields = _fields(opened, parameter, name)
        arrays: dict[str, Any] = {f: get(f"{stored}.{f}") for f in fields}
        if name in ("bf16", "fp16"):
            arrays["codes"] = arrays["codes"].view(np.uint16)
        group = DEFAULT_GROUP_SIZE.get(name, parameter.shape[-1]) if "scales" in arrays else 1
        w = QuantTensor(name, parameter.shape, arrays.pop("codes"), block=(1, group))
        return replace(w, **arrays)
    if _is_fused(opened, parameter):
        return _read_fused(opened, parameter)
    if parameter.part == VECTOR:
        rows = [np.asarray(get(name), np.float32) for name in parameter.sources[0]]
        return np.concatenate(rows, axis=None) + np.float32(parameter.offset)
    target = stored_format(opened, parameter)
    assert target is not None
    groups = []
    for names in parameter.sources:
        parts = [
            _read_source(opened, parameter, name, rows)
            for name, rows in zip(names, parameter.rows, strict=True)
        ]
        parts = [p if p.format == target else quantize(p.dequantize(), target) for p in parts]
        groups.append(concatenate_rows(parts))
    if parameter.group_rows:
        return regrouped(groups[0], parameter.group_rows, parameter.name)
    return stack(groups) if parameter.stacked else groups[0]


def _read_source(opened: OpenModel, parameter: Parameter, name: str, rows: int) -> QuantTensor:
    scheme = _scheme(opened, parameter, name)
    if scheme is None:
        return _native_tensor(opened.checkpoint.get(name))
    return read_module(scheme, opened.checkpoint, name, (rows, parameter.shape[-1]))


def _read_fused(opened: OpenModel, parameter: Parameter) -> Any:
    arrays = [opened.checkpoint.get(name) for name, *_ in _fused_tensors(parameter)]
    if parameter.part == VECTOR:
        a = np.asarray(arrays[0], np.float32)
        return _gate_first(a, axis=-1) if parameter.interleaved else a
    if parameter.fused_layout == "mxfp4":
        codes = arrays[0].reshape(*parameter.shape[:-1], -1)
        w = QuantTensor("mxfp4", parameter.shape, codes, arrays[1], block=(1, MXFP4_GROUP))
    else:
        is_transposed = parameter.fused_layout == "columns"
        w = _native_tensor(np.swapaxes(arrays[0], -1, -2) if is_transposed else arrays[0])
    if parameter.interleaved:
        w = w.map_arrays(lambda a: _gate_first(a, axis=-2))
    return w


def regrouped(w: QuantTensor, group_rows: tuple[int, ...], name: str) -> QuantTensor:
    """A matrix whose rows come in groups of so many of each part, as all rows of the first part,
    then of the next.

    Raises UnsupportedModel, with the name, where a scale belongs to rows of two parts.
    """
    block_rows = w.block[0]

    def arranged(a: np.ndarray, rows: int) -> np.ndarray:
        if a.ndim == 0 or len(a) == 1:  # one for all rows
            return a
        if any(count % rows for count in group_rows):
            raise UnsupportedModel(
                f"{name}: one scale for {rows} rows does not go with parts of "
                f"{', '.join(map(str, group_rows))} rows that take turns"
            )
        return _parts_together(a, tuple(count // rows for count in group_rows))

    shared = ("scales", "zeros")
    found: dict[str, Any] = {
        n: arranged(a, block_rows if n in shared else 1) for n, a in w.arrays().items()
    }
    return replace(w, **found)


def _parts_together(a: np.ndarray, group_rows: tuple[int, ...]) -> np.ndarray:
    """Rows in groups of so many of each part as all rows of the first part, then of the next."""
    groups = a.reshape(-1, sum(group_rows), *a.shape[1:])
    parts = np.split(groups, np.cumsum(group_rows)[:-1], axis=1)
    return np.concatenate([part.reshape(-1, *a.shape[1:]) for part in parts])


def _gate_first(a: np.ndarray, axis: int) -> np.ndarray:
    """gate 0, up 0, gate 1, ... along an axis as gate 0, gate 1, ..., up 0, up 1, ..."""
    count = a.shape[axis]
    return np.take(a, [*range(0, count, 2), *range(1, count, 2)], axis=axis)


def _native_tensor(a: np.ndarray) -> QuantTensor:
    name = _NATIVE[a.dtype.name]
    return QuantTensor(name, a.shape, a if name == "fp32" else a.view(np.uint16))
