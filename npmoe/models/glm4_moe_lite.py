"""glm4_moe_lite: deepseek_v3 with dense and sparse layers named one by one."""

from npmoe.config import ConfigReader, ModelConfig, read_common
from npmoe.errors import UnsupportedModel
from npmoe.models import deepseek_v2, deepseek_v3

model_spec = deepseek_v2.model_spec
parameters = deepseek_v2.parameters


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a glm4_moe_lite checkpoint, hub or transformers v5 spelling."""
    return read_common(
        reader,
        **deepseek_v2.attention_fields(reader),
        **deepseek_v2.expert_fields(reader),
        **deepseek_v3.router_fields(reader, groups=(1, 1), scaling=1.8),
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-5),
        layer_is_moe=_sparse_layers(reader),
    )


def _sparse_layers(reader: ConfigReader) -> tuple[bool, ...]:
    """Of each layer whether it has experts: by `mlp_layer_types`, else all but the first
    `first_k_dense_replace` or one."""
    layers = reader.take_int("num_hidden_layers")
    dense = reader.take_int("first_k_dense_replace", default=1, least=0)
    default = ["dense" if i < dense else "sparse" for i in range(layers)]
    types = reader.take("mlp_layer_types", default=default)
    if (
        not isinstance(types, list)
        or len(types) != layers
        or any(kind not in ("dense", "sparse") for kind in types)
    ):
        raise UnsupportedModel(
            f"{reader.where}: mlp_layer_types = {types!r} is not implemented for {layers} layers"
        )
    return tuple(kind == "sparse" for kind in types)
