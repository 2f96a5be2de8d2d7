"""llama: the dense decoder that the other families vary."""

from npmoe.config import ConfigReader, ModelConfig, read_common, read_rope
from npmoe.models.parameters import Parameter, TensorNames, decoder_parameters
from npmoe.models.specs import (
    AttentionSpec,
    ExpertSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    RouterSpec,
    SharedSpec,
)
from npmoe.ops.route import TopKRule


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a llama checkpoint."""
    reader.expect("partial_rotary_factor", 1, 1.0)
    return read_common(
        reader,
        intermediate_size=reader.take_int("intermediate_size"),
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-6),
        attention_bias=bool(reader.take("attention_bias", default=False)),
        mlp_bias=bool(reader.take("mlp_bias", default=False)),
        rope=read_rope(reader),
    )


def model_spec(config: ModelConfig, qk_norm: str = "none", output_bias: bool = True) -> ModelSpec:
    """The layers of a llama-like decoder; layers marked in layer_is_moe get experts.

    output_bias: whether attention_bias holds for the output projection too.
    """
    layers = []
    for is_moe, window in zip(config.layer_is_moe, config.layer_windows, strict=True):
        attention = AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            qk_norm=qk_norm,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias and output_bias,
            window=window,
            clip=config.clip_qkv,
        )
        mlp: MLPSpec | ExpertSpec = MLPSpec(config.intermediate_size, config.mlp_bias)
        if is_moe:
            mlp = expert_spec(config)
        layers.append(LayerSpec(attention, mlp))
    return ModelSpec(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        eps=config.rms_norm_eps,
        rope=config.rope,
        max_positions=config.max_position_embeddings,
        layers=tuple(layers),
        tied=config.tie_word_embeddings,
    )


def expert_spec(config: ModelConfig) -> ExpertSpec:
    """The routed and shared experts of a layer."""
    rule = TopKRule(
        config.scoring_func,
        config.n_group,
        config.topk_group,
        config.group_score,
        config.routed_scaling_factor,
    )
    router = RouterSpec(
        config.num_experts,
        config.num_experts_per_tok,
        config.norm_topk_prob,
        rule=rule,
        selection_bias=config.selection_bias,
    )
    width = config.shared_expert_intermediate_size
    shared = SharedSpec(width, config.shared_expert_gate) if width else None
    return ExpertSpec(router, config.moe_intermediate_size, shared=shared)


def parameters(config: ModelConfig, spec: ModelSpec) -> list[Parameter]:
    """Checkpoint names of a llama-like decoder."""
    return decoder_parameters(spec, TensorNames())
