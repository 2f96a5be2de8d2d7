"""`npmoe convert`: writes a checkpoint in npmoe's own layout, which loads without converting.

One parameter is in memory at a time. The sizes of all arrays are known from headers, so a shard is
written from front to back: 8 bytes of header length, the JSON header, then the arrays
(https://github.com/huggingface/safetensors).
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from npmoe.checkpoint import INDEX_NAME
from npmoe.config import WeightsPolicy
from npmoe.dtypes import SAFETENSORS_DTYPES
from npmoe.errors import CheckpointError, UnsupportedModel
from npmoe.models.conversion import cannot_be, chosen_formats, convert_parameter
from npmoe.models.own_layout import LAYOUT_VERSION, QUANT_METHOD, shares_table, stored_arrays
from npmoe.models.parameters import VECTOR, Parameter
from npmoe.models.stored import OpenModel, open_model, read_parameter
from npmoe.runtime.progress import progress

SHARD_BYTES = 4_000_000_000
COPIED_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja"),
    *("generation_config.json", "LICENSE"),
)

StoredArrays = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (dtype word, shape)."""


@dataclass(frozen=True)
class Shard:
    """One file: its name, the parameters it holds, and their arrays in the order of the file."""

    name: str
    parameters: list[Parameter]
    arrays: StoredArrays


def convert_checkpoint(
    source: str | os.PathLike,
    target: str | os.PathLike,
    policy: WeightsPolicy,
    *,
    ignored: tuple[str, ...] = (),
    shard_bytes: int = SHARD_BYTES,
    quiet: bool = False,
) -> dict[str, str]:
    """Writes `source` to the new folder `target` with the parts of `policy` converted.

    A shard ends before the parameter that would take it past `shard_bytes`. Config keys that the
    user ignores are left out of the new config.json. Returns part -> format as written.

    Raises CheckpointError and UnsupportedModel for a source that cannot be read, for one whose
    parts are quantised to other formats already, and where `target` cannot be written; ValueError
    for a target that exists or a format that cannot hold a matrix. `target` then does not exist.
    """
    folder = Path(target).expanduser()
    if folder.exists():
        raise ValueError(f"{folder} exists already: name a new folder, or remove it first")
    if not folder.parent.is_dir():
        raise ValueError(f"{folder.parent} is not a folder: create it first")
    opened = open_model(source, ignored)
    formats = chosen_formats(opened, policy)
    _check_storages(opened, formats, policy)
    parameters = [p for p in opened.parameters if not shares_table(p, opened.spec.tied, formats)]

    def values(parameter: Parameter) -> Iterator[np.ndarray]:
        return _converted_arrays(opened, parameter, formats)

    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir()
        _write_shards(plan_shards(parameters, formats, shard_bytes), values, partial, quiet)
        write_json(partial / "config.json", _new_config(opened, formats, ignored))
        for name in COPIED_FILES:
            if (opened.checkpoint.folder / name).is_file():
                shutil.copyfile(opened.checkpoint.folder / name, partial / name)
        open_model(partial)
        partial.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return formats


def _check_storages(opened: OpenModel, formats: dict[str, str], policy: WeightsPolicy) -> None:
    """Raises UnsupportedModel for what others quantised and would stay as it is."""
    for p in opened.parameters:
        storage = opened.storages.get(p.name)
        if storage is None or storage.words is None:
            continue
        if p.part not in policy or formats[p.part] == storage.format:
            raise UnsupportedModel(
                f"{opened.checkpoint.folder}: {p.part} is {storage.words} already, which npmoe's "
                "own layout does not hold; load the checkpoint as it is"
            )


def _new_config(
    opened: OpenModel, formats: dict[str, str], ignored: tuple[str, ...]
) -> dict[str, Any]:
    raw = {name: value for name, value in opened.checkpoint.config.items() if name not in ignored}
    raw["tie_word_embeddings"] = opened.spec.tied
    raw["quantization_config"] = quantization_config(formats)
    return raw


def quantization_config(formats: dict[str, str]) -> dict[str, Any]:
    """What config.json says of a checkpoint with these formats: part -> format."""
    return {"quant_method": QUANT_METHOD, "version": LAYOUT_VERSION, "formats": formats}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """`value` as a JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def plan_shards(
    parameters: list[Parameter], formats: dict[str, str], shard_bytes: int = SHARD_BYTES
) -> list[Shard]:
    """The files for these parameters in their parts' formats.

    A shard ends before the parameter that would take it past `shard_bytes`. Raises ValueError,
    naming the parameter, where a format cannot hold it.
    """
    groups: list[tuple[list[Parameter], StoredArrays]] = []
    size = 0
    for parameter in parameters:
        arrays = _planned_arrays(parameter, formats)
        size += _num_bytes(arrays)
        if not groups or size > shard_bytes:
            groups.append(([], {}))
            size = _num_bytes(arrays)
        groups[-1][0].append(parameter)
        groups[-1][1].update(arrays)
    count = len(groups)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    names = names if count > 1 else ["model.safetensors"]
    return [Shard(name, *group) for name, group in zip(names, groups, strict=True)]


def _write_shards(
    shards: list[Shard],
    values: Callable[[Parameter], Iterable[np.ndarray]],
    folder: Path,
    quiet: bool,
) -> None:
    """Writes all files, one parameter after the other; values: the arrays of a parameter."""
    waiting = progress([p for s in shards for p in s.parameters], "writing weights", quiet)
    for shard in shards:
        parameters = islice(waiting, len(shard.parameters))
        write_shard(folder, shard, (a for p in parameters for a in values(p)))
    list(waiting)  # completes the bar
    write_index(folder, shards)


def write_index(folder: Path, shards: list[Shard]) -> None:
    """Which file holds which tensor; nothing where there is one file."""
    if len(shards) > 1:
        placed = {name: shard.name for shard in shards for name in shard.arrays}
        total = sum(_num_bytes(shard.arrays) for shard in shards)
        write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": placed})


def _planned_arrays(parameter: Parameter, formats: dict[str, str]) -> StoredArrays:
    if parameter.part == VECTOR:
        return {parameter.name: ("F32", parameter.shape)}
    name = formats[parameter.part]
    try:
        fields = stored_arrays(name, parameter.shape)
    except ValueError as error:
        raise cannot_be(parameter, name, error) from None
    return {f"{parameter.name}.{field}": stored for field, stored in fields.items()}


def _num_bytes(arrays: StoredArrays) -> int:
    return sum(math.prod(s) * SAFETENSORS_DTYPES[word].itemsize for word, s in arrays.values())


def _converted_arrays(
    opened: OpenModel, parameter: Parameter, formats: dict[str, str]
) -> Iterator[np.ndarray]:
    """The arrays of a parameter in the order of `_planned_arrays`."""
    w = read_parameter(opened, parameter)
    if parameter.part == VECTOR:
        yield w
    else:
        yield from convert_parameter(parameter, w, formats).arrays().values()


def write_shard(folder: Path, shard: Shard, values: Iterable[np.ndarray]) -> None:
    """Writes one file; values: its arrays in order, asked for one at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    stop = 0
    for name, (word, shape) in shard.arrays.items():
        start, stop = stop, stop + _num_bytes({name: (word, shape)})
        header[name] = {"dtype": word, "shape": shape, "data_offsets": (start, stop)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (folder / shard.name).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, (word, shape)), a in zip(shard.arrays.items(), values, strict=True):
            itemsize = SAFETENSORS_DTYPES[word].itemsize
            assert (a.shape, a.dtype.itemsize) == (shape, itemsize), name
            np.ascontiguousarray(a).tofile(file)
