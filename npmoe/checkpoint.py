"""A Hugging Face checkpoint folder as an object: name -> tensor, memory-mapped, nothing copied.

Files are data: JSON and safetensors are parsed, nothing is unpickled or executed. The safetensors
layout is an 8-byte little-endian header length, a JSON header, then the tensors' bytes
(https://github.com/huggingface/safetensors).
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from npmoe.dtypes import SAFETENSORS_DTYPES
from npmoe.errors import CheckpointError, UnsupportedModel
from npmoe.runtime.transfer import Piece

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: shard file, dtype word, shape, byte range within the shard."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def find_checkpoint(path: str | os.PathLike) -> Path:
    """The folder of a local path or of a name org/name in the local Hugging Face cache.

    Raises CheckpointError if there is none, UnsupportedModel for GGUF and pickle files, and
    ValueError for what is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path = {path!r}: expected a folder, or a model name org/name")
    folder = Path(path).expanduser()
    suffix = folder.suffix.lower()
    if suffix in (".gguf", ".ggml", ".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise UnsupportedModel(
            f"{folder}: {suffix} files are not read (pickle can execute code, GGUF is another "
            "layout). Pass a folder with config.json and .safetensors files."
        )
    if os.path.isdir(folder):  # Path.is_dir raises for a name that is too long
        return folder
    if os.path.isfile(folder):
        raise CheckpointError(f"{folder} is a file; pass the folder that holds config.json")
    name = str(path)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        cached = _find_in_cache(name)
        if cached is not None:
            return cached
        raise CheckpointError(
            f"{name!r} is neither a folder nor a model in the local Hugging Face cache "
            f"({_cache_folder()}). npmoe downloads nothing: fetch it first, for example with "
            f"'hf download {name}'."
        )
    raise CheckpointError(f"{folder} does not exist")


