"""A converted checkpoint is the model that converting at load gives, bit for bit."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from npmoe.config import WEIGHT_FORMATS, WEIGHT_PARTS, parse_weights
from npmoe.errors import CheckpointError, UnsupportedModel
from npmoe.llm import LLM
from npmoe.models import convert
from npmoe.models.convert import convert_checkpoint
from npmoe.models.stored import open_model
from tests.cli_fixtures import make_checkpoint, write_json

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("convert") / "source")


def logits(folder: Path, weights: str | dict[str, str] = "native") -> np.ndarray:
    with LLM(folder, device="cpu", weights=weights, progress=False) as llm:
        return llm.forward(IDS)


def run(source: Path, target: Path, weights: str | dict[str, str], **options: int) -> Path:
    convert_checkpoint(source, target, parse_weights(weights), quiet=True, **options)
    return target


@pytest.mark.parametrize("part", WEIGHT_PARTS)
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_same_logits_as_converting_at_load(
    source: Path, tmp_path: Path, name: str, part: str
) -> None:
    policy = {part: name}
    converted = run(source, tmp_path / "new", policy)
    np.testing.assert_array_equal(logits(converted), logits(source, policy))


def test_nothing_is_converted_again(source: Path, tmp_path: Path) -> None:
    converted = run(source, tmp_path / "new", "fp4")
    np.testing.assert_array_equal(logits(converted, "fp4"), logits(source, "fp4"))
    formats = open_model(converted).own_formats
    assert formats == {
        **{"table": "bf16", "router": "bf16"},
        **dict.fromkeys(("attention", "experts", "mlp", "lm_head"), "fp4"),
    }


def test_other_tools_can_look_at_it(source: Path, tmp_path: Path) -> None:
    converted = run(source, tmp_path / "new", {"experts": "fp4", "mlp": "fp16"})
    with safe_open(converted / "model.safetensors", "np") as file:
        table = file.get_tensor("embed_tokens.codes")
        down = file.get_tensor("layers.1.down_proj.codes")
        codes = file.get_tensor("layers.0.down_proj.codes")
        norm = file.get_tensor("norm")
    original = load_file(source / "model.safetensors")
    np.testing.assert_array_equal(table, original["model.embed_tokens.weight"])
    assert (table.dtype, down.dtype) == (ml_dtypes.bfloat16, np.float16)
    assert (codes.shape, codes.dtype) == ((4, 64, 16), np.uint8)
    np.testing.assert_array_equal(norm, original["model.norm.weight"].astype(np.float32))


def test_files_beside_the_weights_are_copied(source: Path, tmp_path: Path) -> None:
    write_json(source / "generation_config.json", {"max_new_tokens": 5})
    converted = run(source, tmp_path / "new", "fp8")
    (source / "generation_config.json").unlink()
    names = {path.name for path in converted.iterdir()}
    assert names == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        "generation_config.json",
    }
    assert (converted / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_shards(source: Path, tmp_path: Path) -> None:
    limit = 40_000
    converted = run(source, tmp_path / "new", "fp8", shard_bytes=limit)
    index = json.loads((converted / "model.safetensors.index.json").read_text())
    shards = sorted(converted.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    assert index["metadata"]["total_size"] == open_model(converted).checkpoint.nbytes
    for shard in shards:
        tensors = load_file(shard)
        assert {index["weight_map"][name] for name in tensors} == {shard.name}
        parameters = {name.removesuffix(".codes").removesuffix(".scales") for name in tensors}
        assert sum(t.nbytes for t in tensors.values()) <= limit or len(parameters) == 1
    np.testing.assert_array_equal(logits(converted), logits(source, "fp8"))


@pytest.mark.parametrize("head", ["native", "bf16", "fp8"])
def test_tied_head(tmp_path: Path, head: str) -> None:
    """It is stored only where its format is not the embedding's."""
    source = make_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    policy = {"lm_head": head, "experts": "fp4"}
    converted = run(source, tmp_path / "new", policy)
    stored = "lm_head.codes" in load_file(converted / "model.safetensors")
    assert stored == (head == "fp8")
    np.testing.assert_array_equal(logits(converted), logits(source, policy))


