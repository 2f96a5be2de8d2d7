"""gpt_oss: MXFP4 and dense experts as they lie in the files, converting, and what is refused."""

import json
import math
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from npmoe.errors import CheckpointError, UnsupportedModel
from npmoe.models.convert import convert_checkpoint
from npmoe.models.families import read_model
from npmoe.models.loader import load_model
from npmoe.models.stored import OpenModel, open_model, read_parameter
from npmoe.models.summary import STORED, Memory, summarize
from tests.golden.golden_cases import CASES, without
from tests.helpers import GOLDEN, golden_arrays, golden_model, logits_in_chunks, relative_error

HUB = CASES["gpt_oss"]
BLOCK = "model.layers.0.mlp.experts."
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def read_by_name(opened: OpenModel, name: str) -> Any:
    return read_parameter(opened, next(p for p in opened.parameters if p.name == name))


def gate_first(a: np.ndarray) -> np.ndarray:
    """Alternating rows `[E, 2I, ...]` with the gate's rows first."""
    return np.concatenate([a[:, 0::2], a[:, 1::2]], axis=1)


def test_mxfp4_is_read_value_by_value(make: Callable[..., Path]) -> None:
    """Every byte and scale random, against a decoding written out here."""
    rng = np.random.default_rng(5)

    def fill(tensors: dict[str, np.ndarray]) -> None:
        for name in [n for n in tensors if n.endswith(("_blocks", "_scales"))]:
            low, high = (0, 256) if name.endswith("_blocks") else (1, 253)
            tensors[name] = rng.integers(low, high, tensors[name].shape, np.uint8)

    opened = open_model(make("gpt_oss", fill))
    for which in ("gate_up_proj", "down_proj"):
        blocks, scales = (
            opened.checkpoint.get(f"{BLOCK}{which}_{n}") for n in ("blocks", "scales")
        )
        want = np.empty((*blocks.shape, 2), np.float32)
        want[..., 0], want[..., 1] = E2M1[blocks & 15], E2M1[blocks >> 4]
        want = np.ldexp(want.reshape(*scales.shape, 32), scales[..., None].astype(int) - 127)
        want = want.reshape(*scales.shape[:2], -1)
        w = read_by_name(opened, f"layers.0.{which}")
        assert (w.format, w.block, w.shape) == ("mxfp4", (1, 32), want.shape)
        expected = gate_first(want) if which == "gate_up_proj" else want
        np.testing.assert_array_equal(w.dequantize(), expected)
        assert w.nbytes == blocks.nbytes + scales.nbytes


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_v5"])
def test_biases_are_read_gate_first(name: str) -> None:
    opened = open_model(GOLDEN / name)
    for ours, theirs in (("gate_up_bias", "gate_up_proj_bias"), ("down_bias", "down_proj_bias")):
        stored = opened.checkpoint.get(BLOCK + theirs).astype(np.float32)
        expected = gate_first(stored) if ours == "gate_up_bias" else stored
        bias = read_by_name(opened, f"layers.0.{ours}")
        assert bias.dtype == np.float32
        np.testing.assert_array_equal(bias, expected)


def test_dense_experts_are_transposed() -> None:
    opened = open_model(GOLDEN / "gpt_oss_v5")
    stored = opened.checkpoint.get(f"{BLOCK}gate_up_proj").astype(np.float32)
    w = read_by_name(opened, "layers.0.gate_up_proj")
    assert stored.shape == (4, 64, 96)
    np.testing.assert_array_equal(w.dequantize(), gate_first(stored.transpose(0, 2, 1)))
    down = opened.checkpoint.get(f"{BLOCK}down_proj").astype(np.float32)
    expected = down.transpose(0, 2, 1)
    np.testing.assert_array_equal(read_by_name(opened, "layers.0.down_proj").dequantize(), expected)


def test_loading_never_expands_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(w: Any) -> None:
        raise AssertionError(f"{w.format} was expanded")

    monkeypatch.setattr("npmoe.formats.quant_tensor.QuantTensor.dequantize", refuse)
    model = load_model(open_model(GOLDEN / "gpt_oss"), {}, "cpu", quiet=True)
    assert {model.weights[f"layers.1.{n}_proj"].format for n in ("gate_up", "down")} == {"mxfp4"}


