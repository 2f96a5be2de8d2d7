"""minimax_m2: experts chosen by sigmoid and a selection bias on every layer, none shared.

q and k are normed over the whole projection and rotary on a part of each head. Multi-token
prediction is left out.
"""

from npmoe.config import ConfigReader, ModelConfig, RopeConfig, read_common, read_rope
from npmoe.errors import UnsupportedModel
from npmoe.models import llama
from npmoe.models.parameters import Parameter, TensorNames, decoder_parameters
from npmoe.models.specs import ModelSpec

BETAS = ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta")


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a minimax_m2 checkpoint, hub or transformers v5 spelling."""
    layers = reader.take_int("num_hidden_layers")
    width = reader.take_int("intermediate_size")
    head_dim = reader.take_int("head_dim", default=128)
    _expect_the_published_kind(reader, layers)
    return read_common(
        reader,
        intermediate_size=width,
        head_dim=head_dim,
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-6),
        rope=_read_rope(reader, head_dim),
        layer_is_moe=(True,) * layers,
        num_experts=reader.take_int("num_local_experts", "num_experts"),
        num_experts_per_tok=reader.take_int("num_experts_per_tok"),
        moe_intermediate_size=width,
        norm_topk_prob=True,
        scoring_func="sigmoid",
        selection_bias=True,
    )


def _expect_the_published_kind(reader: ConfigReader, layers: int) -> None:
    """Refuses what the config could ask for and no published checkpoint has."""
    reader.expect("scoring_func", "sigmoid")
    reader.expect("use_routing_bias", True)
    reader.expect("use_qk_norm", True)
    reader.expect("qk_norm_type", "per_layer")
    reader.expect("attn_type_list", [1] * layers)
    reader.expect("shared_intermediate_size", 0)
    reader.expect("sliding_window")
    for name in BETAS:
        reader.expect(name, 1, 1.0)
    reader.ignore("shared_moe_mode", "mlp_intermediate_size")  # of experts that are not there
    reader.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")


def _read_rope(reader: ConfigReader, head_dim: int) -> RopeConfig:
    """`rotary_dim` elements of each head turn, where no partial_rotary_factor is given."""
    rotary_dim = reader.take_int("rotary_dim", default=head_dim)
    if rotary_dim > head_dim:
        raise UnsupportedModel(
            f"{reader.where}: rotary_dim = {rotary_dim}, expected at most head_dim = {head_dim}"
        )
    return read_rope(reader, default_theta=5e6, default_partial=rotary_dim / head_dim)


def model_spec(config: ModelConfig) -> ModelSpec:
    """llama's layers with one q norm and one k norm over the whole projection."""
    return llama.model_spec(config, qk_norm="projection")


def parameters(config: ModelConfig, spec: ModelSpec) -> list[Parameter]:
    """Checkpoint names of mixtral; the selection bias is beside the router, not in it."""
    names = TensorNames(
        "block_sparse_moe", ("w1", "w3", "w2"), selection_bias="e_score_correction_bias"
    )
    return decoder_parameters(spec, names)
