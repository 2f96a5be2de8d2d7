"""dots1: the experts of glm4_moe with the attention of qwen3, sliding windows on some layers."""

from npmoe.config import (
    ConfigReader,
    ModelConfig,
    read_common,
    read_layer_windows,
    read_rope,
    read_window,
)
from npmoe.models import glm4_moe, llama, qwen3

model_spec = qwen3.model_spec
parameters = llama.parameters


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a dots1 checkpoint, hub or transformers v5 spelling."""
    reader.expect("partial_rotary_factor", 1, 1.0)
    return read_common(
        reader,
        **glm4_moe.routing_fields(reader, first_dense=0, renormalize=False),
        intermediate_size=reader.take_int("intermediate_size"),
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-6),
        attention_bias=bool(reader.take("attention_bias", default=False)),
        rope=read_rope(reader),
        layer_windows=_layer_windows(reader),
    )


def _layer_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """The window on the layers from `max_window_layers` on, or where `layer_types` says."""
    first = reader.take_int("max_window_layers", default=62, least=0)
    types = [
        "sliding_attention" if i >= first else "full_attention"
        for i in range(reader.take_int("num_hidden_layers"))
    ]
    return read_layer_windows(reader, read_window(reader, absent=4096), types)
