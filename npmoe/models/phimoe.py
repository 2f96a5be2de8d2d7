"""phimoe: mixtral with sparsemixer routing, layer norms, and biases on attention and head."""

from dataclasses import replace

from npmoe.config import ConfigReader, ModelConfig, RopeConfig, read_common, read_rope
from npmoe.errors import UnsupportedModel
from npmoe.models import llama, mixtral
from npmoe.models.specs import ExpertSpec, LayerSpec, ModelSpec
from npmoe.ops.route import TopKRule

parameters = mixtral.parameters
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a phimoe checkpoint, hub or transformers v5 spelling."""
    layers = reader.take_int("num_hidden_layers")
    width = reader.take_int("intermediate_size")
    reader.expect("partial_rotary_factor", 1, 1.0)
    reader.expect("num_experts_per_tok", 2)
    reader.ignore("input_jitter_noise", "hidden_dropout")  # of training
    return read_common(
        reader,
        intermediate_size=width,
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-5),
        attention_bias=bool(reader.take("attention_bias", default=False)),
        lm_head_bias=bool(reader.take("lm_head_bias", default=False)),
        rope=_read_rope(reader),
        layer_windows=(reader.take_int("sliding_window", default=None),) * layers,
        layer_is_moe=(True,) * layers,
        num_experts=reader.take_int("num_local_experts", "num_experts"),
        num_experts_per_tok=reader.take_int("num_experts_per_tok", default=2),
        moe_intermediate_size=width,
        router_jitter_noise=reader.take_number("router_jitter_noise", default=0.01),
    )


def _read_rope(reader: ConfigReader) -> RopeConfig:
    """longrope comes with the factor on cos and sin, the same below and above its switch."""
    key = "rope_scaling" if reader.raw.get("rope_scaling") else "rope_parameters"
    scaling = reader.take(key, default=None)
    if not isinstance(scaling, dict) or "short_mscale" not in scaling:
        return read_rope(reader, default_theta=1e6)
    scaling = dict(scaling)
    factor, long_factor = scaling.pop("short_mscale"), scaling.pop("long_mscale", None)
    if factor != long_factor:
        raise UnsupportedModel(
            f"{reader.where}: short_mscale = {factor!r} with long_mscale = {long_factor!r} is not "
            "implemented (npmoe implements equal ones)"
        )
    reader.ignore(*ROPE_KEYS)
    scaling["attention_factor"] = factor
    return read_rope(ConfigReader(reader.raw | {key: scaling}, reader.where), default_theta=1e6)


def model_spec(config: ModelConfig) -> ModelSpec:
    """llama's layers with layer norms and sparsemixer routing."""
    spec = llama.model_spec(config)
    layers = tuple(_layer(layer, config) for layer in spec.layers)
    return replace(spec, layers=layers, layer_norm=True, head_bias=config.lm_head_bias)


def _layer(layer: LayerSpec, config: ModelConfig) -> LayerSpec:
    assert isinstance(layer.mlp, ExpertSpec)
    rule = TopKRule("sparsemixer", jitter=config.router_jitter_noise)
    router = replace(layer.mlp.router, rule=rule)
    return replace(layer, norm="layer", mlp=replace(layer.mlp, router=router))
