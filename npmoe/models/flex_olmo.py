"""flex_olmo: olmoe with its norms after attention and experts, not before them, and no clipping."""

from dataclasses import replace

from npmoe.config import ConfigReader, ModelConfig, read_common, read_rope
from npmoe.models import llama
from npmoe.models.specs import ModelSpec

parameters = llama.parameters


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a flex_olmo checkpoint, hub or transformers v5 spelling."""
    layers = reader.take_int("num_hidden_layers")
    width = reader.take_int("intermediate_size")
    reader.expect("partial_rotary_factor", 1, 1.0)
    return read_common(
        reader,
        intermediate_size=width,
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-6),
        attention_bias=bool(reader.take("attention_bias", default=False)),
        rope=read_rope(reader, default_theta=500000.0),
        layer_is_moe=(True,) * layers,
        num_experts=reader.take_int("num_experts", "num_local_experts"),
        num_experts_per_tok=reader.take_int("num_experts_per_tok"),
        moe_intermediate_size=width,
        norm_topk_prob=bool(reader.take("norm_topk_prob", default=False)),
    )


def model_spec(config: ModelConfig) -> ModelSpec:
    """llama's layers with q/k norms over the whole projection and norms after the blocks."""
    spec = llama.model_spec(config, qk_norm="projection")
    return replace(spec, layers=tuple(replace(layer, norm="after") for layer in spec.layers))
