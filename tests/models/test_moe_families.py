"""Families with selection biases, shared experts and scales: names, defaults, what is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npmoe.errors import CheckpointError, UnsupportedModel
from npmoe.models.convert import convert_checkpoint
from npmoe.models.families import read_model
from npmoe.models.loader import load_model
from npmoe.models.specs import ExpertSpec, ModelSpec, SharedSpec
from npmoe.models.stored import open_model, read_parameter
from npmoe.models.summary import summarize
from npmoe.ops.route import TopKRule
from tests.golden.golden_cases import CASES, without
from tests.helpers import GOLDEN, golden_arrays, golden_model, logits_in_chunks, relative_error

UNEQUAL = CASES["phimoe"]["rope_scaling"] | {"short_mscale": 1.0, "long_mscale": 1.5}


def spec_of(name: str, *missing: str, **changes: Any) -> ModelSpec:
    return read_model(without(CASES[name], *missing) | changes, "config.json")[1]


def experts_of(spec: ModelSpec) -> ExpertSpec:
    """Those of the first layer that has some."""
    return next(layer.mlp for layer in spec.layers if isinstance(layer.mlp, ExpertSpec))


def test_specs_say_what_the_configs_say() -> None:
    glm = experts_of(spec_of("glm4_moe"))
    assert glm.router.rule == TopKRule("sigmoid", 4, 2, "sum_of_two", 2.5)
    assert (glm.router.selection_bias, glm.router.renormalize) == (True, True)
    assert glm.shared == SharedSpec(16)
    assert experts_of(spec_of("dots1")).shared == SharedSpec(2 * 16)
    ernie = experts_of(spec_of("ernie4_5_moe"))
    assert (ernie.router.rule, ernie.router.selection_bias) == (TopKRule(), True)
    assert experts_of(spec_of("minimax_m2")).shared is None
    assert experts_of(spec_of("qwen2_moe")).shared == SharedSpec(48, gated=True)


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("glm4_moe", [True, False, False]),
        ("dots1", [True, False, False]),
        ("ernie4_5_moe", [True, False, False, True]),
        ("ernie4_5_moe_v5", [True, False]),
        ("qwen2_moe", [False, True, False]),
        ("minimax_m2", [False, False]),
    ],
)
def test_dense_layers(name: str, dense: list[bool]) -> None:
    layers = spec_of(name).layers
    assert [not isinstance(layer.mlp, ExpertSpec) for layer in layers] == dense


def test_absent_keys() -> None:
    groups = "n_group", "topk_group"
    glm = spec_of("glm4_moe", "partial_rotary_factor", "first_k_dense_replace", *groups)
    assert experts_of(glm).router.rule.num_groups == 1
    assert glm.rope.partial_rotary_factor == 0.5
    assert not isinstance(glm.layers[0].mlp, ExpertSpec)
    assert spec_of("minimax_m2", "rotary_dim", "rope_theta").rope.rope_theta == 5e6
    assert spec_of("minimax_m2").rope.partial_rotary_factor == 0.5  # 16 of 32
    assert spec_of("minimax_m2", "rotary_dim").rope.partial_rotary_factor == 1
    assert spec_of("ernie4_5_moe", "rope_theta").rope.rope_theta == 5e5
    assert spec_of("ernie4_5_moe").tied
    windows = [a.attention.window for a in spec_of("dots1", "sliding_window").layers]
    assert windows == [None, None, 4096]
    windows = [a.attention.window for a in spec_of("dots1", sliding_window=None).layers]
    assert windows == [None, None, None]
    windows = [a.attention.window for a in spec_of("qwen2_moe", max_window_layers=3).layers]
    assert windows == [20, None, 20]


def test_longrope_of_phimoe_keeps_both_tables_and_one_factor() -> None:
    scaling = CASES["phimoe"]["rope_scaling"] | {"long_factor": [2.0] * 8}
    spec = spec_of("phimoe", rope_scaling=scaling)
    assert (spec.rope.rope_type, spec.rope.attention_factor) == ("longrope", 1.25)
    assert spec.rope.long_factor == (2.0,) * 8
    assert spec.longrope_switch == 256


def test_alpha_of_hunyuan_stretches_theta() -> None:
    rope = spec_of("hunyuan_v1_moe", rope_scaling={"type": "dynamic", "alpha": 8.0}).rope
    assert (rope.rope_type, rope.factor) == ("default", None)
    assert rope.rope_theta == pytest.approx(10000 * 8 ** (32 / 30))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("glm4_moe", {"n_group": 3}, "n_group = 3"),
        ("glm4_moe", {"topk_group": 5}, "topk_group = 5"),
        ("glm4_moe", {"topk_group": 1}, "num_experts_per_tok = 3 from 1 groups"),
        ("glm4_moe", {"n_group": 8, "topk_group": 4}, "4 groups of 1 experts"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("glm4_moe", {"partial_rotary_factor": 0.1}, "partial_rotary_factor = 0.1"),
        ("glm4_moe", {"n_routed_experts": 10**7}, "at most 10,000"),
        ("dots1", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias = True"),
        ("ernie4_5_moe", {"moe_num_experts": [8, 8]}, "moe_num_experts"),
        ("minimax_m2", {"rotary_dim": 64}, "rotary_dim = 64"),
        ("minimax_m2", {"attn_type_list": [0, 1]}, "attn_type_list"),
        ("minimax_m2", {"layernorm_mlp_beta": 2.0}, "layernorm_mlp_beta"),
        ("minimax_m2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok = 3"),
        ("phimoe", {"rope_scaling": UNEQUAL}, "short_mscale = 1.0 with long_mscale = 1.5"),
        ("hunyuan_v1_moe", {"moe_topk": [3, 2]}, "moe_topk = [3, 2]"),
        ("hunyuan_v1_moe", {"num_shared_expert": [1, 2]}, "num_shared_expert = [1, 2]"),
        ("hunyuan_v1_moe", {"use_cla": True}, "use_cla"),
        ("hunyuan_v1_moe", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("hunyuan_v1_moe", {"rope_scaling": {"type": "yarn", "alpha": 2.0}}, "rope_scaling"),
        ("flex_olmo", {"clip_qkv": 1.0}, "clip_qkv"),
        ("granitemoe", {"residual_multiplier": -1}, "residual_multiplier"),
        ("qwen2_moe", {"mlp_only_layers": 1}, "mlp_only_layers"),
        ("qwen2_moe", {"something_new": 1}, "something_new"),
    ],
)
def test_what_is_not_implemented_is_named(name: str, changes: dict, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(words)):
        spec_of(name, **changes)


def add_mtp_layer(tensors: dict[str, np.ndarray]) -> None:
    """A layer past the last, as for multi-token prediction."""
    last = "model.layers.2."
    for name in [n for n in tensors if n.startswith(last)]:
        tensors[name.replace(last, "model.layers.3.")] = tensors[name] + tensors[name]
    tensors["model.layers.3.eh_proj.weight"] = np.ones((64, 128), np.float32)


def test_layers_past_the_last_are_left_out_with_a_note(
    make: Callable[..., Path], capsys: pytest.CaptureFixture
) -> None:
    model = load_model(open_model(make("glm4_moe", add_mtp_layer)), {}, "cpu")
    assert "left out tensors 'model.layers.3." in capsys.readouterr().err
    golden = golden_arrays("glm4_moe")
    ids = golden["input_ids"][:20]
    logits = logits_in_chunks(model, ids, 20)
    assert relative_error(logits, golden["logits"][:20]) < 1e-5


def add_ernie_mtp(tensors: dict[str, np.ndarray]) -> None:
    for name in ("mtp_block.0.mlp.up_proj", "mtp_linear_proj.0"):
        tensors[f"model.{name}.weight"] = np.ones((4, 4), np.float32)


def test_ernies_multi_token_prediction_is_left_out(make: Callable[..., Path]) -> None:
    assert open_model(make("ernie4_5_moe", add_ernie_mtp)).spec.tied


def test_a_head_counts_where_the_family_ties_by_default(make: Callable[..., Path]) -> None:
    def add_head(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2

    opened = open_model(make("ernie4_5_moe", add_head))
    assert "tie_word_embeddings" not in opened.checkpoint.config
    assert not opened.spec.tied
    ids = golden_arrays("ernie4_5_moe")["input_ids"][:10]
    logits = logits_in_chunks(load_model(opened, {}, "cpu", quiet=True), ids, 10)
    assert relative_error(logits, 2 * golden_arrays("ernie4_5_moe")["logits"][:10]) < 1e-5


def test_the_selection_bias_of_ernie_is_a_row_in_the_file() -> None:
    opened = open_model(GOLDEN / "ernie4_5_moe")
    bias = next(p for p in opened.parameters if p.name.endswith("selection_bias"))
    stored = opened.checkpoint.get(bias.sources[0][0])
    assert stored.shape == (1, 8)
    np.testing.assert_array_equal(read_parameter(opened, bias), stored[0].astype(np.float32))
    assert bias.sources[0][0] == "model.layers.1.mlp.moe_statics.e_score_correction_bias"


def test_a_missing_selection_bias_is_named(make: Callable[..., Path]) -> None:
    name = "model.layers.0.block_sparse_moe.e_score_correction_bias"
    with pytest.raises(CheckpointError, match=name):
        open_model(make("minimax_m2", lambda tensors: tensors.pop(name)))


@pytest.mark.parametrize(
    "name",
    [
        *("glm4_moe", "ernie4_5_moe", "minimax_m2", "qwen2_moe", "granitemoeshared"),
        *("phimoe", "hunyuan_v1_moe", "flex_olmo"),
    ],
)
def test_converted_checkpoints_give_the_same_logits(name: str, tmp_path: Path) -> None:
    convert_checkpoint(GOLDEN / name, tmp_path / "converted", {}, quiet=True)
    converted = load_model(open_model(tmp_path / "converted"), {}, "cpu", quiet=True)
    ids = golden_arrays(name)["input_ids"][:20]
    np.testing.assert_array_equal(
        logits_in_chunks(converted, ids, 20), logits_in_chunks(golden_model(name), ids, 20)
    )


def test_shared_experts_count_as_active() -> None:
    """qwen2_moe: of 8 experts in 2 of 3 layers, 3 are active; the shared one always is."""
    summary = summarize(open_model(GOLDEN / "qwen2_moe"), [])
    routed = 2 * 8 * 3 * 32 * 64
    assert summary.parameters_active == summary.parameters_total - routed * 5 // 8
