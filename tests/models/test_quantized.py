"""Checkpoints that others quantised: every value, what runs, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npmoe.config import KVCacheConfig
from npmoe.errors import CheckpointError, UnsupportedModel
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.models.conversion import conversions, loaded_formats
from npmoe.models.convert import convert_checkpoint
from npmoe.models.loader import load_model
from npmoe.models.memory import need_of
from npmoe.models.parameters import ROUTER, TABLE, VECTOR
from npmoe.models.stored import OpenModel, open_model, read_parameter, stored_formats
from npmoe.models.summary import Memory, describe, summarize
from tests.helpers import (
    GOLDEN,
    by_name,
    golden_arrays,
    logits_in_chunks,
    read_safetensors,
    relative_error,
    write_safetensors,
)
from tests.quantized_files import CASES, GOLDEN_CASES, Case, make_quantized

BY_NAME = {case.name: case for case in CASES}
QKV = tuple(f"self_attn.{n}_proj" for n in "qkv")


def read(opened: OpenModel, name: str) -> QuantTensor:
    w = read_parameter(opened, next(p for p in opened.parameters if p.name == name))
    assert isinstance(w, QuantTensor)
    return w


def joined(values: dict[str, np.ndarray], *names: str) -> np.ndarray:
    return np.concatenate([values[name] for name in names])


@by_name(CASES)
def test_every_value_is_read_exactly(case: Case, tmp_path: Path) -> None:
    folder, values = make_quantized(tmp_path / "model", case)
    opened = open_model(folder)
    layer = "model.layers.0."
    expected = {
        "qkv_proj": joined(values, *(layer + name for name in QKV)),
        "o_proj": values[layer + "self_attn.o_proj"],
        "gate_up_proj": np.stack(
            [
                joined(values, *(f"{layer}mlp.experts.{e}.{n}_proj" for n in ("gate", "up")))
                for e in range(8)
            ]
        ),
        "down_proj": np.stack([values[f"{layer}mlp.experts.{e}.down_proj"] for e in range(8)]),
    }
    for name, wanted in expected.items():
        w = read(opened, f"layers.0.{name}")
        assert (w.format, w.shape) == (case.format, wanted.shape), name
        found = w.dequantize()
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, wanted.astype(np.float32), err_msg=name)
    assert read(opened, "layers.0.down_proj").block == case.down_block
    assert read(opened, "layers.0.router").format == "bf16"


@by_name(CASES)
def test_it_runs_as_its_values_in_float32_do(case: Case, tmp_path: Path) -> None:
    folder, _ = make_quantized(tmp_path / "model", case)
    ids = golden_arrays("qwen3_moe")["input_ids"][:30]
    quantized, plain = (
        load_model(open_model(path), {}, "cpu", quiet=True)
        for path in (folder, tmp_path / "model-plain")
    )
    expected = logits_in_chunks(plain, ids, 30)
    for chunk in (1, 30):
        assert relative_error(logits_in_chunks(quantized, ids, chunk), expected) < 2e-5


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, _ = make_quantized(tmp_path / "model", BY_NAME[name], "qwen3")
    with np.load(GOLDEN / "quantized.npz") as golden:
        expected = golden[name]
    ids = golden_arrays("qwen3")["input_ids"][:40]
    model = load_model(open_model(folder), {}, "cpu", quiet=True)
    assert relative_error(logits_in_chunks(model, ids, 40), expected) < 1e-5


@by_name(CASES)
def test_info_names_it_and_reads_no_weight(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = make_quantized(tmp_path / "model", case)

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(np, "memmap", refuse)
    opened = open_model(folder)
    summary = summarize(opened, [Memory("here", 1e9, cpu=True), Memory("24 GB", 24e9)])
    assert summary.formats["experts"] == f"{case.format} ({case.word})"
    assert summary.formats["router"] == "bf16"
    assert case.word in describe(summary)


@by_name([case for case in CASES if "float32" not in case.name])
def test_memory_is_what_it_is_said_to_be(case: Case, tmp_path: Path) -> None:
    """But for routers, whose few rows fill a tile here, and for scales that fp16 cannot hold, which
    only their values show."""
    opened = open_model(make_quantized(tmp_path / "model", case)[0])
    model = load_model(opened, {}, "cpu", quiet=True)
    parts = [p for p in opened.parameters if p.part not in (VECTOR, TABLE, ROUTER)]
    kept = sum(model.weights[p.name].nbytes for p in parts)
    routers = 2 * 8 * 64 * 2  # layers, experts, columns, bytes
    said = need_of(opened, {}, KVCacheConfig("fp32", "fp32", 16), "cpu").weights
    assert said - routers == pytest.approx(kept, rel=0.03)


def test_what_runs_otherwise_is_said(tmp_path: Path) -> None:
    def lines(name: str, device: str, **policy: str) -> str:
        folder = tmp_path / f"{name}-{device}-{len(policy)}"
        opened = open_model(make_quantized(folder, BY_NAME[name])[0])
        return "; ".join(conversions(opened, policy, loaded_formats(opened, policy, device)))

    assert lines("awq", "cpu") == lines("nvfp4-modelopt", "cuda") == ""
    reordered = "GPTQ int4 with zero points, groups of 16 in any order has no equal here"
    assert f"experts: {reordered}, converted to fp32" in lines("gptq-reordered", "cpu")
    assert f"experts: {reordered}, converted to bf16" in lines("gptq-reordered", "cuda")
    assert "experts" not in lines("gptq-reordered", "cpu", experts="int4")
    assert "attention: GPTQ int8, rows has no equal here, converted to bf16" in lines(
        "gptq-int8", "cuda"
    )


def change_tensors(folder: Path, change: Any) -> None:
    tensors = read_safetensors(folder / "model.safetensors")
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("fp8-blocks", "weight_scale_inv"),
        ("fp8-rows", "weight_scale"),
        ("nvfp4-modelopt", "weight_scale_2"),
        ("nvfp4-compressed", "weight_global_scale"),
        ("w4a16", "weight_scale"),
        ("w4a16-asymmetric", "weight_zero_point"),
        ("w4a16-reordered", "weight_g_idx"),
        ("awq", "qzeros"),
        ("gptq-reordered", "g_idx"),
    ],
)
def test_a_missing_tensor_is_named(name: str, suffix: str, tmp_path: Path) -> None:
    folder, _ = make_quantized(tmp_path / "model", BY_NAME[name])
    module = "model.layers.2.mlp.experts.7.up_proj"
    change_tensors(folder, lambda tensors: tensors.pop(f"{module}.{suffix}"))
    with pytest.raises((CheckpointError, UnsupportedModel), match=module):
        open_model(folder)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("fp8-blocks", {"fmt": "e5m2"}, "fmt = 'e5m2'"),
        ("fp8-blocks", {"weight_block_size": 128}, "weight_block_size = 128"),
        ("fp8-blocks", {"rotation": "hadamard"}, "rotation"),
        ("fp8-blocks", {"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ("nvfp4-modelopt", {"quant_algo": "NVFP4_AWQ"}, "quant_algo = 'NVFP4_AWQ'"),
        ("nvfp4-modelopt", {"group_size": 32}, "group_size = 32"),
        ("w4a16", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("w4a16", {"format": "int-quantized"}, "format 'int-quantized' with 4-bit int weights"),
        ("w4a16", {"ignore": ["re:("]}, "regular expression"),
        ("awq", {"version": "gemv"}, "version = 'gemv'"),
        ("awq", {"bits": 3}, "bits = 3"),
        ("awq", {"zero_point": False}, "zero_point = False"),
        ("gptq", {"bits": 2}, "bits = 2"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ("gptq", {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
    ],
)
def test_what_is_not_implemented_is_named(
    name: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder, _ = make_quantized(tmp_path / "model", BY_NAME[name])
    change_config(folder, **changes)
    with pytest.raises(UnsupportedModel) as caught:
        open_model(folder)
    assert said in str(caught.value)


def test_integer_activations_are_refused(tmp_path: Path) -> None:
    folder, _ = make_quantized(tmp_path / "model", BY_NAME["w8a16"])
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="input_activations"):
        open_model(folder)


def test_config_and_values_that_contradict_each_other(tmp_path: Path) -> None:
    folder, _ = make_quantized(tmp_path / "symmetric", BY_NAME["gptq"])
    change_config(folder, sym=True)
    with pytest.raises(CheckpointError, match=r"0\.self_attn\.q_proj: a zero point is not 8"):
        read(open_model(folder), "layers.0.qkv_proj")
    folder, _ = make_quantized(tmp_path / "order", BY_NAME["gptq-reordered"])
    change_config(folder, desc_act=False)
    with pytest.raises(CheckpointError, match="g_idx reorders the columns"):
        read(open_model(folder), "layers.0.qkv_proj")
    folder, _ = make_quantized(tmp_path / "ignored", BY_NAME["awq"])
    change_config(folder, modules_to_not_convert=["mlp.gate", "o_proj"])
    with pytest.raises(CheckpointError, match=r"self_attn\.o_proj is left out by 'o_proj'"):
        open_model(folder)


def test_modules_that_are_left_out_keep_their_type(tmp_path: Path) -> None:
    """Layer 0's attention as it was: its part has two formats, each matrix keeps its own."""
    folder, _ = make_quantized(tmp_path / "model", BY_NAME["fp8-blocks"])
    plain = read_safetensors(tmp_path / "model-plain" / "model.safetensors")
    first = "model.layers.0.self_attn."

    def restore(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith(first)]:
            del tensors[name]
        tensors.update({n: t for n, t in plain.items() if n.startswith(first)})

    change_tensors(folder, restore)
    change_config(folder, modules_to_not_convert=["model.layers.0.self_attn"])
    opened = open_model(folder)
    assert stored_formats(opened)["attention"] == "mixed"
    words = summarize(opened, []).formats["attention"]
    assert words == "fp32 and fp8 (FP8, blocks of 24x32)"
    model = load_model(opened, {}, "cpu", quiet=True)
    formats = [model.weights[f"layers.{i}.qkv_proj"].format for i in range(3)]
    assert formats == ["fp32", "fp8", "fp8"]


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder, _ = make_quantized(tmp_path / "model", BY_NAME["nvfp4-modelopt"])
    config = json.loads((folder / "config.json").read_text())
    stated = config.pop("quantization_config")
    stated.pop("quant_method")
    (folder / "config.json").write_text(json.dumps(config))
    own = {"producer": {"name": "modelopt", "version": "0.33"}, "quantization": stated}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    assert stored_formats(open_model(folder))["experts"] == "nvfp4"


