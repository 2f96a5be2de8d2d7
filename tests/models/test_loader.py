"""Checkpoint -> model: what does not fit is named before any weight is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npmoe.config import KVCacheConfig
from npmoe.errors import CheckpointError, UnsupportedModel
from npmoe.kv.storage import KVCache
from npmoe.models.conversion import convert_parameter
from npmoe.models.loader import load_model
from npmoe.models.stored import open_model, read_parameter
from tests.cases import FOUR_BIT, WEIGHT_FORMATS
from tests.helpers import (
    GOLDEN,
    Tensors,
    golden_arrays,
    golden_model,
    logits_in_chunks,
    read_safetensors,
    relative_error,
    write_safetensors,
)

Change = Callable[[Tensors], Any]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Copies a golden checkpoint, with its tensors and config changed."""

    def build(name: str, change: Change = lambda tensors: None, **config: Any) -> Path:
        folder = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
        tensors = read_safetensors(folder / "model.safetensors")
        change(tensors)
        write_safetensors(folder / "model.safetensors", tensors)
        raw = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(raw))
        return folder

    return build


def as_dtype(word: str, only: str = "") -> Change:
    """Rewrites the bf16 tensors whose name contains `only` as F32 or F16, exactly."""

    def change(tensors: Tensors) -> None:
        for name, (_, shape, data) in list(tensors.items()):
            if only in name:
                values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
                dtype = {"F32": np.float32, "F16": np.float16}[word]
                tensors[name] = (word, shape, values.astype(dtype).tobytes())

    return change


NORM = "model.layers.1.input_layernorm.weight"


def test_a_missing_tensor_is_named(make: Callable[..., Path]) -> None:
    folder = make("mixtral", lambda tensors: tensors.pop(NORM))
    with pytest.raises(CheckpointError, match=f"tensor '{NORM}' missing"):
        open_model(folder)


def test_many_missing_tensors_are_listed_in_short(make: Callable[..., Path]) -> None:
    def drop(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".w2." in n]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=r"experts\.0\.w2\.weight', .* and 13 more missing"):
        open_model(make("mixtral", drop))


def test_a_misshapen_tensor_is_named(make: Callable[..., Path]) -> None:
    def transpose(tensors: Tensors) -> None:
        dtype, shape, data = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = (dtype, shape[::-1], data)

    with pytest.raises(
        CheckpointError, match=r"'lm_head.weight' has shape \[64, 128\].*\[128, 64\]"
    ):
        open_model(make("llama", transpose))


def test_a_tensor_that_is_left_over_is_named(make: Callable[..., Path]) -> None:
    folder = make("llama", attention_bias=False)
    with pytest.raises(CheckpointError, match=r"_proj.bias.* not used by model_type 'llama'"):
        open_model(folder)
    folder = make("mixtral", lambda tensors: tensors.update(extra=("F32", [1], b"\0" * 4)))
    with pytest.raises(CheckpointError, match="tensor 'extra' not used"):
        open_model(folder)


