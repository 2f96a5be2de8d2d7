"""qwen3_next: gated delta-net layers between layers of gated attention; experts, one shared, gated.

Norms are stored as their difference from 1. Rotary turns a part of each head.
"""

from dataclasses import replace
from typing import Any

from npmoe.config import ConfigReader, ModelConfig, read_common, read_rope
from npmoe.errors import UnsupportedModel
from npmoe.models import llama, qwen3_moe
from npmoe.models.parameters import Parameter, TensorNames, decoder_parameters
from npmoe.models.specs import DeltaNetSpec, ModelSpec

NORMS_FROM_ONE = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm")
KINDS = ("linear_attention", "full_attention")
ROTARY_PART = 0.25


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a qwen3_next checkpoint, hub or transformers v5 spelling."""
    return read_common(
        reader,
        **common_fields(reader),
        rope=read_rope(reader, default_partial=ROTARY_PART),
        intermediate_size=reader.take_int("intermediate_size"),
        layer_is_moe=qwen3_moe.layer_is_moe(reader),
        norm_topk_prob=bool(reader.take("norm_topk_prob", default=True)),
    )


def common_fields(reader: ConfigReader) -> dict[str, Any]:
    """What qwen3_next and qwen3_5_moe read alike."""
    return {
        "head_dim": reader.take_int("head_dim", default=256),
        "rms_norm_eps": reader.take_number("rms_norm_eps", default=1e-6),
        "attention_bias": bool(reader.take("attention_bias", default=False)),
        "layer_is_linear": layer_is_linear(reader),
        "linear_conv_kernel_dim": reader.take_int("linear_conv_kernel_dim", default=4, least=2),
        "linear_key_head_dim": reader.take_int("linear_key_head_dim", default=128),
        "linear_value_head_dim": reader.take_int("linear_value_head_dim", default=128),
        "linear_num_key_heads": reader.take_int("linear_num_key_heads", default=16),
        "linear_num_value_heads": reader.take_int("linear_num_value_heads", default=32),
        "num_experts": reader.take_int("num_experts", "num_local_experts"),
        "num_experts_per_tok": reader.take_int("num_experts_per_tok"),
        "moe_intermediate_size": reader.take_int("moe_intermediate_size"),
        "shared_expert_intermediate_size": reader.take_int(
            "shared_expert_intermediate_size", default=512
        ),
        "shared_expert_gate": True,
    }


def layer_is_linear(reader: ConfigReader) -> tuple[bool, ...]:
    """By `layer_types`, or all but every `full_attention_interval`-th layer.

    Raises UnsupportedModel for other types and where they are not as many as the layers.
    """
    layers = reader.take_int("num_hidden_layers")
    interval = reader.take_int("full_attention_interval", default=4)
    default = [KINDS[(i + 1) % interval == 0] for i in range(layers)]
    types = reader.take("layer_types", default=default)
    if (
        not isinstance(types, list)
        or len(types) != layers
        or any(kind not in KINDS for kind in types)
    ):
        raise UnsupportedModel(
            f"{reader.where}: layer_types = {types!r} is not implemented for {layers} layers"
        )
    return tuple(kind == "linear_attention" for kind in types)


def model_spec(config: ModelConfig) -> ModelSpec:
    """llama's layers with gated attention, some of them with the delta rule instead."""
    spec = llama.model_spec(config, qk_norm="head")
    delta = DeltaNetSpec(
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_head_dim=config.linear_key_head_dim,
        value_head_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
    )
    layers = tuple(
        replace(layer, attention=delta) if is_linear else layer.with_attention(output_gate=True)
        for layer, is_linear in zip(spec.layers, config.layer_is_linear, strict=True)
    )
    return replace(spec, layers=layers)


def parameters(config: ModelConfig, spec: ModelSpec) -> list[Parameter]:
    """Checkpoint names."""
    names = TensorNames(shared="shared_expert", delta_grouped=True)
    return norms_from_one(decoder_parameters(spec, names))


def norms_from_one(found: list[Parameter]) -> list[Parameter]:
    """The parameters with 1 added to norms that are stored as their difference from it; the norm
    of the delta-net is not."""
    return [
        replace(p, offset=1.0) if p.name.rpartition(".")[2] in NORMS_FROM_ONE else p for p in found
    ]
