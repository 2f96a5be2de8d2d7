"""gpt_oss: attention sinks, windows on every other layer, biases everywhere, clamped SwiGLU.

Experts are stored as MXFP4 blocks and scales (the hub's files) or as dense tensors, column by
column (transformers 5). In both, gate and up alternate.
"""

from dataclasses import replace

from npmoe.config import (
    ConfigReader,
    ModelConfig,
    read_common,
    read_layer_windows,
    read_rope,
    read_window,
)
from npmoe.errors import UnsupportedModel
from npmoe.models import llama
from npmoe.models.parameters import Parameter, TensorNames, decoder_parameters
from npmoe.models.specs import AttentionSpec, ExpertSpec, ModelSpec
from npmoe.ops.experts import SwiGLU


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a gpt_oss checkpoint, hub or transformers v5 spelling."""
    layers = reader.take_int("num_hidden_layers")
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    width = reader.take_int("intermediate_size")
    reader.take("rope_parameters", "rope_scaling")  # the family has no plain rotary embedding
    reader.expect("partial_rotary_factor", 1, 1.0)
    reader.ignore("initial_context_length")  # what rope_scaling says
    return read_common(
        reader,
        intermediate_size=width,
        head_dim=reader.take_int("head_dim", default=64),
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-5),
        attention_bias=bool(reader.take("attention_bias", default=True)),
        rope=read_rope(reader, default_theta=150000.0),
        layer_windows=read_layer_windows(reader, read_window(reader, absent=128), types),
        layer_is_moe=(True,) * layers,
        num_experts=reader.take_int("num_local_experts", "num_experts"),
        num_experts_per_tok=reader.take_int("num_experts_per_tok", "experts_per_token"),
        moe_intermediate_size=width,
        norm_topk_prob=True,
        swiglu_alpha=reader.take_number("swiglu_alpha", default=1.702),
        swiglu_limit=reader.take_number("swiglu_limit", default=7.0),
        quant_method=_quant_method(reader),
    )


def _quant_method(reader: ConfigReader) -> str | None:
    """ "mxfp4" where quantization_config says so; which tensors are MXFP4 is fixed."""
    quantization = reader.take("quantization_config", default=None)
    if quantization is None:
        return None
    known = {"quant_method", "modules_to_not_convert"}
    if (
        not isinstance(quantization, dict)
        or quantization.get("quant_method") != "mxfp4"
        or set(quantization) - known
    ):
        raise UnsupportedModel(
            f"{reader.where}: quantization_config = {quantization!r} is not implemented "
            "(npmoe reads 'mxfp4' for this model_type)"
        )
    for name in ("hidden_size", "intermediate_size"):
        if reader.take_int(name) % 32:
            raise UnsupportedModel(
                f"{reader.where}: {name} = {reader.take_int(name)} with mxfp4 experts, "
                "expected a multiple of 32"
            )
    return "mxfp4"


def model_spec(config: ModelConfig) -> ModelSpec:
    """llama's layers with sinks, a router bias, and biased experts with clamped SwiGLU."""
    spec = llama.model_spec(config)
    assert config.swiglu_limit is not None
    activation = SwiGLU(config.swiglu_alpha, config.swiglu_limit, offset=1.0)
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.mlp, ExpertSpec)
        assert isinstance(layer.attention, AttentionSpec)
        router = replace(layer.mlp.router, bias=True)
        mlp = replace(layer.mlp, router=router, bias=True, activation=activation)
        layers.append(replace(layer.with_attention(sinks=True), mlp=mlp))
    return replace(spec, layers=tuple(layers))


def parameters(config: ModelConfig, spec: ModelSpec) -> list[Parameter]:
    """Checkpoint names."""
    layout = "mxfp4" if config.quant_method == "mxfp4" else "columns"
    names = TensorNames(expert=None, router="router", fused_layout=layout, interleaved=True)
    return decoder_parameters(spec, names)
