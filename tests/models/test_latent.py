"""deepseek_v2, deepseek_v3, glm4_moe_lite: what their configs mean, and their cache at large."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import npmoe
from npmoe.config import KV_FORMATS, KVCacheConfig
from npmoe.errors import UnsupportedModel
from npmoe.kv.storage import check_kv_format
from npmoe.models.convert import convert_checkpoint
from npmoe.models.families import read_model
from npmoe.models.gpu import check_gpu_support
from npmoe.models.loader import load_model
from npmoe.models.memory import need_of
from npmoe.models.specs import ExpertSpec, LatentSpec, MLPSpec
from npmoe.models.stored import open_model
from npmoe.models.summary import describe, summarize
from tests.golden.golden_cases import CASES, without
from tests.helpers import GOLDEN, Session, golden_arrays, golden_model, logits_in_chunks

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
every_family = pytest.mark.parametrize("name", LATENT)
GROUPS_OF_16 = KVCacheConfig("bf16", "fp4", 16)

PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": CASES["deepseek_v2"]
    | {
        **{"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408},
        **{"num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16},
        **{"n_routed_experts": 64, "num_experts_per_tok": 6, "vocab_size": 102400},
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        "v_head_dim": 128,
    },
    "DeepSeek-V3": CASES["deepseek_v3"]
    | {
        **{"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048},
        **{"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128},
        **{"n_routed_experts": 256, "num_experts_per_tok": 8, "vocab_size": 129280},
        **{"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "q_lora_rank": 1536},
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        "v_head_dim": 128,
    },
}


def read(raw: dict[str, Any]) -> Any:
    return read_model(raw, "config.json")[0]


def spec_of(raw: dict[str, Any]) -> Any:
    return read_model(raw, "config.json")[1]


@pytest.mark.parametrize(
    ("name", "billions", "cached"),
    [("DeepSeek-V2-Lite", 15.7, 27 * (512 + 64)), ("DeepSeek-V3", 671.0, 61 * (512 + 64))],
)
def test_published_sizes(name: str, billions: float, cached: int) -> None:
    """Against the totals in the model cards; cached: elements that a token has in all layers."""
    _, spec, parameters = read_model(PUBLISHED[name], "config.json")
    total = sum(math.prod(p.shape) for p in parameters)
    assert total / 1e9 == pytest.approx(billions, abs=0.05)
    assert len(spec.layers) * sum(spec.head_dim) == cached


def test_the_scale_of_deepseek_v3_holds_yarns_factor() -> None:
    scaling = CASES["deepseek_v3"]["rope_scaling"] | {"factor": 40}
    attention = spec_of(PUBLISHED["DeepSeek-V3"] | {"rope_scaling": scaling}).layers[0].attention
    assert attention.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    plain = spec_of(PUBLISHED["DeepSeek-V3"] | {"rope_scaling": None}).layers[0].attention
    assert plain.scale == pytest.approx(192**-0.5)


def test_specs() -> None:
    spec = spec_of(CASES["deepseek_v3"])
    assert spec.layers[0].attention == LatentSpec(
        num_heads=4,
        nope_dim=24,
        rope_dim=16,
        value_dim=20,
        kv_rank=32,
        q_rank=24,
        scale=spec.layers[0].attention.scale,
        interleaved=True,
    )
    assert isinstance(spec.layers[0].mlp, MLPSpec)
    experts = spec.layers[1].mlp
    assert isinstance(experts, ExpertSpec)
    rule = experts.router.rule
    assert (rule.scoring, rule.num_groups, rule.topk_groups) == ("sigmoid", 4, 3)
    assert (rule.group_score, rule.scaling) == ("sum_of_two", 2.5)
    assert (experts.router.selection_bias, experts.router.renormalize) == (True, True)
    rule = spec_of(CASES["deepseek_v2_v5"]).layers[2].mlp.router.rule
    assert (rule.scoring, rule.num_groups, rule.topk_groups) == ("softmax", 4, 2)
    assert (rule.group_score, rule.scaling) == ("best", 2.5)
    assert not spec_of(CASES["deepseek_v3_v5"]).layers[0].attention.interleaved


def test_defaults() -> None:
    v3 = read(without(CASES["deepseek_v3"], "first_k_dense_replace", "topk_group", "n_group"))
    assert (v3.layer_is_moe, v3.n_group, v3.topk_group) == ((False, False), 8, 4)
    greedy = read(CASES["deepseek_v2"] | {"n_group": 4, "topk_group": 2})
    assert (greedy.n_group, greedy.topk_group) == (1, 1)
    glm = without(CASES["glm4_moe_lite_v5"], "mlp_layer_types", "n_group", "topk_group")
    config = read(glm)
    assert (config.layer_is_moe, config.n_group) == ((False, True, True), 1)
    assert read(glm | {"first_k_dense_replace": 2}).layer_is_moe == (False, False, True)
    assert not any(read(CASES["deepseek_v2"] | {"first_k_dense_replace": 2}).layer_is_moe)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "scoring_func", "sigmoid"),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "num_key_value_heads", 2),
        ("deepseek_v2", "kv_lora_rank", 0),
        ("deepseek_v2", "v_head_dim", None),
        ("deepseek_v2", "moe_layer_freq", 2),
        ("deepseek_v2", "mlp_bias", True),
        ("deepseek_v2_v5", "head_dim", 40),
        ("deepseek_v2_v5", "qk_head_dim", 32),
        ("deepseek_v2_v5", "n_group", 3),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "qk_rope_head_dim", 15),
        ("deepseek_v3", "topk_group", 5),
        ("deepseek_v3", "quantization_config", {"quant_method": "fp8"}),
        ("deepseek_v3", "partial_rotary_factor", 0.5),
        ("glm4_moe_lite", "mlp_layer_types", ["dense"]),
        ("glm4_moe_lite", "mlp_layer_types", ["dense", "moe"]),
        ("glm4_moe_lite", "num_experts_per_tok", 9),
    ],
)
def test_a_config_that_is_not_implemented_is_named(name: str, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json.*{key}"):
        read(CASES[name] | {key: value})


def test_longrope_is_refused() -> None:
    longrope = CASES["llama_longrope"]["rope_scaling"]
    with pytest.raises(UnsupportedModel, match="rope_type 'longrope'"):
        read(CASES["deepseek_v3"] | {"rope_scaling": longrope})


@every_family
def test_the_gpu_refuses(name: str) -> None:
    formats = dict.fromkeys(("experts", "mlp", "attention", "lm_head", "router", "table"), "bf16")
    with pytest.raises(UnsupportedModel, match="multi-head latent attention; use device='cpu'"):
        check_gpu_support(spec_of(CASES[name]), formats, {}, KVCacheConfig())


def test_latents_have_neither_rotation_nor_windows() -> None:
    with pytest.raises(UnsupportedModel, match=r"fp4:rotated.*latents.*leave :rotated away"):
        check_kv_format(KVCacheConfig.parse("fp4:rotated"), (512, 64))
    for word, name in (("fp4+", r"fp4\+"), ("fp4:windows", "fp4:windows")):
        with pytest.raises(
            UnsupportedModel, match=rf"{name}: .*latents.* has no windows; leave \+"
        ):
            check_kv_format(KVCacheConfig.parse(word), (512, 64))


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_every_cache_format_stays_near_the_exact_one(kv: str) -> None:
    golden, model = golden_arrays("deepseek_v2"), golden_model("deepseek_v2")
    logits = logits_in_chunks(model, golden["input_ids"], 64, kv)
    typical = np.median(np.abs(logits - golden["logits"]).max(axis=-1))
    share = {"fp32": 1e-5, "bf16": 0.05, "int8": 0.1, "fp8": 0.5}.get(kv, 2.0)
    assert typical < share * golden["logits"].std()


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp4"])
def test_a_quantised_cache_gives_the_same_in_chunks_of_any_size(kv: str) -> None:
    model, ids = golden_model("deepseek_v3"), golden_arrays("deepseek_v3")["input_ids"][:60]
    whole, chunks, single = (logits_in_chunks(model, ids, n, kv) for n in (60, 23, 1))
    # A value on the edge between two codes may fall either way, so a few positions differ more.
    for other in (chunks, single):
        error = np.abs(other - whole).max(axis=-1) / np.abs(whole).max(axis=-1)
        assert np.median(error) < 1e-4


@every_family
def test_predicted_bytes_of_a_token_are_those_of_the_cache(name: str) -> None:
    opened = open_model(GOLDEN / name)
    summary = summarize(opened, [])
    layers = len(opened.spec.layers)
    assert summary.kv_bytes["bf16"] == layers * 2 * (32 + 16)
    assert (summary.num_kv_heads, summary.latent_dims) == (1, (32, 16))
    assert "4 heads of 40, a latent of 32 and a rope key of 16 for all" in describe(summary)
    token = need_of(opened, {}, GROUPS_OF_16, "cpu").token
    assert token == layers * (2 * 16 + 32 / 2 + 2 * 2)
    session = Session(golden_model(name), "bf16", num_pages=3)
    held = sum(a.nbytes for layer in session.cache for pages in layer for a in pages.arrays())
    assert held == 3 * 16 * summary.kv_bytes["bf16"]


@every_family
def test_converted_it_gives_what_converting_at_load_gives(name: str, tmp_path: Path) -> None:
    policy = {"experts": "fp4", "attention": "fp8", "mlp": "int8"}
    changed = {"experts": "int8"} if name == "glm4_moe_lite" else {}
    convert_checkpoint(GOLDEN / name, tmp_path / "new", policy | changed, quiet=True)
    ids = golden_arrays(name)["input_ids"][:40]
    folders = GOLDEN / name, tmp_path / "new"
    loaded = [load_model(open_model(f), policy | changed, "cpu", quiet=True) for f in folders]
    np.testing.assert_array_equal(*(logits_in_chunks(model, ids, 40) for model in loaded))


def test_layers_that_predict_further_tokens_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = Path(shutil.copytree(GOLDEN / "deepseek_v3", tmp_path / "mtp"))
    tensors = load_file(folder / "model.safetensors")
    layer, last = "model.layers.1.self_attn.kv_b_proj.weight", "model.layers.2.eh_proj.weight"
    tensors[last] = tensors[layer]
    save_file(tensors, folder / "model.safetensors")
    model = load_model(open_model(folder), {}, "cpu")
    assert f"left out tensor '{last}'" in capsys.readouterr().err
    ids = golden_arrays("deepseek_v3")["input_ids"][:20]
    whole = logits_in_chunks(golden_model("deepseek_v3"), ids, 20)
    np.testing.assert_array_equal(logits_in_chunks(model, ids, 20), whole)


@every_family
def test_generate(name: str) -> None:
    golden = golden_arrays(name)
    kv = KVCacheConfig("fp32", "fp32")
    with npmoe.LLM(GOLDEN / name, device="cpu", kv_cache=kv, progress=False) as llm:
        params = npmoe.SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
        done = llm.generate(golden["input_ids"].tolist(), params)
    assert list(done.choices[0].token_ids) == golden["generated"].tolist()


def test_an_unknown_key_is_still_an_error(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "deepseek_v3", tmp_path / "odd"))
    raw = json.loads((folder / "config.json").read_text()) | {"index_topk": 2048}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match="'index_topk'"):
        open_model(folder)
