"""deepseek_v3: deepseek_v2 whose experts are scored by sigmoid and chosen with a bias.

A group counts as the sum of its two best experts.
"""

from typing import Any

from npmoe.config import ConfigReader, ModelConfig, read_common
from npmoe.models import deepseek_v2

model_spec = deepseek_v2.model_spec
parameters = deepseek_v2.parameters


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a deepseek_v3 checkpoint, hub or transformers v5 spelling."""
    layers = reader.take_int("num_hidden_layers")
    dense = reader.take_int("first_k_dense_replace", default=3, least=0)
    return read_common(
        reader,
        **deepseek_v2.attention_fields(reader),
        **deepseek_v2.expert_fields(reader),
        **router_fields(reader, groups=(8, 4), scaling=2.5),
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-6),
        layer_is_moe=tuple(i >= dense for i in range(layers)),
    )


def router_fields(reader: ConfigReader, groups: tuple[int, int], scaling: float) -> dict[str, Any]:
    """The sigmoid router and the order of rotary pairs; groups and scaling are defaults."""
    reader.expect("scoring_func", "sigmoid")
    reader.expect("topk_method", "noaux_tc")
    return {
        "scoring_func": "sigmoid",
        "selection_bias": True,
        "group_score": "sum_of_two",
        "n_group": reader.take_int("n_group", default=groups[0]),
        "topk_group": reader.take_int("topk_group", default=groups[1]),
        "norm_topk_prob": bool(reader.take("norm_topk_prob", default=True)),
        "routed_scaling_factor": reader.take_number("routed_scaling_factor", default=scaling),
        "rope_interleave": bool(reader.take("rope_interleave", default=True)),
    }