def test_a_head_that_the_config_wrongly_calls_tied(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    write_json(source / "config.json", config | {"tie_word_embeddings": True})
    converted = run(source, tmp_path / "new", {"mlp": "fp8"})
    np.testing.assert_array_equal(logits(converted), logits(source, {"mlp": "fp8"}))


def test_tensors_of_different_types(tmp_path: Path) -> None:
    """One expert in float16 among bfloat16 ones: they become fp32, with the same values."""
    source = make_checkpoint(tmp_path / "source")
    path = source / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    before = logits(source)
    tensors[name] = tensors[name].astype(np.float16)
    save_file(tensors, path)
    np.testing.assert_allclose(logits(source), before, rtol=0, atol=1e-3)
    converted = run(source, tmp_path / "new", {"attention": "fp8"})
    assert open_model(converted).own_formats["experts"] == "fp32"


def test_a_quantised_part_keeps_its_format(source: Path, tmp_path: Path) -> None:
    first = run(source, tmp_path / "first", {"experts": "fp4"})
    with pytest.raises(UnsupportedModel, match=r"experts.*fp4 already.*fp8"):
        run(first, tmp_path / "second", "fp8")
    second = run(first, tmp_path / "second", {"experts": "fp4", "attention": "fp8"})
    both = {"experts": "fp4", "attention": "fp8"}
    np.testing.assert_array_equal(logits(second), logits(source, both))


def test_an_ignored_key_is_left_out(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", novel_key=3)
    with pytest.raises(UnsupportedModel, match="novel_key"):
        run(source, tmp_path / "new", "fp8")
    convert_checkpoint(
        source, tmp_path / "new", parse_weights("fp8"), ignored=("novel_key",), quiet=True
    )
    assert open_model(tmp_path / "new").spec.hidden_size == 64


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("no space left on device")])
def test_an_interrupted_run_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    whole, calls = convert.read_parameter, []

    def interrupted(*args: object) -> object:
        calls.append(args)
        assert list(tmp_path.iterdir()), "nothing is being written"
        if len(calls) == 5:
            raise stop
        return whole(*args)

    monkeypatch.setattr(convert, "read_parameter", interrupted)
    expected = CheckpointError if isinstance(stop, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        run(source, tmp_path / "new", "fp8", shard_bytes=20_000)
    assert list(tmp_path.iterdir()) == []


def test_a_width_that_the_format_cannot_hold(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", moe_intermediate_size=36)
    for action in (lambda: run(source, tmp_path / "new", "fp4"), lambda: logits(source, "fp4")):
        with pytest.raises(ValueError, match=r"layers\.0\.down_proj.*cannot be fp4.*36 columns"):
            action()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_no_folder_is_overwritten(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exists already"):
        run(source, tmp_path, "fp8")
    with pytest.raises(ValueError, match="is not a folder"):
        run(source, tmp_path / "no" / "such", "fp8")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"version": 2}, UnsupportedModel, "version 2"),
        ({"formats": None}, CheckpointError, "formats = None"),
        ({"formats": {"experts": "fp5"}}, UnsupportedModel, "'fp5'"),
        ({"formats": {"experts": "fp4"}}, CheckpointError, "no format for 'table'"),
    ],
)
def test_a_layout_of_another_kind(
    source: Path, tmp_path: Path, change: dict, error: type[Exception], words: str
) -> None:
    path = run(source, tmp_path / "new", {"experts": "fp4"}) / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    write_json(path, config)
    with pytest.raises(error, match=words):
        open_model(path.parent)


def test_an_array_of_another_type(source: Path, tmp_path: Path) -> None:
    path = run(source, tmp_path / "new", {"experts": "fp4"}) / "model.safetensors"
    tensors = load_file(path)
    name = "layers.0.down_proj.scales"
    save_file(tensors | {name: tensors[name].astype(np.float32)}, path)
    with pytest.raises(UnsupportedModel, match=r"down_proj\.scales.*F32.*read as F16"):
        open_model(path.parent)


def test_loading_does_not_quantise_again_either(source: Path, tmp_path: Path) -> None:
    converted = run(source, tmp_path / "new", "fp4")
    with pytest.raises(
        UnsupportedModel, match="attention is fp4 already; making it fp8 would lose"
    ):
        logits(converted, "fp8")
    np.testing.assert_allclose(logits(converted, "fp32"), logits(converted), rtol=0, atol=1e-3)
