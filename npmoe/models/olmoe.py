"""olmoe: routed experts on every layer, q and k normed over the whole projection, then clipped."""

from typing import Any

from npmoe.config import ConfigReader, ModelConfig, read_common, read_rope
from npmoe.models import llama
from npmoe.models.specs import ModelSpec

parameters = llama.parameters


def layer_fields(reader: ConfigReader) -> dict[str, Any]:
    """What olmoe and flex_olmo say alike of their layers, as fields of ModelConfig."""
    layers = reader.take_int("num_hidden_layers")
    width = reader.take_int("intermediate_size")
    reader.expect("partial_rotary_factor", 1, 1.0)
    return {
        "intermediate_size": width,
        "attention_bias": bool(reader.take("attention_bias", default=False)),
        "layer_is_moe": (True,) * layers,
        "num_experts": reader.take_int("num_experts", "num_local_experts"),
        "num_experts_per_tok": reader.take_int("num_experts_per_tok"),
        "moe_intermediate_size": width,
        "norm_topk_prob": bool(reader.take("norm_topk_prob", default=False)),
    }


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of an olmoe checkpoint."""
    return read_common(
        reader,
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-5),
        clip_qkv=reader.take_number("clip_qkv", default=None),
        rope=read_rope(reader),
        **layer_fields(reader),
    )


def model_spec(config: ModelConfig) -> ModelSpec:
    """llama's layers with one q norm and one k norm over the whole projection."""
    return llama.model_spec(config, qk_norm="projection")