def test_the_divisor_of_compressed_tensors_may_be_any_number(tmp_path: Path) -> None:
    folder, values = make_quantized(tmp_path / "model", BY_NAME["nvfp4-compressed"])
    name = "model.layers.0.self_attn.o_proj.weight_global_scale"
    before = 0.0

    def divide_by(tensors: dict[str, Any]) -> None:
        nonlocal before
        before = float(np.frombuffer(tensors[name][2], np.float32)[0])
        tensors[name] = ("F32", [1], np.array([1344.7], np.float32).tobytes())

    change_tensors(folder, divide_by)
    exact = values["model.layers.0.self_attn.o_proj"] * before / np.float64(np.float32(1344.7))
    found = read(open_model(folder), "layers.0.o_proj").dequantize()
    np.testing.assert_allclose(found, exact, rtol=2**-22)


def test_it_is_not_quantised_again(tmp_path: Path) -> None:
    folder, _ = make_quantized(tmp_path / "model", BY_NAME["awq"])
    opened = open_model(folder)
    with pytest.raises(UnsupportedModel, match="experts is int4_asym already"):
        loaded_formats(opened, {"experts": "fp8"}, "cpu")
    with pytest.raises(UnsupportedModel, match="own layout does not hold"):
        convert_checkpoint(folder, tmp_path / "new", {"lm_head": "fp8"}, quiet=True)
    assert not (tmp_path / "new").exists()
    policy = dict.fromkeys(("experts", "mlp", "attention"), "fp32")
    convert_checkpoint(folder, tmp_path / "wide", policy, quiet=True)
    wide, here = (read(open_model(f), "layers.0.down_proj") for f in (tmp_path / "wide", folder))
    np.testing.assert_array_equal(wide.dequantize(), here.dequantize())