def test_buffers_and_layers_past_the_last_may_be_left_over(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    buffer, later = "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.2.mlp.x.weight"

    def add(tensors: Tensors) -> None:
        tensors.update(dict.fromkeys((buffer, later), ("F32", [1], b"\0" * 4)))

    load_model(open_model(make("llama", add)), {}, "cpu")
    said = capsys.readouterr().err
    assert f"left out tensor '{later}'" in said
    assert "inv_freq" not in said


def test_a_head_that_the_config_calls_tied_counts_where_it_differs(
    make: Callable[..., Path],
) -> None:
    def add_head(tensors: Tensors, times: int) -> None:
        dtype, shape, data = tensors["model.embed_tokens.weight"]
        exponent = np.frombuffer(data, np.uint16) + np.uint16((times - 1) << 7)
        tensors["lm_head.weight"] = (dtype, shape, exponent.tobytes())

    golden = golden_arrays("llama_linear")
    for times in (1, 2):
        folder = make("llama_linear", lambda tensors, times=times: add_head(tensors, times))
        opened = open_model(folder)
        assert opened.spec.tied == (times == 1)
        logits = logits_in_chunks(load_model(opened, {}, "cpu", True), golden["input_ids"], 64)
        assert relative_error(logits, times * golden["logits"]) < 1e-5
        shutil.rmtree(folder)


@pytest.mark.parametrize("word", ["I16", "F8_E4M3"])
def test_a_weight_of_a_dtype_that_is_no_weight_is_named(
    make: Callable[..., Path], word: str
) -> None:
    def retype(tensors: Tensors) -> None:
        _, shape, data = tensors[NORM]
        tensors[NORM] = (word, shape, data[: shape[0] * (2 if word == "I16" else 1)])

    with pytest.raises(UnsupportedModel, match=f"'{NORM}' has dtype {word}.*BF16"):
        open_model(make("mixtral", retype))


def test_a_config_that_does_not_fit_the_tensors_names_a_tensor(make: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"gate.weight' has shape \[8, 64\].*\[7, 64\]"):
        open_model(make("mixtral", num_local_experts=7))


def test_an_unknown_key_or_model_type_is_named_with_the_file(make: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json: the key 'logit_scale'"):
        open_model(make("olmoe", logit_scale=2.0))
    assert open_model(GOLDEN / "olmoe").config.num_experts == 8
    with pytest.raises(UnsupportedModel, match="model_type 'phi'"):
        open_model(make("llama", model_type="phi"))


def test_a_name_is_loaded_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--org--olmoe"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("c0ffee")
    snapshot = model / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):  # as there, links to blobs
        shutil.copy(GOLDEN / "olmoe" / file, model / file)
        (snapshot / file).symlink_to(model / file)
    assert open_model("org/olmoe").config.model_type == "olmoe"
    with pytest.raises(CheckpointError, match="org/other"):
        open_model("org/other")


def test_config_keys_can_be_ignored(make: Callable[..., Path]) -> None:
    folder = make("olmoe", logit_scale=2.0)
    assert open_model(folder, ignored=("logit_scale",)).config.model_type == "olmoe"


def test_a_format_that_cannot_hold_a_matrix_names_it() -> None:
    # 96 columns are 3 groups of 32, but qwen3's down_proj with 80 is none.
    opened = open_model(GOLDEN / "llama")
    parameter = next(p for p in opened.parameters if p.name == "layers.0.down_proj")
    w = read_parameter(opened, parameter)
    narrow = type(w)(w.format, (64, 80), w.codes[:, :80])
    with pytest.raises(ValueError, match=r"layers.0.down_proj .* cannot be fp4: .*80"):
        convert_parameter(parameter, narrow, {"mlp": "fp4"})


def test_head_dim_that_is_no_multiple_of_the_group() -> None:
    spec = open_model(GOLDEN / "qwen3_moe").spec
    with pytest.raises(
        UnsupportedModel, match=r"head_dim = 16 .*group_size = 32; use group_size 16"
    ):
        KVCache(1, 1, 16, spec.num_kv_heads, spec.head_dim, KVCacheConfig("fp4", "bf16"))


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    ("word", "only"), [("F32", ""), ("F16", ""), ("F32", "q_proj"), ("F32", "gate")]
)
def test_other_float_dtypes_give_the_same_logits(
    make: Callable[..., Path], name: str, word: str, only: str
) -> None:
    model = load_model(open_model(make(name, as_dtype(word, only))), {}, "cpu", quiet=True)
    golden = golden_arrays(name)
    for chunk in (200, 7):
        logits = logits_in_chunks(model, golden["input_ids"], chunk)
        # fp16 cannot hold the smallest bf16 weights exactly.
        assert relative_error(logits, golden["logits"]) < (1e-5 if word == "F32" else 1e-4)


@pytest.mark.parametrize("name", ["mixtral", "llama", "olmoe"])
@pytest.mark.parametrize("format", [f for f in WEIGHT_FORMATS if f != "bf16"])
def test_converted_weights_stay_near_the_model(name: str, format: str) -> None:
    policy = dict.fromkeys(("experts", "mlp", "attention", "lm_head"), format)
    model = load_model(open_model(GOLDEN / name), policy, "cpu", quiet=True)
    golden = golden_arrays(name)
    few, many = (logits_in_chunks(model, golden["input_ids"], n) for n in (5, 200))
    assert relative_error(few, many) < 1e-5
    off = np.abs(many - golden["logits"]).mean() / golden["logits"].std()
    share = {"fp32": 1e-5, "fp16": 1e-4, "int8": 0.1, "fp8": 0.4}.get(format, 1.2)
    assert off < share
    assert format in ("fp32", "fp16") or off > 1e-4, "nothing was converted"


@pytest.mark.parametrize("format", FOUR_BIT)
def test_only_the_named_parts_are_converted(format: str) -> None:
    model = load_model(open_model(GOLDEN / "qwen3_moe"), {"experts": format}, "cpu", quiet=True)
    formats = {n: w.format for n, w in model.weights.items() if hasattr(w, "format")}
    experts = {"layers.0.gate_up_proj", "layers.0.down_proj", "layers.2.gate_up_proj"}
    experts.add("layers.2.down_proj")  # layer 1 is dense
    assert {n for n, f in formats.items() if f == format} == experts
    assert {f for n, f in formats.items() if n not in experts} == {"bf16"}
    assert model.nbytes < golden_model("qwen3_moe").nbytes
