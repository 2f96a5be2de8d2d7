"""qwen3_next and qwen3_5_moe: tensors as they lie in the files, converting, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from npmoe.config import ConfigReader, KVCacheConfig
from npmoe.errors import CheckpointError, UnsupportedModel
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.models import qwen3_next
from npmoe.models.convert import convert_checkpoint
from npmoe.models.decode_spec import check_decode_spec
from npmoe.models.families import read_model
from npmoe.models.loader import load_model
from npmoe.models.memory import need_of
from npmoe.models.specs import AttentionSpec, DeltaNetSpec
from npmoe.models.stored import open_model, read_parameter, regrouped
from npmoe.models.summary import describe, summarize
from tests.golden.golden_cases import CASES, without
from tests.helpers import GOLDEN, golden_arrays, golden_model, logits_in_chunks, relative_error

Tensors = dict[str, np.ndarray]
FAMILY = ["qwen3_next", "qwen3_next_v5", "qwen3_5_moe", "qwen3_5_moe_text"]
every_case = pytest.mark.parametrize("name", FAMILY)


def stored(name: str, tensor: str) -> np.ndarray:
    return open_model(GOLDEN / name).checkpoint.get(tensor).astype(np.float32)


def read(name: str, parameter: str) -> Any:
    opened = open_model(GOLDEN / name)
    return read_parameter(opened, next(p for p in opened.parameters if p.name == parameter))


def test_norms_are_stored_from_one_but_for_the_delta_nets() -> None:
    for ours, theirs, offset in (
        ("norm", "model.norm.weight", 1),
        ("layers.0.input_layernorm", "model.layers.0.input_layernorm.weight", 1),
        ("layers.1.q_norm", "model.layers.1.self_attn.q_norm.weight", 1),
        ("layers.0.delta_norm", "model.layers.0.linear_attn.norm.weight", 0),
    ):
        np.testing.assert_array_equal(
            read("qwen3_next", ours), stored("qwen3_next", theirs) + offset
        )


def test_grouped_projections_are_read_part_by_part() -> None:
    # 2 key heads of 16 with 2 value heads of 16 each: groups of 16 q, 16 k, 32 v and 32 z rows.
    groups = stored("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz.weight")
    first, second = groups[:96], groups[96:]
    parts = [
        rows[a:b] for a, b in ((0, 16), (16, 32), (32, 64), (64, 96)) for rows in (first, second)
    ]
    qkvz = read("qwen3_next", "layers.0.qkvz_proj").dequantize()
    np.testing.assert_array_equal(qkvz, np.concatenate(parts))
    gates = stored("qwen3_next", "model.layers.0.linear_attn.in_proj_ba.weight")
    ba = read("qwen3_next", "layers.0.ba_proj").dequantize()
    np.testing.assert_array_equal(ba, gates[[0, 1, 4, 5, 2, 3, 6, 7]])


def test_four_projections_are_joined() -> None:
    block = "model.layers.0.linear_attn.in_proj_"
    for ours, theirs in (("qkvz_proj", ("qkv", "z")), ("ba_proj", ("b", "a"))):
        want = [stored("qwen3_5_moe_text", f"{block}{part}.weight") for part in theirs]
        joined = read("qwen3_5_moe_text", f"layers.0.{ours}").dequantize()
        np.testing.assert_array_equal(joined, np.concatenate(want))


def test_fused_experts_give_the_same(make: Callable[..., Path]) -> None:
    def fuse(tensors: Tensors) -> None:
        for i in range(2):
            block = f"model.language_model.layers.{i}.mlp.experts"
            experts = [
                [tensors.pop(f"{block}.{e}.{n}_proj.weight") for n in ("gate", "up", "down")]
                for e in range(8)
            ]
            tensors[f"{block}.gate_up_proj"] = np.stack([np.concatenate(e[:2]) for e in experts])
            tensors[f"{block}.down_proj"] = np.stack([e[2] for e in experts])

    model = load_model(open_model(make("qwen3_5_moe", fuse)), {}, "cpu", quiet=True)
    ids = golden_arrays("qwen3_5_moe")["input_ids"][:20]
    want = logits_in_chunks(golden_model("qwen3_5_moe"), ids, 20)
    np.testing.assert_array_equal(logits_in_chunks(model, ids, 20), want)


@every_case
def test_mtp_layers_are_left_out_with_a_note(
    make: Callable[..., Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(tensors: Tensors) -> None:
        for tensor in [t for t in tensors if t.startswith("model.visual.")]:
            del tensors[tensor]
        tensors["mtp.fc.weight"] = np.ones((64, 128), np.float32)

    load_model(open_model(make(name, add)), {}, "cpu")
    assert "left out tensor 'mtp.fc.weight': no part of this model" in capsys.readouterr().err


def test_a_vision_tower_belongs_to_the_multimodal_model_alone(make: Callable[..., Path]) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.visual.norm.weight"] = np.ones(4, np.float32)

    open_model(make("qwen3_5_moe", add))
    with pytest.raises(CheckpointError, match=r"model.visual.norm.weight.* not used"):
        open_model(make("qwen3_5_moe_text", add))


@every_case
def test_converted_and_loaded_again(name: str, tmp_path: Path) -> None:
    convert_checkpoint(GOLDEN / name, tmp_path / "new", {"attention": "fp32"}, quiet=True)
    model = load_model(open_model(tmp_path / "new"), {}, "cpu", quiet=True)
    golden = golden_arrays(name)
    logits = logits_in_chunks(model, golden["input_ids"], 64)
    assert relative_error(logits, golden["logits"]) < 1e-5


@every_case
def test_refused_on_the_gpu_by_name(name: str) -> None:
    spec = read_model(CASES[name], "config.json")[1]
    with pytest.raises(UnsupportedModel, match="linear attention by the gated delta rule; use dev"):
        check_decode_spec(spec)


def test_which_layers_are_linear() -> None:
    kinds = qwen3_next.layer_is_linear(ConfigReader({"num_hidden_layers": 8}, ""))
    assert kinds == (True, True, True, False) * 2
    spec = read_model(CASES["qwen3_next"], "config.json")[1]
    assert spec.layers[0].attention == DeltaNetSpec(2, 4, 16, 16, 4)
    assert isinstance(spec.layers[1].attention, AttentionSpec)
    assert spec.layers[1].attention.output_gate
    assert (spec.num_kv_layers, spec.num_kv_heads, spec.head_dim) == (1, 2, 32)


@pytest.mark.parametrize("name", FAMILY)
def test_a_quarter_of_each_head_turns_where_nothing_else_is_said(name: str) -> None:
    config = without(CASES[name], "partial_rotary_factor", "rope_parameters")
    if name == "qwen3_5_moe":
        config |= {"text_config": without(config["text_config"], "rope_parameters")}
    assert read_model(config, "")[0].rope.partial_rotary_factor == 0.25


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "no 'full_attention' layer"),
        ({"layer_types": ["linear_attention"]}, "layer_types .* for 3 layers"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types .* is not implemented"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads = 3 is not a multiple"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1"),
        ({"linear_novelty": 2}, "'linear_novelty'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
    ids=str,
)
def test_refused_configs(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        read_model(CASES["qwen3_next"] | change, "config.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_config": 3}, "text_config = 3, expected an object"),
        ({"text_config": CASES["qwen3_5_moe"]["text_config"] | {"novelty": 1}}, "'novelty'"),
        ({"novelty": 1}, "'novelty'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (
            {"text_config": CASES["qwen3_5_moe"]["text_config"] | {"attn_output_gate": False}},
            "attn_output_gate = False",
        ),
    ],
    ids=["no_object", "text_key", "key", "quantised", "no_gate"],
)
def test_refused_multimodal_configs(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        read_model(CASES["qwen3_5_moe"] | change, "config.json")


def test_an_ignored_key_is_ignored_in_the_text_config_too() -> None:
    text = CASES["qwen3_5_moe"]["text_config"] | {"novelty": 1}
    read_model(CASES["qwen3_5_moe"] | {"text_config": text}, "", ("novelty",))


def test_states_are_counted() -> None:
    # Two delta-net layers: 3 inputs of 2 * 32 + 64 channels, and 4 heads of 16 x 16, float32.
    opened = open_model(GOLDEN / "qwen3_next")
    size = 2 * 4 * (3 * 128 + 4 * 16 * 16)
    assert opened.spec.state_bytes == size
    assert (
        need_of(opened, {}, KVCacheConfig("fp32", "fp32"), "cpu", max_num_seqs=6).staying
        == 7 * size
    )
    summary = summarize(opened, [])
    assert summary.state_bytes == size
    assert summary.kv_bytes["fp32"] == 2 * 2 * 32 * 4  # of the one layer that has pages
    assert "recurrent states for each sequence: 11.3 kB" in describe(summary)
    assert "recurrent" not in describe(summarize(open_model(GOLDEN / "qwen3_moe"), []))


def test_a_head_that_is_called_tied_and_differs_counts(make: Callable[..., Path]) -> None:
    folder = make("qwen3_5_moe", lambda tensors: None)
    config = CASES["qwen3_5_moe"] | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    assert not open_model(folder).spec.tied


def blocked(block_rows: int) -> QuantTensor:
    """Eight rows in two groups of (2, 2); row r holds r, times 100 from the second block on."""
    codes = np.repeat(np.arange(8, dtype=np.float32)[:, None], 2, axis=1)
    scales = np.float32([[1 if r < block_rows else 100] for r in range(0, 8, block_rows)])
    fp8 = codes.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return QuantTensor("fp8", codes.shape, fp8, scales, block=(block_rows, 2))


@pytest.mark.parametrize("block_rows", [2, 8])
def test_scales_of_blocks_go_with_their_rows(block_rows: int) -> None:
    found = regrouped(blocked(block_rows), (2, 2), "w").dequantize()[:, 0]
    factor = 100 if block_rows == 2 else 1
    expected = np.array([0, 1, 4, 5, 2, 3, 6, 7]) * np.where([1, 1, 0, 0, 0, 0, 0, 0], 1, factor)
    assert (found == expected).all()


def test_a_scale_for_rows_of_two_parts_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="w: one scale for 4 rows does not go with parts"):
        regrouped(blocked(4), (2, 2), "w")
