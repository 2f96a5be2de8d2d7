"""hunyuan_v1_moe: routed experts and a shared one on every layer; q and k normed after rotary."""

from npmoe.config import ConfigReader, ModelConfig, RopeConfig, is_number, read_common, read_rope
from npmoe.errors import UnsupportedModel
from npmoe.models import llama
from npmoe.models.parameters import Parameter, TensorNames, decoder_parameters
from npmoe.models.specs import ModelSpec

NAMES = TensorNames(
    router="gate.wg", shared="shared_mlp", qk_norms=("query_layernorm", "key_layernorm")
)


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a hunyuan_v1_moe checkpoint, hub or transformers v5 spelling."""
    layers = reader.take_int("num_hidden_layers")
    width = reader.take_int("intermediate_size")
    heads = reader.take_int("num_attention_heads")
    head_dim = reader.take_int("hidden_size") // heads
    head_dim = reader.take_int("head_dim", "attention_head_dim", default=head_dim)
    reader.expect("use_qk_norm", True)
    reader.expect("use_mixed_mlp_moe", True)
    reader.expect("moe_layer_num_skipped", 0)
    reader.expect("num_shared_expert", 1, [1] * layers)
    reader.expect("moe_intermediate_size", width, [width] * layers)
    reader.expect("partial_rotary_factor", 1, 1.0)
    reader.ignore("eod_token_id", "cla_share_factor")
    return read_common(
        reader,
        intermediate_size=width,
        head_dim=head_dim,
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-5),
        attention_bias=bool(reader.take("attention_bias", default=False)),
        rope=_read_rope(reader, head_dim),
        layer_is_moe=(True,) * layers,
        num_experts=_of_every_layer(reader, "num_experts", "num_local_experts"),
        num_experts_per_tok=_of_every_layer(reader, "moe_topk", "num_experts_per_tok"),
        moe_intermediate_size=width,
        shared_expert_intermediate_size=width,
        norm_topk_prob=True,
    )


def _of_every_layer(reader: ConfigReader, *names: str) -> int:
    """A number, or a list with the same one for each layer."""
    value = reader.take(*names)
    if isinstance(value, list) and len(set(map(str, value))) == 1:
        reader = ConfigReader({names[0]: value[0]}, reader.where)
    return reader.take_int(*names)


def _read_rope(reader: ConfigReader, head_dim: int) -> RopeConfig:
    """`dynamic` with an alpha is plain rotary whose theta is stretched, whatever the length."""
    key = "rope_scaling" if reader.raw.get("rope_scaling") else "rope_parameters"
    scaling = reader.take(key, default=None)
    if not isinstance(scaling, dict) or scaling.get("alpha") is None:
        return read_rope(reader)
    kind, alpha = scaling.get("rope_type", scaling.get("type")), scaling["alpha"]
    if kind != "dynamic" or not is_number(alpha) or head_dim <= 2:
        raise UnsupportedModel(f"{reader.where}: {key} = {scaling!r} is not implemented")
    theta = scaling.get("rope_theta") or reader.take_number("rope_theta", default=10000.0)
    reader.ignore("rope_parameters", "rope_scaling")
    return RopeConfig(rope_theta=theta * alpha ** (head_dim / (head_dim - 2)))


def model_spec(config: ModelConfig) -> ModelSpec:
    """llama's layers with q/k norms per head, after rotary."""
    return llama.model_spec(config, qk_norm="rotated")


def parameters(config: ModelConfig, spec: ModelSpec) -> list[Parameter]:
    """Checkpoint names."""
    return decoder_parameters(spec, NAMES)
