"""qwen3_moe: qwen3 with routed experts on all layers but those that the config keeps dense."""

from typing import Any

from npmoe.config import ConfigReader, ModelConfig, read_common
from npmoe.errors import UnsupportedModel
from npmoe.models import llama, qwen3

model_spec = qwen3.model_spec
parameters = llama.parameters


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a qwen3_moe checkpoint, hub or transformers v5 spelling."""
    reader.ignore("max_window_layers", "layer_types")  # the family windows every layer or none
    return read_common(
        reader,
        **qwen3.common_fields(reader),
        **expert_fields(reader),
        layer_windows=(qwen3.active_window(reader),) * reader.take_int("num_hidden_layers"),
    )


def expert_fields(reader: ConfigReader) -> dict[str, Any]:
    """Which layers have experts, and what these are."""
    layers = reader.take_int("num_hidden_layers")
    step = reader.take_int("decoder_sparse_step", default=1)
    dense = reader.take("mlp_only_layers", default=[])
    if not isinstance(dense, list):
        raise UnsupportedModel(f"{reader.where}: mlp_only_layers = {dense!r}, expected a list")
    return {
        "layer_is_moe": tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        "num_experts": reader.take_int("num_experts", "num_local_experts"),
        "num_experts_per_tok": reader.take_int("num_experts_per_tok"),
        "moe_intermediate_size": reader.take_int("moe_intermediate_size"),
        "norm_topk_prob": bool(reader.take("norm_topk_prob", default=False)),
    }