def _cache_folder() -> Path:
    """The hub cache, as huggingface_hub places it."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def _find_in_cache(name: str) -> Path | None:
    """Layout of the cache: models--org--name/{refs/main, snapshots/<commit>/}."""
    base = _cache_folder() / ("models--" + name.replace("/", "--"))
    ref = base / "refs" / "main"
    if ref.is_file():
        snapshot = base / "snapshots" / ref.read_text().strip()
        return snapshot if snapshot.is_dir() else None
    snapshots = sorted((base / "snapshots").glob("*"))
    return snapshots[0] if len(snapshots) == 1 else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError if it is absent or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class Checkpoint:
    """The tensors of a checkpoint folder.

    Opening reads headers only and checks that every shard is there and whole; `get` maps bytes.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.folder = find_checkpoint(path)
        self.config = read_json(self.folder / "config.json")
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._maps: dict[Path, np.memmap] = {}
        self._used: set[str] = set()
        self._read_shards()

    def _read_shards(self) -> None:
        index_path = self.folder / INDEX_NAME
        weight_map: dict[str, str] = {}
        if index_path.is_file():
            weight_map = read_json(index_path).get("weight_map", {})
            if (
                not isinstance(weight_map, dict)
                or not weight_map
                or not all(isinstance(shard, str) for shard in weight_map.values())
            ):
                raise CheckpointError(f"{index_path}: weight_map does not say tensor -> shard file")
            shards = [self.folder / name for name in sorted(set(weight_map.values()))]
        else:
            shards = sorted(self.folder.glob("*.safetensors"))
        if not shards:
            found = [p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".gguf", ".pt")]
            hint = f" ({', '.join(sorted(found)[:3])} cannot be used)" if found else ""
            raise CheckpointError(f"{self.folder}: no .safetensors files{hint}")
        for shard in shards:
            if not os.path.isfile(shard):  # as in find_checkpoint
                raise CheckpointError(
                    f"{shard} is named in {INDEX_NAME} but is not there: download it again"
                )
            for name, info in self._read_header(shard).items():
                if name in self.tensors:
                    raise CheckpointError(
                        f"tensor {name!r} is in {self.tensors[name].shard.name} and {shard.name}"
                    )
                self.tensors[name] = info
        for name, shard_name in weight_map.items():
            if name not in self.tensors or self.tensors[name].shard.name != shard_name:
                raise CheckpointError(
                    f"{INDEX_NAME} places tensor {name!r} in {shard_name}, which does not hold it"
                )

    def _read_header(self, shard: Path) -> dict[str, TensorInfo]:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{shard} is truncated or not a safetensors file: "
                    f"{size:,} bytes, header of {length:,}"
                )
            try:
                header = json.loads(file.read(length))
                self.metadata.update(header.pop("__metadata__", None) or {})
                infos = {
                    name: TensorInfo(
                        shard,
                        entry["dtype"],
                        tuple(entry["shape"]),
                        8 + length + entry["data_offsets"][0],
                        8 + length + entry["data_offsets"][1],
                    )
                    for name, entry in header.items()
                }
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"{shard}: the header is malformed ({error})") from None
        for name, info in infos.items():
            self._check_tensor(name, info, 8 + length, size)
        return infos

    def _check_tensor(self, name: str, info: TensorInfo, first: int, size: int) -> None:
        """`first` is where the data begins and `size` where the file ends."""
        whole = all(isinstance(n, int) for n in (*info.shape, info.start, info.stop))
        if not whole or not isinstance(info.dtype, str):
            raise CheckpointError(
                f"{info.shard}: the header is malformed (tensor {name!r} has dtype {info.dtype!r}, "
                f"shape {info.shape}, bytes {info.start} to {info.stop})"
            )
        if info.dtype not in SAFETENSORS_DTYPES:
            raise UnsupportedModel(
                f"{info.shard}: tensor {name!r} has dtype {info.dtype!r}; "
                f"npmoe reads {', '.join(SAFETENSORS_DTYPES)}"
            )
        if info.stop > size:
            raise CheckpointError(
                f"{info.shard} is truncated: tensor {name!r} ends at byte {info.stop:,}, the file "
                f"at {size:,}. Download it again."
            )
        count = 1
        for extent in info.shape:
            if extent < 0:
                raise CheckpointError(f"{info.shard}: tensor {name!r} has shape {info.shape}")
            count *= extent
        if (
            info.start < first
            or info.stop - info.start != count * SAFETENSORS_DTYPES[info.dtype].itemsize
        ):
            raise CheckpointError(
                f"{info.shard}: tensor {name!r} of shape {info.shape} and dtype {info.dtype} "
                f"spans {info.stop - info.start:,} bytes"
            )

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, from the header; CheckpointError if it is missing."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder}: tensor {name!r} is missing")
        return self.tensors[name].shape

    def get(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """The tensor as a read-only view of the mapped file, in its own dtype.

        Raises CheckpointError if it is missing or has another shape than `shape`.
        """
        if shape is not None and self.shape(name) != shape:
            raise CheckpointError(
                f"{self.folder}: tensor {name!r} has shape {list(self.shape(name))}, "
                f"the config asks for {list(shape)}"
            )
        self.shape(name)
        info = self.tensors[name]
        self._used.add(name)
        if info.start == info.stop:
            return np.empty(info.shape, SAFETENSORS_DTYPES[info.dtype])
        if info.shard not in self._maps:
            self._maps[info.shard] = np.memmap(info.shard, np.uint8, "r")
        if len(self._maps[info.shard]) < info.stop:
            raise _shorter(info.shard)
        raw = self._maps[info.shard][info.start : info.stop]
        dtype = SAFETENSORS_DTYPES[info.dtype]
        if info.start % dtype.itemsize:
            raw = raw.copy()
        return np.asarray(raw.view(dtype).reshape(info.shape))

    def piece(self, name: str) -> Piece:
        """The tensor's bytes, to be read from the file and not through the map.

        Reading raises CheckpointError if the file has changed and ends before, or cannot be read.
        """
        self.shape(name)
        info = self.tensors[name]
        self._used.add(name)

        def read(target: np.ndarray, start: int) -> None:
            _read_file(info.shard, info.start + start, target)

        return Piece(info.stop - info.start, read)

    def mark_used(self, name: str) -> None:
        """Counts a tensor as read, so that `unused` does not list it."""
        self._used.add(name)

    def unused(self) -> list[str]:
        """Names that nobody has asked for."""
        return sorted(set(self.tensors) - self._used)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.stop - info.start for info in self.tensors.values())


def _read_file(path: Path, start: int, target: np.ndarray) -> None:
    """Fills target, uint8 `[n]`, with the bytes from `start` on."""
    rest: memoryview = target.data
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise _shorter(path)
                rest = rest[count:]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _shorter(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} has become shorter since its header was read")
