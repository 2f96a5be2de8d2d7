"""Checkpoint folders: what is read, and that everything broken is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npmoe.checkpoint import INDEX_NAME, Checkpoint, find_checkpoint
from npmoe.errors import CheckpointError, NpmoeError, UnsupportedModel
from tests.helpers import GOLDEN, read_safetensors, write_raw_safetensors, write_safetensors

SHARDED = GOLDEN / "qwen3_moe_v5"
FLOATS = np.arange(6, dtype=np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an empty config and no shards yet."""
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A copy of a checkpoint in three shards with an index."""
    return Path(shutil.copytree(SHARDED, tmp_path / "model"))


def shard_with_header(folder: Path, header: Any, data: bytes = FLOATS.tobytes()) -> None:
    """model.safetensors with the header given as an object or as raw bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    write_raw_safetensors(folder / "model.safetensors", raw, data)


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def test_tensors_are_views_of_the_file_in_their_own_dtype(folder: Path) -> None:
    bf16 = np.array([1, -2.5], ml_dtypes.bfloat16)
    tensors = {
        "a": ("F32", [2, 3], FLOATS.tobytes()),
        "b": ("BF16", [2], bf16.tobytes()),
        "odd": ("U8", [3], bytes([1, 2, 3])),
        "unaligned": ("I32", [1], np.array([7], np.int32).tobytes()),
        "scalar": ("I64", [], np.array(5).tobytes()),
        "empty": ("F16", [0, 4], b""),
    }
    write_safetensors(folder / "model.safetensors", tensors)
    checkpoint = Checkpoint(folder)
    np.testing.assert_array_equal(checkpoint.get("a", (2, 3)), FLOATS.reshape(2, 3))
    np.testing.assert_array_equal(checkpoint.get("b"), bf16)
    assert checkpoint.get("odd").tolist() == [1, 2, 3]
    assert checkpoint.get("unaligned").tolist() == [7]
    assert checkpoint.get("unaligned").flags.aligned
    assert (checkpoint.get("scalar").shape, int(checkpoint.get("scalar"))) == ((), 5)
    assert checkpoint.get("empty").shape == (0, 4)
    assert checkpoint.nbytes == 24 + 4 + 3 + 4 + 8
    with pytest.raises(ValueError, match="read-only"):
        checkpoint.get("a")[0, 0] = 1


def test_unused_names_are_those_that_nobody_asked_for(folder: Path) -> None:
    write_safetensors(folder / "m.safetensors", dict.fromkeys("cab", ("U8", [1], b"x")))
    checkpoint = Checkpoint(folder)
    assert checkpoint.unused() == ["a", "b", "c"]
    checkpoint.get("b")
    checkpoint.mark_used("a")
    assert checkpoint.unused() == ["c"]
    assert "b" in checkpoint
    assert "d" not in checkpoint


def test_shards_hold_what_the_index_says(sharded: Path) -> None:
    checkpoint = Checkpoint(sharded)
    weight_map = json.loads((sharded / INDEX_NAME).read_text())["weight_map"]
    assert {n: i.shard.name for n, i in checkpoint.tensors.items()} == weight_map
    for shard in sharded.glob("*.safetensors"):
        for name, (_, shape, data) in read_safetensors(shard).items():
            assert checkpoint.shape(name) == tuple(shape)
            assert checkpoint.get(name).tobytes() == data


def test_metadata_is_kept(folder: Path) -> None:
    shard_with_header(folder, {"__metadata__": {"format": "pt"}} | entry())
    assert Checkpoint(folder).metadata == {"format": "pt"}


def test_a_missing_tensor_and_another_shape_are_named(folder: Path) -> None:
    shard_with_header(folder, entry())
    checkpoint = Checkpoint(folder)
    with pytest.raises(CheckpointError, match="'other' is missing"):
        checkpoint.get("other")
    with pytest.raises(CheckpointError, match=r"'weight' has shape \[2, 3\].*\[3, 2\]"):
        checkpoint.get("weight", (3, 2))


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_shard_is_named(sharded: Path, keep: int) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors is truncated"):
        Checkpoint(sharded)


def test_a_shard_that_only_the_index_knows_is_named(sharded: Path) -> None:
    (sharded / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003.safetensors is named in"):
        Checkpoint(sharded)


def test_a_tensor_that_is_not_where_the_index_places_it_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_NAME).read_text())
    index["weight_map"]["model.norm.bias"] = "model-00001-of-00003.safetensors"
    (sharded / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'model.norm.bias' in model-00001"):
        Checkpoint(sharded)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        '{"weight_map": []}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": ["b"]}}',
        '{"metadata": {}}',
    ],
)
def test_a_malformed_index_is_named(sharded: Path, index: str) -> None:
    (sharded / INDEX_NAME).write_text(index)
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        Checkpoint(sharded)


