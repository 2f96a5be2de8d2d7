"""deepseek_v2: multi-head latent attention; the first layers dense, then routed and shared experts.

Its routed experts are the best of all, or of the groups whose best expert is best.
"""

from typing import Any

from npmoe.config import ConfigReader, ModelConfig, read_common, read_rope
from npmoe.errors import UnsupportedModel
from npmoe.models import llama
from npmoe.models.parameters import Parameter, TensorNames, decoder_parameters
from npmoe.models.specs import ExpertSpec, LatentSpec, LayerSpec, MLPSpec, ModelSpec
from npmoe.ops.rope import yarn_score_factor

TRAINING_KEYS = ("aux_loss_alpha", "ep_size", "num_nextn_predict_layers", "seq_aux")
"""Losses, layout over devices, and layers that predict further tokens, which are left out."""


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a deepseek_v2 checkpoint, hub or transformers v5 spelling."""
    layers = reader.take_int("num_hidden_layers")
    dense = reader.take_int("first_k_dense_replace", default=0, least=0)
    method = reader.take("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        reader.expect("topk_method", "greedy", "group_limited_greedy")
    in_groups = method == "group_limited_greedy"
    groups = [reader.take_int(n, default=1) for n in ("n_group", "topk_group")]
    reader.expect("scoring_func", "softmax")
    reader.expect("norm_topk_prob", False)  # programs differ in whether they then scale
    reader.expect("mlp_bias", False)
    return read_common(
        reader,
        **attention_fields(reader),
        **expert_fields(reader),
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-6),
        layer_is_moe=tuple(i >= dense for i in range(layers)),
        n_group=groups[0] if in_groups else 1,
        topk_group=groups[1] if in_groups else 1,
        routed_scaling_factor=reader.take_number("routed_scaling_factor", default=1.0),
        rope_interleave=True,
    )


def attention_fields(reader: ConfigReader) -> dict[str, Any]:
    """Sizes of latent attention and its rotary embedding, which the families read alike."""
    heads = reader.take_int("num_attention_heads")
    nope, rope_dim = (reader.take_int(f"qk_{n}_head_dim") for n in ("nope", "rope"))
    rank = reader.take_int("q_lora_rank", default=None)
    rope = read_rope(reader)
    if rope_dim % 2:
        raise UnsupportedModel(f"{reader.where}: qk_rope_head_dim = {rope_dim}, expected even")
    if rope.rope_type == "longrope" or rope.partial_rotary_factor != 1:
        raise UnsupportedModel(
            f"{reader.where}: rope_type {rope.rope_type!r} with partial_rotary_factor = "
            f"{rope.partial_rotary_factor:g} is not implemented for latent attention"
        )
    reader.expect("num_key_value_heads", heads)
    reader.expect("head_dim", rope_dim)
    reader.expect("qk_head_dim", nope + rope_dim)
    return {
        "head_dim": nope + rope_dim,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": reader.take_int("v_head_dim"),
        "kv_lora_rank": reader.take_int("kv_lora_rank"),
        "q_lora_rank": rank,
        "attention_bias": bool(reader.take("attention_bias", default=False)),
        "rope": rope,
    }


def expert_fields(reader: ConfigReader) -> dict[str, Any]:
    """Sizes of MLPs and experts, which the families read alike."""
    width = reader.take_int("moe_intermediate_size")
    reader.expect("moe_layer_freq", 1)
    reader.ignore(*TRAINING_KEYS)
    return {
        "intermediate_size": reader.take_int("intermediate_size"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width
        * reader.take_int("n_shared_experts", default=0, least=0),
        "num_experts": reader.take_int("n_routed_experts", "num_local_experts", "num_experts"),
        "num_experts_per_tok": reader.take_int("num_experts_per_tok"),
    }


def model_spec(config: ModelConfig) -> ModelSpec:
    """A decoder with latent attention; layers marked in layer_is_moe get experts."""
    score_factor = yarn_score_factor(config.rope, config.max_position_embeddings)
    attention = LatentSpec(
        num_heads=config.num_attention_heads,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        kv_rank=config.kv_lora_rank,
        q_rank=config.q_lora_rank,
        scale=config.head_dim**-0.5 * score_factor,
        interleaved=config.rope_interleave,
        bias=config.attention_bias,
    )
    dense = MLPSpec(config.intermediate_size)
    experts = llama.expert_spec(config) if any(config.layer_is_moe) else dense
    mlps: list[MLPSpec | ExpertSpec] = [experts if moe else dense for moe in config.layer_is_moe]
    return ModelSpec(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        eps=config.rms_norm_eps,
        rope=config.rope,
        max_positions=config.max_position_embeddings,
        layers=tuple(LayerSpec(attention, mlp) for mlp in mlps),
        tied=config.tie_word_embeddings,
    )


def parameters(config: ModelConfig, spec: ModelSpec) -> list[Parameter]:
    """Checkpoint names."""
    return decoder_parameters(spec, TensorNames())
