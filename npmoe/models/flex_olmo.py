"""flex_olmo: olmoe with its norms after attention and experts, not before them, and no clipping."""

from dataclasses import replace

from npmoe.config import ConfigReader, ModelConfig, read_common, read_rope
from npmoe.models import llama, olmoe
from npmoe.models.specs import ModelSpec

parameters = llama.parameters


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a flex_olmo checkpoint, hub or transformers v5 spelling."""
    return read_common(
        reader,
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-6),
        rope=read_rope(reader, default_theta=500000.0),
        **olmoe.layer_fields(reader),
    )


def model_spec(config: ModelConfig) -> ModelSpec:
    """llama's layers with q/k norms over the whole projection and norms after the blocks."""
    spec = llama.model_spec(config, qk_norm="projection")
    return replace(spec, layers=tuple(replace(layer, norm="after") for layer in spec.layers))
