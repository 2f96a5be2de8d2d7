"""Reading config.json strictly, and what users ask of the engine."""

import re
from dataclasses import replace
from typing import Any

import pytest

from npmoe.config import (
    ROPE_KEYS,
    ConfigReader,
    EngineConfig,
    KVCacheConfig,
    KVWindows,
    RopeConfig,
    parse_weights,
    read_rope,
    token_ids,
)
from npmoe.errors import UnsupportedModel
from npmoe.models.families import FAMILIES, read_model
from npmoe.models.specs import ExpertSpec, MLPSpec
from tests.golden.golden_cases import CASES, without

Raw = dict[str, Any]


def read(raw: Raw, ignored: tuple[str, ...] = ()) -> Any:
    """The ModelConfig of a raw config."""
    return read_model(raw, "config.json", ignored)[0]


def rope_of(**raw: Any) -> RopeConfig:
    reader = ConfigReader(raw, "config.json")
    rope = read_rope(reader)
    reader.finish()
    return rope


@pytest.mark.parametrize("name", CASES)
def test_a_key_that_nobody_knows_is_named(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"'attn_logit_softcapping' .= 50.0") as caught:
        read(CASES[name] | {"attn_logit_softcapping": 50.0})
    assert "ignore_config_keys=('attn_logit_softcapping',)" in str(caught.value)
    read(CASES[name] | {"attn_logit_softcapping": 50.0}, ignored=("attn_logit_softcapping",))


@pytest.mark.parametrize("off", [None, False, [], {}])
def test_an_unknown_key_that_is_switched_off_is_no_error(off: Any) -> None:
    read(CASES["llama"] | {"some_new_feature": off})


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("llama", "hidden_act", "gelu"),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "sliding_window", 128),
        ("mixtral", "attention_bias", True),
        ("olmoe", "sliding_window", 128),
        ("qwen3", "mlp_bias", True),
        ("qwen3", "layer_types", ["full_attention", "linear_attention", "full_attention"]),
        ("qwen3", "layer_types", ["full_attention"]),
        ("qwen3_moe", "quantization_config", {"quant_method": "gptq"}),
        ("qwen3_moe", "shared_expert_intermediate_size", 64),
        ("mixtral", "num_key_value_heads", 3),
        ("llama", "head_dim", 31),
        ("mixtral", "num_experts_per_tok", 9),
        ("llama", "hidden_size", "64"),
        ("llama", "hidden_size", 0),
        ("llama", "hidden_size", True),
        ("llama", "num_hidden_layers", 2.5),
        ("llama", "vocab_size", None),
        ("olmoe", "num_experts", None),
    ],
)
def test_what_is_not_implemented_is_named(case: str, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json.*{key}"):
        read(CASES[case] | {key: value})


YARN, LONGROPE = CASES["llama_yarn"]["rope_parameters"], CASES["llama_longrope"]["rope_scaling"]


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("llama", "rms_norm_eps", "1e-5"),
        ("llama", "rms_norm_eps", 0),
        ("olmoe", "clip_qkv", [1]),
        ("olmoe", "rope_theta", "x"),
        ("olmoe", "rope_theta", 0),
        ("olmoe", "rope_theta", float("inf")),
        ("qwen3_moe", "mlp_only_layers", 1),
        ("llama_yarn", "rope_parameters", YARN | {"beta_fast": 0}),
        ("llama_yarn", "rope_parameters", YARN | {"factor": -4}),
        ("llama_yarn", "rope_parameters", YARN | {"factor": [4.0]}),
        ("llama_yarn", "rope_parameters", YARN | {"original_max_position_embeddings": "64"}),
        ("llama_yarn", "rope_parameters", YARN | {"rope_theta": 0}),
        ("llama_longrope", "rope_scaling", LONGROPE | {"long_factor": [1.0] * 15}),
        ("llama_longrope", "rope_scaling", LONGROPE | {"short_factor": []}),
        ("llama_longrope", "rope_scaling", LONGROPE | {"short_factor": ["1"] * 16}),
        ("llama_linear", "num_attention_heads", 128),
    ],
)
def test_a_number_that_is_none_or_out_of_range_is_named(case: str, key: str, value: Any) -> None:
    named = {"num_attention_heads": "head_dim"}.get(key, key)
    if isinstance(value, dict):
        named = next(k for k in value if value[k] != CASES[case][key][k])
    with pytest.raises(UnsupportedModel, match=rf"config\.json.*{named}"):
        read(CASES[case] | {key: value})


