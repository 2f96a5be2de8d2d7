"""ernie4_5_moe: experts chosen by softmax and a selection bias, shared experts, dense layers.

Rotary turns neighbouring elements. Multi-token prediction (`mtp`) is left out.
"""

from dataclasses import replace

from npmoe.config import ConfigReader, ModelConfig, read_common, read_rope
from npmoe.models import llama
from npmoe.models.parameters import Parameter, TensorNames, decoder_parameters
from npmoe.models.specs import ModelSpec


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of an ernie4_5_moe checkpoint, hub or transformers v5 spelling."""
    width = reader.take_int("moe_intermediate_size")
    reader.expect("partial_rotary_factor", 1, 1.0)
    reader.expect("use_bias", False)
    reader.expect("use_rmsnorm", True)
    reader.expect("moe_gate", "topk")
    reader.expect("moe_use_aux_free", True)
    reader.expect("moe_norm_min", 1e-12)
    reader.ignore("moe_capacity", "num_nextn_predict_layers")
    return read_common(
        reader,
        intermediate_size=reader.take_int("intermediate_size"),
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-5),
        rope=read_rope(reader, default_theta=500000.0),
        tie_word_embeddings=bool(reader.take("tie_word_embeddings", default=True)),
        layer_is_moe=_layer_is_moe(reader),
        num_experts=reader.take_int("moe_num_experts", "num_experts", default=64),
        num_experts_per_tok=reader.take_int("moe_k", "num_experts_per_tok", default=6),
        moe_intermediate_size=width,
        shared_expert_intermediate_size=width
        * reader.take_int("moe_num_shared_experts", default=2, least=0),
        norm_topk_prob=True,
        selection_bias=True,
    )


def _layer_is_moe(reader: ConfigReader) -> tuple[bool, ...]:
    """Every `moe_layer_interval`-th layer from the start index to the end index, -1 the last."""
    layers = reader.take_int("num_hidden_layers")
    step = reader.take_int("moe_layer_interval", default=1)
    first = reader.take_int("moe_layer_start_index", default=1, least=0)
    last = reader.take_int("moe_layer_end_index", default=-1, least=-1)
    last = layers - 1 if last == -1 else last
    return tuple((i + 1) % step == 0 and first <= i <= last for i in range(layers))


def model_spec(config: ModelConfig) -> ModelSpec:
    """llama's layers with interleaved rotary."""
    spec = llama.model_spec(config)
    layers = tuple(
        replace(layer, attention=replace(layer.attention, interleaved=True))
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


def parameters(config: ModelConfig, spec: ModelSpec) -> list[Parameter]:
    """Checkpoint names; the selection bias is a row."""
    bias = "moe_statics.e_score_correction_bias"
    return decoder_parameters(spec, TensorNames(selection_bias=bias, selection_bias_row=True))
