"""qwen2: llama with biases on q, k and v alone, and sliding windows on some layers."""

from npmoe.config import ConfigReader, ModelConfig, read_common
from npmoe.models import llama, qwen3
from npmoe.models.specs import ModelSpec

parameters = llama.parameters


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a dense qwen2 checkpoint; the biases are there without a key."""
    fields = qwen3.common_fields(reader) | {"attention_bias": True}
    return read_common(reader, **fields, layer_windows=qwen3.layer_windows(reader))


def model_spec(config: ModelConfig) -> ModelSpec:
    """llama's layers without a bias on the output projection."""
    return llama.model_spec(config, output_bias=False)