@pytest.mark.parametrize("key", sorted({*ROPE_KEYS["yarn"], "rope_type"} - {"truncate"}))
@pytest.mark.parametrize("value", ["x", [], [1], {"a": 1}, -1])
def test_no_value_of_a_rope_key_ends_in_another_error(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        rope_of(rope_parameters=YARN | {key: value})


@pytest.mark.parametrize("model_type", ["gpt2", None, []])
def test_an_unknown_model_type_is_named_with_the_known_ones(model_type: Any) -> None:
    with pytest.raises(
        UnsupportedModel, match=rf"model_type {re.escape(repr(model_type))}.*mixtral"
    ):
        read(CASES["llama"] | {"model_type": model_type})


def test_families_are_called_like_their_files() -> None:
    assert {n: m.__name__ for n, m in FAMILIES.items()} == {
        n: f"npmoe.models.{n}" for n in FAMILIES
    }


def test_sizes_that_old_configs_leave_out() -> None:
    config = read(CASES["llama_linear"])  # has neither head_dim nor num_key_value_heads
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 4, 16)


def test_layers_with_and_without_experts() -> None:
    _, spec, _ = read_model(CASES["qwen3_moe"], "config.json")  # mlp_only_layers = [1]
    assert [type(layer.mlp) for layer in spec.layers] == [ExpertSpec, MLPSpec, ExpertSpec]
    _, spec, _ = read_model(CASES["qwen3_moe_v5"], "config.json")  # decoder_sparse_step = 2
    assert [type(layer.mlp) for layer in spec.layers] == [MLPSpec, ExpertSpec] * 2


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, 16, 16)),  # max_window_layers = 1
        ({"use_sliding_window": False}, (None, None, None)),
        (
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (16, None, 16),
        ),
    ],
)
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_windows_of_some_layers(name: str, changes: Raw, windows: tuple[int | None, ...]) -> None:
    assert read(CASES[name] | changes).layer_windows == windows


@pytest.mark.parametrize("types", ["full_attention", 3, [{}] * 3, ["full_attention"] * 2])
def test_layer_types_that_are_none(types: Any) -> None:
    with pytest.raises(UnsupportedModel, match="layer_types"):
        read(CASES["qwen2"] | {"layer_types": types})


def test_a_window_of_null_is_none_and_an_absent_one_the_familys_default() -> None:
    assert read(CASES["mistral"]).layer_windows == (20, 20)
    assert read(CASES["mistral"] | {"sliding_window": None}).layer_windows == (None, None)
    assert read(without(CASES["mistral"], "sliding_window")).layer_windows == (4096, 4096)
    assert read(without(CASES["qwen2"], "sliding_window")).layer_windows == (None, 4096, 4096)


def test_biases_of_qwen2_are_those_of_q_k_and_v() -> None:
    for name, expected in (("qwen2", (True, False)), ("qwen3", (True, True))):
        attention = read_model(CASES[name], "config.json")[1].layers[0].attention
        assert (attention.qkv_bias, attention.output_bias) == expected


def test_eos_may_be_none_one_or_several() -> None:
    assert [token_ids(v, "") for v in (None, 2, [2, 5])] == [(), (2,), (2, 5)]
    assert read(CASES["llama"] | {"eos_token_id": [2, 7]}).eos_token_ids == (2, 7)