def test_reading_holds_one_matrix_at_a_time(tmp_path: Path) -> None:
    """Of 4 MB in 12 layers, stored in MXFP4: what is put in order on the way to a device."""
    raw = CASES["gpt_oss"] | {"num_hidden_layers": 12, "intermediate_size": 128}
    raw |= {"num_local_experts": 8, "hidden_size": 128}
    _, _, parameters = read_model(raw, "here")
    tensors: dict[str, np.ndarray] = {}
    for p in parameters:
        *lead, columns = p.shape
        if p.fused is None:
            names = zip(p.sources[0], p.rows, strict=True)
            tensors |= {n: np.zeros((rows, *p.shape[1:]), np.float16) for n, rows in names}
        elif p.part == "experts":
            tensors[f"{p.fused}_blocks"] = np.zeros((*lead, columns // 32, 16), np.uint8)
            tensors[f"{p.fused}_scales"] = np.zeros((*lead, columns // 32), np.uint8)
        else:
            tensors[p.fused] = np.zeros(p.shape, np.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    opened = open_model(tmp_path)
    tracemalloc.start()
    for p in opened.parameters:
        read_parameter(opened, p)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert opened.checkpoint.nbytes > 4e6
    assert peak < 0.2 * opened.checkpoint.nbytes


@pytest.mark.parametrize("policy", [{"attention": "fp8"}, {"experts": "mxfp4", "lm_head": "int8"}])
def test_converted_it_keeps_mxfp4(tmp_path: Path, policy: dict[str, str]) -> None:
    source, target = open_model(GOLDEN / "gpt_oss"), tmp_path / "new"
    formats = convert_checkpoint(GOLDEN / "gpt_oss", target, policy, quiet=True)
    assert formats["experts"] == "mxfp4"
    converted = open_model(target)
    before, after = (read_by_name(o, "layers.1.gate_up_proj") for o in (source, converted))
    np.testing.assert_array_equal(after.codes, before.codes)
    np.testing.assert_array_equal(after.scales, before.scales)
    ids = golden_arrays("gpt_oss")["input_ids"][:40]
    loaded = [load_model(o, policy, "cpu", quiet=True) for o in (source, converted)]
    np.testing.assert_array_equal(*(logits_in_chunks(model, ids, 40) for model in loaded))


def test_converting_the_dense_layout_gives_what_converting_at_load_gives(tmp_path: Path) -> None:
    source, target = GOLDEN / "gpt_oss_v5", tmp_path / "new"
    convert_checkpoint(source, target, {"experts": "fp8", "attention": "fp16"}, quiet=True)
    policy = {"experts": "fp8", "attention": "fp16"}
    ids = golden_arrays("gpt_oss_v5")["input_ids"][:40]
    loaded = [load_model(open_model(f), policy, "cpu", quiet=True) for f in (source, target)]
    np.testing.assert_array_equal(*(logits_in_chunks(model, ids, 40) for model in loaded))


def test_other_formats_for_mxfp4_experts(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"experts is mxfp4 already; .*fp8 would lose twice"):
        convert_checkpoint(GOLDEN / "gpt_oss", tmp_path / "new", {"experts": "fp8"}, quiet=True)
    exact = load_model(open_model(GOLDEN / "gpt_oss"), {"experts": "fp32"}, "cpu", quiet=True)
    golden = golden_arrays("gpt_oss")
    logits = logits_in_chunks(exact, golden["input_ids"], 200)
    assert relative_error(logits, golden["logits"]) < 1e-5


def test_what_info_counts() -> None:
    opened = open_model(GOLDEN / "gpt_oss")
    summary = summarize(opened, [Memory("here", 1e9, cpu=True)])
    assert sum(summary.stored_bytes.values()) == opened.checkpoint.nbytes
    experts = 2 * 8 * 3 * 32 * 64  # layers, experts, matrices
    biases = 2 * 8 * (64 + 64)
    assert summary.formats["experts"] == "mxfp4"
    assert summary.stored_bytes["experts"] == experts * (16 + 1) / 32
    assert summary.parameters_active == summary.parameters_total - (experts + biases) * 5 // 8
    all_experts = experts * 17 / 32 + 4 * biases
    read, table = summary.read_bytes[STORED], 128 * 64 * 2
    whole = sum(summary.stored_bytes.values()) + summary.stored_bytes["vector"]  # float32 vectors
    assert read == pytest.approx(whole - all_experts * 5 / 8 - table * 127 / 128)
    here = next(fit.weight_bytes for fit in summary.fits if fit.weights == STORED)
    assert golden_model("gpt_oss").nbytes == pytest.approx(here, rel=0.2)  # rows padded to 64


def test_a_config_without_quantization_asks_for_dense_experts(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "gpt_oss", tmp_path / "dense"))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(without(raw, "quantization_config")))
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj'.* missing"):
        open_model(folder)


@pytest.mark.parametrize("ending", ["blocks", "scales"])
def test_missing_or_misshapen_mxfp4_is_named(make: Callable[..., Path], ending: str) -> None:
    name = f"{BLOCK}down_proj_{ending}"
    folder = make("gpt_oss", lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"tensor '{name}' missing"):
        open_model(folder)
    shutil.rmtree(folder)
    folder = make("gpt_oss", lambda t: t.update({name: t[name][:, :-1].copy()}))
    with pytest.raises(CheckpointError, match=rf"'{name}' has shape \[8, 63"):
        open_model(folder)
    shutil.rmtree(folder)
    folder = make("gpt_oss", lambda t: t.update({name: t[name].astype(np.int8)}))
    with pytest.raises(UnsupportedModel, match=rf"'{name}' has dtype I8; it is read as U8"):
        open_model(folder)


def read(raw: dict[str, Any]) -> Any:
    return read_model(raw, "config.json")[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "fp8"}),
        ("quantization_config", {"quant_method": "mxfp4", "group_size": 16}),
        ("quantization_config", "mxfp4"),
        ("intermediate_size", 48),
        ("swiglu_limit", 0),
        ("swiglu_alpha", "1.7"),
        ("sliding_window", -1),
        ("layer_types", ["full_attention", "chunked_attention"]),
        ("rope_scaling", None),
    ],
)
def test_a_config_that_is_not_implemented_is_named(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match="rope_parameters" if value is None else key):
        read(HUB | {key: value})


