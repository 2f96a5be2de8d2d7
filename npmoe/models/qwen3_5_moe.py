"""qwen3_5_moe: the text part of a multimodal checkpoint; images and videos are not read."""

from dataclasses import replace

from npmoe.config import ConfigReader, ModelConfig
from npmoe.errors import UnsupportedModel
from npmoe.models import qwen3_5_moe_text
from npmoe.models.parameters import Parameter
from npmoe.models.specs import ModelSpec

IMAGE_KEYS = (
    *("vision_config", "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id", "language_model_only"),
)


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a multimodal checkpoint: its text_config, and whether the head is tied."""
    text = reader.take("text_config")
    if not isinstance(text, dict):
        raise UnsupportedModel(f"{reader.where}: text_config = {text!r}, expected an object")
    reader.ignore(*IMAGE_KEYS)
    reader.expect("quantization_config")
    inner = reader.inner("text_config", text | {"model_type": reader.raw["model_type"]})
    config = qwen3_5_moe_text.read_config(inner)
    inner.finish()
    tied = bool(reader.take("tie_word_embeddings", default=False))
    return replace(config, tie_word_embeddings=tied)


def model_spec(config: ModelConfig) -> ModelSpec:
    """The text model's layers, without the vision tower."""
    return replace(qwen3_5_moe_text.model_spec(config), left_out=("model.visual.",))


def parameters(config: ModelConfig, spec: ModelSpec) -> list[Parameter]:
    """Checkpoint names."""
    return qwen3_5_moe_text.parameters(config, spec, model="model.language_model")