def test_a_tensor_in_two_shards_is_named(folder: Path) -> None:
    for shard in "ab":
        write_safetensors(folder / f"{shard}.safetensors", {"weight": ("U8", [1], b"x")})
    with pytest.raises(CheckpointError, match=r"'weight' is in a.safetensors and b.safetensors"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{nonsense", "header is malformed"),
        (b"[1, 2]", "header is malformed"),
        (b"\xff\xfe", "header is malformed"),
        (b"[" * 100_000, "header is malformed"),
        ({"weight": {"dtype": "F32", "shape": [6]}}, "header is malformed"),
        ({"weight": 5}, "header is malformed"),
        ({"__metadata__": [1]}, "header is malformed"),
        (entry(offsets=("0", "24")), "header is malformed"),
        (entry(offsets=(0.0, 24.0)), "header is malformed .*'weight'"),
        (entry(offsets=[0]), "header is malformed"),
        (entry(dtype=["F32"]), "header is malformed .*'weight'"),
        (entry(shape=6), "header is malformed"),
        (entry(shape=[2.0, 3.0]), "header is malformed .*'weight'"),
        (entry(shape=[-2, -3]), "'weight' has shape"),
        (entry(shape=[2, 4]), r"'weight' of shape \(2, 4\) and dtype F32 spans 24 bytes"),
        (entry(offsets=(8, 0)), "'weight' of shape .* spans -8 bytes"),
        (entry(offsets=(-8, 16)), "'weight'"),
        (entry(offsets=(0, 28)), "truncated: tensor 'weight'"),
    ],
)
def test_a_malformed_header_is_named(folder: Path, header: Any, message: str) -> None:
    shard_with_header(folder, header)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(folder)
    assert "model.safetensors" in str(caught.value)


@given(data=st.binary(max_size=60))
def test_no_bytes_bring_anything_but_a_named_error(tmp_path_factory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(NpmoeError):
        Checkpoint(folder)


def test_an_unknown_dtype_is_named(folder: Path) -> None:
    shard_with_header(folder, entry(dtype="F8_E5M2", offsets=(0, 6)))
    with pytest.raises(UnsupportedModel, match=r"'weight' has dtype 'F8_E5M2'; npmoe reads .*BF16"):
        Checkpoint(folder)


@pytest.mark.parametrize("config", ["{", "[1]", '"text"', "\xff", "[" * 100_000])
def test_a_malformed_config_is_named(folder: Path, config: str) -> None:
    (folder / "config.json").write_bytes(config.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint(folder)


def test_a_folder_without_config_or_without_shards_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"no .safetensors.*pytorch_model\.bin cannot be used"
    ):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.gguf", "model.bin", "model.PT", "model.pkl"])
def test_gguf_and_pickle_are_refused_whether_they_exist_or_not(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        find_checkpoint(tmp_path / name)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"Pass a folder with config.json"):
        find_checkpoint(tmp_path / name)


def test_a_path_that_does_not_exist_or_is_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        find_checkpoint(tmp_path / "nowhere")
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file; pass the folder"):
        find_checkpoint(file)


def test_a_name_that_no_file_can_have(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint("a" * 5000)
    index = json.loads((sharded / INDEX_NAME).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "a" * 5000)
    (sharded / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is not there"):
        Checkpoint(sharded)


@pytest.mark.parametrize("path", [5, b"model", ["model"]], ids=str)
def test_what_is_no_path_is_a_value_error(path: Any) -> None:
    with pytest.raises(ValueError, match="path = "):
        find_checkpoint(path)


def test_a_name_that_is_not_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="'org/name' is neither") as caught:
        find_checkpoint("org/name")
    assert str(tmp_path) in str(caught.value)
    assert "hf download org/name" in str(caught.value)


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_a_name_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    model = tmp_path / below / "models--org--name"
    for commit in ("abc", "def"):
        (model / "snapshots" / commit).mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("def\n")
    assert find_checkpoint("org/name") == model / "snapshots" / "def"


def test_the_only_snapshot_serves_when_there_is_no_ref(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshots = tmp_path / "models--org--name" / "snapshots"
    (snapshots / "abc").mkdir(parents=True)
    assert find_checkpoint("org/name") == snapshots / "abc"
    (snapshots / "def").mkdir()
    with pytest.raises(CheckpointError, match="'org/name'"):
        find_checkpoint("org/name")


def test_a_folder_wins_over_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/name").mkdir(parents=True)
    assert find_checkpoint("org/name") == Path("org/name")
