"""granitemoe: experts on every layer; embeddings, attention, residuals and logits are scaled."""

from dataclasses import replace
from typing import Any

from npmoe.config import ConfigReader, ModelConfig, read_common, read_rope
from npmoe.models import llama
from npmoe.models.parameters import Parameter, TensorNames, decoder_parameters
from npmoe.models.specs import ModelSpec

MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
NAMES = TensorNames(
    moe="block_sparse_moe",
    expert=None,
    router="router.layer",
    fused=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    shared_fused=("shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight"),
)


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a granitemoe checkpoint."""
    return read_common(reader, **common_fields(reader))


def common_fields(reader: ConfigReader) -> dict[str, Any]:
    """What granitemoe and granitemoeshared read alike."""
    layers = reader.take_int("num_hidden_layers")
    width = reader.take_int("intermediate_size")
    reader.expect("partial_rotary_factor", 1, 1.0)
    return {
        "intermediate_size": width,
        "rms_norm_eps": reader.take_number("rms_norm_eps", default=1e-6),
        "attention_bias": bool(reader.take("attention_bias", default=False)),
        "rope": read_rope(reader),
        "layer_is_moe": (True,) * layers,
        "num_experts": reader.take_int("num_local_experts", "num_experts"),
        "num_experts_per_tok": reader.take_int("num_experts_per_tok"),
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        **{name: reader.take_number(name, default=1.0) for name in MULTIPLIERS},
    }


def model_spec(config: ModelConfig) -> ModelSpec:
    """llama's layers, scaled; `logits_scaling` divides."""
    spec = llama.model_spec(config)
    layers = tuple(
        replace(
            layer,
            attention=replace(layer.attention, scale=config.attention_multiplier),
            residual_scale=config.residual_multiplier,
        )
        for layer in spec.layers
    )
    return replace(
        spec,
        layers=layers,
        embedding_scale=config.embedding_multiplier,
        logits_scale=1 / config.logits_scaling,
    )


def parameters(config: ModelConfig, spec: ModelSpec) -> list[Parameter]:
    """Checkpoint names; the experts of a layer are two stacked tensors."""
    return decoder_parameters(spec, NAMES)