@pytest.mark.parametrize("value", [{"quant_method": "mxfp4"}, "mxfp4", ["mxfp4"]])
def test_only_gpt_oss_takes_mxfp4(make: Callable[..., Path], value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json: quantization_config"):
        open_model(make("mixtral", quantization_config=value))


@pytest.mark.parametrize(("layers", "experts", "billions"), [(24, 32, 20.91), (36, 128, 116.83)])
def test_parameters_of_the_published_sizes(layers: int, experts: int, billions: float) -> None:
    """Against the totals in the model card (arXiv 2508.10925, table 1)."""
    sizes = {
        **{"hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "vocab_size": 201088},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4},
        **{"num_hidden_layers": layers, "num_local_experts": experts, "layer_types": None},
    }
    config, spec, parameters = read_model(HUB | sizes, "config.json")
    total = sum(math.prod(p.shape) for p in parameters)
    assert total / 1e9 == pytest.approx(billions, abs=0.005)
    assert config.layer_windows == (20, None) * (layers // 2)
    assert spec.layers[0].mlp.activation.limit == 1.5


def test_defaults() -> None:
    config = read(without(HUB, "sliding_window", "swiglu_limit", "rms_norm_eps", "attention_bias"))
    assert config.layer_windows == (128, None)
    assert (config.swiglu_alpha, config.swiglu_limit) == (1.702, 7.0)
    assert (config.rms_norm_eps, config.attention_bias) == (1e-5, True)
    assert read(CASES["gpt_oss_v5"]).layer_windows == (None, 20)
