"""qwen3: llama with a norm on each head of q and k, and sliding windows on some layers."""

from typing import Any

from npmoe.config import (
    ConfigReader,
    ModelConfig,
    read_common,
    read_layer_windows,
    read_rope,
    read_window,
)
from npmoe.models import llama
from npmoe.models.specs import ModelSpec

parameters = llama.parameters


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a dense qwen3 checkpoint."""
    return read_common(
        reader,
        **common_fields(reader),
        head_dim=reader.take_int("head_dim", default=128),
        layer_windows=layer_windows(reader),
    )


def common_fields(reader: ConfigReader) -> dict[str, Any]:
    """What qwen3 and qwen3_moe read alike."""
    reader.expect("partial_rotary_factor", 1, 1.0)
    return {
        "intermediate_size": reader.take_int("intermediate_size"),
        "rms_norm_eps": reader.take_number("rms_norm_eps", default=1e-6),
        "attention_bias": bool(reader.take("attention_bias", default=False)),
        "rope": read_rope(reader),
    }


def active_window(reader: ConfigReader) -> int | None:
    """`sliding_window` where `use_sliding_window` switches it on."""
    window = read_window(reader, absent=4096, least=0)
    return window if reader.take("use_sliding_window", default=False) else None


def layer_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """The active window on the layers from `max_window_layers` on, or where `layer_types` says."""
    first = reader.take_int("max_window_layers", default=28, least=0)
    types = [
        "sliding_attention" if i >= first else "full_attention"
        for i in range(reader.take_int("num_hidden_layers"))
    ]
    return read_layer_windows(reader, active_window(reader), types)


def model_spec(config: ModelConfig) -> ModelSpec:
    """llama's layers with q/k norms per head."""
    return llama.model_spec(config, qk_norm="head")
