"""qwen3: llama with a norm on each head of q and k, and sliding windows on some layers."""

from typing import Any

from npmoe.config import ConfigReader, ModelConfig, read_common, read_rope
from npmoe.errors import UnsupportedModel
from npmoe.models import llama
from npmoe.models.specs import ModelSpec

parameters = llama.parameters


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a dense qwen3 checkpoint."""
    layers = reader.take_int("num_hidden_layers")
    return read_common(
        reader,
        **common_fields(reader),
        head_dim=reader.take_int("head_dim", default=128),
        layer_windows=_layer_windows(reader, layers),
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
    window = reader.take_int("sliding_window", default=None, least=0)
    return window if reader.take("use_sliding_window", default=False) else None


def _layer_windows(reader: ConfigReader, layers: int) -> tuple[int | None, ...]:
    window = active_window(reader)
    first = reader.take_int("max_window_layers", default=28, least=0)
    types = reader.take("layer_types", default=None)
    if types is None:
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    known = ("sliding_attention", "full_attention")
    legal = isinstance(types, list) and all(kind in known for kind in types)
    if not legal or len(types) != layers:
        raise UnsupportedModel(
            f"{reader.where}: layer_types = {types!r} is not implemented for {layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def model_spec(config: ModelConfig) -> ModelSpec:
    """llama's layers with q/k norms per head."""
    return llama.model_spec(config, qk_norm="head")
