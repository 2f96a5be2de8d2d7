"""glm4_moe: experts chosen by sigmoid and a selection bias, shared experts, first layers dense.

Half of each head is rotary; q and k may have a norm per head. Layers past `num_hidden_layers`
predict several tokens ahead and are left out.
"""

from typing import Any

from npmoe.config import ConfigReader, ModelConfig, read_common, read_rope
from npmoe.models import llama
from npmoe.models.specs import ModelSpec

parameters = llama.parameters


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a glm4_moe checkpoint, hub or transformers v5 spelling."""
    return read_common(
        reader,
        **routing_fields(reader, first_dense=1, renormalize=True),
        intermediate_size=reader.take_int("intermediate_size"),
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-5),
        attention_bias=bool(reader.take("attention_bias", default=False)),
        use_qk_norm=bool(reader.take("use_qk_norm", default=False)),
        rope=read_rope(reader, default_partial=0.5),
    )


def routing_fields(reader: ConfigReader, first_dense: int, renormalize: bool) -> dict[str, Any]:
    """Sigmoid scores with a selection bias, in groups, and the experts behind them.

    first_dense and renormalize: what configs mean that do not say.
    """
    layers = reader.take_int("num_hidden_layers")
    dense = reader.take_int("first_k_dense_replace", default=first_dense, least=0)
    width = reader.take_int("moe_intermediate_size")
    reader.expect("scoring_func", "sigmoid", "noaux_tc")
    reader.expect("topk_method", "noaux_tc")
    reader.expect("moe_layer_freq", 1)
    reader.ignore("num_nextn_predict_layers", "num_mtp_layers")
    return {
        "layer_is_moe": tuple(i >= dense for i in range(layers)),
        "num_experts": reader.take_int("n_routed_experts", "num_local_experts"),
        "num_experts_per_tok": reader.take_int("num_experts_per_tok"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width
        * reader.take_int("n_shared_experts", default=1, least=0),
        "norm_topk_prob": bool(reader.take("norm_topk_prob", default=renormalize)),
        "scoring_func": "sigmoid",
        "selection_bias": True,
        "n_group": reader.take_int("n_group", default=1),
        "topk_group": reader.take_int("topk_group", default=1),
        "group_score": "sum_of_two",
        "routed_scaling_factor": reader.take_number("routed_scaling_factor", default=1.0),
    }


def model_spec(config: ModelConfig) -> ModelSpec:
    """llama's layers without a bias on the output projection."""
    qk_norm = "head" if config.use_qk_norm else "none"
    return llama.model_spec(config, qk_norm=qk_norm, output_bias=False)
