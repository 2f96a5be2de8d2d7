"""What a checkpoint holds: checked by name and shape from its headers, then read tensor by tensor.

Two layouts are read. Hugging Face's has one tensor per projection and expert. Ours, written by
`npmoe convert`, has one tensor per array of a QuantTensor under npmoe's own names, for example
`layers.0.down_proj.codes` and `layers.0.down_proj.scales`, and names each part's format in
config.json; a tied head in the embedding's format is not stored again.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npmoe.checkpoint import Checkpoint
from npmoe.config import ModelConfig
from npmoe.errors import CheckpointError, UnsupportedModel
from npmoe.formats.quant_tensor import (
    CODES_PER_BYTE,
    DEFAULT_GROUP_SIZE,
    WEIGHT_FORMATS,
    QuantTensor,
    concatenate_rows,
    quantize,
    stack,
)
from npmoe.models.families import read_model
from npmoe.models.parameters import TABLE, VECTOR, Parameter
from npmoe.models.specs import ModelSpec

QUANT_METHOD = "npmoe"
LAYOUT_VERSION = 1
MIXED = "mixed"
_NATIVE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_NATIVE_WORDS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
FLOAT_WORDS = tuple(_NATIVE_WORDS)
MXFP4_GROUP = DEFAULT_GROUP_SIZE["mxfp4"]
_WORD_OF = {name: word for word, name in _NATIVE_WORDS.items()}
_SCALE_WORDS = {"fp8": "F32", "mxfp4": "U8", "nvfp4": "U8"}  # the others have fp16 scales


@dataclass(frozen=True)
class OpenModel:
    """A checkpoint whose headers were read and checked; no weight has been touched yet.

    own_formats: part -> format where `npmoe convert` wrote it, None for Hugging Face's layout.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    spec: ModelSpec
    parameters: list[Parameter]
    own_formats: dict[str, str] | None


def open_model(path: str | os.PathLike, ignored: tuple[str, ...] = ()) -> OpenModel:
    """Reads config and headers and checks that every tensor is there, fits, and is used.

    Raises CheckpointError and UnsupportedModel.
    """
    checkpoint = Checkpoint(path)
    raw = dict(checkpoint.config)
    quantization = raw.get("quantization_config")
    own_formats = None
    if isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD:
        del raw["quantization_config"]
        own_formats = _own_formats(checkpoint, quantization)
    where = str(checkpoint.folder / "config.json")
    config, spec, parameters = read_model(raw, where, ignored)
    if spec.tied and _has_own_head(checkpoint, parameters[0]):
        raw["tie_word_embeddings"] = False
        config, spec, parameters = read_model(raw, where, ignored)
    opened = OpenModel(checkpoint, config, spec, parameters, own_formats)
    _check_tensors(opened)
    return opened


def _own_formats(checkpoint: Checkpoint, quantization: dict[str, Any]) -> dict[str, str]:
    where = f"{checkpoint.folder / 'config.json'}: quantization_config"
    if quantization.get("version") != LAYOUT_VERSION:
        raise UnsupportedModel(
            f"{where}: version {quantization.get('version')!r} is not implemented (npmoe reads "
            f"{LAYOUT_VERSION}); convert the original checkpoint with this npmoe"
        )
    formats = quantization.get("formats")
    if not isinstance(formats, dict):
        raise CheckpointError(f"{where}: formats = {formats!r}, expected part -> format")
    for part, name in formats.items():
        if not isinstance(name, str) or name not in WEIGHT_FORMATS:
            raise UnsupportedModel(
                f"{where}: {part} has the format {name!r}; npmoe reads {', '.join(WEIGHT_FORMATS)}"
            )
    return formats


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
        format_name = stored_format(opened, parameter)
        if format_name is None:
            yield parameter.name, parameter.shape, ("F32",)
            return
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
                yield name, (rows, *parameter.shape[2 if parameter.stacked else 1 :]), FLOAT_WORDS


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
    """The weight format in which the checkpoint holds a matrix; None for vectors.

    fp32 where its tensors differ in type, since fp32 holds them all.
    """
    if parameter.part == VECTOR:
        return None
    if opened.own_formats is not None:
        if parameter.part not in opened.own_formats:
            raise CheckpointError(
                f"{opened.checkpoint.folder}: quantization_config names no format for "
                f"{parameter.part!r}"
            )
        return opened.own_formats[parameter.part]
    if parameter.fused_layout == "mxfp4":
        return "mxfp4"
    tensors = opened.checkpoint.tensors
    words = {tensors[name].dtype for name, *_ in expected_tensors(opened, parameter)}
    return _NATIVE_WORDS[words.pop()] if len(words) == 1 else "fp32"


def stored_formats(opened: OpenModel) -> dict[str, str]:
    """Part -> the format in which the checkpoint holds its matrices; "mixed" where they differ."""
    found: dict[str, str] = {}
    for parameter in opened.parameters:
        name = stored_format(opened, parameter)
        if name is not None and found.setdefault(parameter.part, name) != name:
            found[parameter.part] = MIXED
    return found


def shares_table(parameter: Parameter, tied: bool, formats: dict[str, str]) -> bool:
    """Whether a converted checkpoint stores this parameter, the head, as the embedding only."""
    return parameter.part == "lm_head" and tied and formats["lm_head"] == formats.get(TABLE)


def _stored_name(opened: OpenModel, parameter: Parameter) -> str:
    assert opened.own_formats is not None
    shared = shares_table(parameter, opened.spec.tied, opened.own_formats)
    return "embed_tokens" if shared else parameter.name


def stored_arrays(
    format_name: str, shape: tuple[int, ...]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """QuantTensor field -> (dtype word, shape): how a converted matrix `[..., N, K]` is stored.

    Raises ValueError where K is not a multiple of the format's group.
    """
    *lead, columns = shape
    if format_name in _WORD_OF:
        return {"codes": (_WORD_OF[format_name], shape)}
    group = DEFAULT_GROUP_SIZE.get(format_name, columns)
    if columns % group:
        raise ValueError(f"{columns} columns are not a multiple of its group, {group}")
    scales = (*lead, columns // group)
    arrays = {
        "codes": ("U8", (*lead, columns // CODES_PER_BYTE.get(format_name, 1))),
        "scales": (_SCALE_WORDS.get(format_name, "F16"), scales),
    }
    if format_name == "int4_asym":
        arrays["zeros"] = ("U8", scales)
    if format_name == "nvfp4":
        arrays["global_scale"] = ("F32", tuple(lead[:-1]))
    return arrays


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
        name = stored_format(opened, parameter)
        assert name is not None
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
        parts = [_native_tensor(get(name)) for name in names]
        parts = [p if p.format == target else quantize(p.dequantize(), target) for p in parts]
        groups.append(concatenate_rows(parts))
    if parameter.group_rows:
        return groups[0].map_arrays(lambda a: _parts_together(a, parameter.group_rows))
    return stack(groups) if parameter.stacked else groups[0]


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