@pytest.mark.parametrize("value", ["</s>", [2, "</s>"], [[2]], {"id": 2}, 1.5, True], ids=str)
def test_token_ids_that_are_no_whole_numbers_are_named(value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json: token id .* whole number"):
        read(CASES["llama"] | {"eos_token_id": value})


@pytest.mark.parametrize(
    ("case", "key"),
    [
        *[("llama", "num_hidden_layers"), ("llama", "vocab_size"), ("qwen3_moe", "num_experts")],
        *[("mixtral", "num_local_experts"), ("llama", "max_position_embeddings")],
    ],
)
@pytest.mark.parametrize("value", [2**31, 10**30])
def test_a_size_beyond_reason_is_named_at_once(case: str, key: str, value: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"{key} = {value}, expected at most"):
        read(CASES[case] | {key: value})


@pytest.mark.parametrize("types", [5, "full_attention", [["full_attention"]] * 3, [{}] * 3])
def test_layer_types_of_another_shape_are_named(types: Any) -> None:
    with pytest.raises(UnsupportedModel, match="layer_types"):
        read(CASES["qwen3"] | {"layer_types": types})


@pytest.mark.parametrize("value", ["fp8", ["fp8"], 4, {"quant_method": "awq"}], ids=str)
def test_a_quantised_layout_of_others_is_named(value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"quantization_config.*is not implemented$"):
        read(CASES["llama"] | {"quantization_config": value})


def test_both_spellings_of_rope_are_the_same() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64}
    old = rope_of(rope_theta=5e5, rope_scaling={"type": "yarn", **scaling})
    new = rope_of(rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **scaling})
    assert old == new
    assert (old.rope_type, old.rope_theta, old.factor) == ("yarn", 5e5, 4.0)
    assert rope_of() == RopeConfig("default", 10000.0)
    assert rope_of(rope_scaling=None, rope_parameters=None, rope_theta=7) == RopeConfig(
        rope_theta=7.0
    )


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type 'dynamic' is not implemented"),
        ({"type": "dynamic", "factor": 2.0}, "'dynamic'.*llama3"),
        ({"rope_type": "linear"}, "'linear' needs 'factor'"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
            "needs 'high_freq_factor'",
        ),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "needs 'long_factor'"),
        ({"rope_type": "linear", "factor": 2.0, "mscale": 1.0}, "'linear' with mscale = 1.0"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ("yarn", "rope_scaling"),
        ([1.0], "rope_scaling"),
    ],
)
def test_a_rope_that_is_not_implemented_is_named(scaling: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        rope_of(rope_scaling=scaling)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("fp4", KVCacheConfig("fp4", "fp4")),
        (("int8", "fp4"), KVCacheConfig("int8", "fp4")),
        (["int8", "fp4"], KVCacheConfig("int8", "fp4")),
        (KVCacheConfig("fp8", "fp4", 64), KVCacheConfig("fp8", "fp4", 64)),
        ("k8v4", KVCacheConfig("int8", "fp4")),
        ("nvfp4", KVCacheConfig("nvfp4", "nvfp4")),
        ("mxfp4,bf16", KVCacheConfig("mxfp4", "bf16")),
        ("nvfp4:rotated", KVCacheConfig("nvfp4", "nvfp4", rotated=True)),
        ("fp4:rotated", KVCacheConfig("fp4", "fp4", rotated=True)),
        ("bf16,int4:rotated", KVCacheConfig("bf16", "int4", rotated=True)),
        ("fp4+", KVCacheConfig("fp4", "fp4", rotated=True, windows=KVWindows(16, 128, "bf16"))),
        ("fp4:rotated:windows", KVCacheConfig.parse("fp4+")),
        ("k8v4:windows", KVCacheConfig("int8", "fp4", windows=KVWindows())),
        ("fp4:windows=0,64", KVCacheConfig("fp4", "fp4", windows=KVWindows(0, 64))),
        (
            "int4:rotated:windows=4,32,fp8",
            KVCacheConfig("int4", "int4", rotated=True, windows=KVWindows(4, 32, "fp8")),
        ),
    ],
)
def test_kv_cache_as_a_word_a_pair_or_a_config(value: Any, expected: KVCacheConfig) -> None:
    assert KVCacheConfig.parse(value) == expected
    assert KVCacheConfig.parse(str(replace(expected, group_size=32))) == replace(
        expected, group_size=32
    )


@pytest.mark.parametrize(
    "value",
    [
        *["fp3", "fp4:turned", "fp4:", "+", "fp4++", "fp4+:windows", "fp4:rotated,windows"],
        *["fp4:windows:rotated", "fp4:rotated:rotated", "fp4:windows=4", "fp4:windows=4,-1"],
        *[("fp4", "q8"), ("fp4",), 4, None, {"k": "fp4"}],
    ],
)
def test_other_kv_caches_are_refused_with_the_legal_formats(value: Any) -> None:
    with pytest.raises(ValueError, match=r"kv_cache = .*int4_asym"):
        KVCacheConfig.parse(value)


def test_group_sizes() -> None:
    with pytest.raises(ValueError, match="group_size = 8: legal values are 16, 32, 64, 128"):
        KVCacheConfig(group_size=8)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ({"first": -1}, "first = -1: expected a whole number >= 0"),
        ({"first": 1.5}, "first = 1.5"),
        ({"recent": 0}, "recent = 0: expected a whole number >= 1"),
        ({"recent": True}, "recent = True"),
        ({"format": "fp4"}, "format = 'fp4': legal are fp32, bf16, fp8"),
    ],
    ids=str,
)
def test_windows_that_cannot_be(windows: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVWindows(**windows)


def test_words_for_kv_caches() -> None:
    assert str(KVCacheConfig.parse("fp4+")) == "fp4+"
    assert str(KVCacheConfig.parse("k8v4:windows")) == "int8,fp4:windows"
    assert str(KVCacheConfig.parse("fp4:windows=16,128,bf16")) == "fp4:windows"
    with pytest.raises(ValueError, match="recent = 0"):
        KVCacheConfig.parse("fp4:windows=4,0")
    assert str(KVCacheConfig.parse("fp4:rotated")) == "fp4:rotated"
    assert KVWindows(16, 128).tokens(prefill_chunk=512) == 656


def test_weights_policy() -> None:
    assert parse_weights("native") == {}
    assert parse_weights("fp4") == dict.fromkeys(("experts", "mlp", "attention", "lm_head"), "fp4")
    assert parse_weights({"experts": "nvfp4", "lm_head": "native"}) == {"experts": "nvfp4"}
    with pytest.raises(ValueError, match="no part 'router'; parts are experts"):
        parse_weights({"router": "fp4"})
    with pytest.raises(ValueError, match=r"weights\['experts'\] = 'q4'.*native.*mxfp4"):
        parse_weights({"experts": "q4"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("page_size", 0),
        ("prefill_chunk", 1.5),
        ("max_seq_len", 0),
        ("memory_fraction", 0),
        ("memory_fraction", 1.1),
    ],
)
def test_engine_settings_out_of_range_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} = {value}"):
        EngineConfig(**{field: value})
