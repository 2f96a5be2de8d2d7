"""mixtral: llama with routed experts on every layer, weights always renormalised."""

from npmoe.config import ConfigReader, ModelConfig, read_common, read_rope
from npmoe.models import llama
from npmoe.models.parameters import Parameter, TensorNames, decoder_parameters
from npmoe.models.specs import ModelSpec

model_spec = llama.model_spec


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a mixtral checkpoint."""
    layers = reader.take_int("num_hidden_layers")
    width = reader.take_int("intermediate_size")
    reader.expect("partial_rotary_factor", 1, 1.0)
    return read_common(
        reader,
        intermediate_size=width,
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-5),
        rope=read_rope(reader, default_theta=1e6),
        layer_windows=(reader.take_int("sliding_window", default=None),) * layers,
        layer_is_moe=(True,) * layers,
        num_experts=reader.take_int("num_local_experts", "num_experts"),
        num_experts_per_tok=reader.take_int("num_experts_per_tok"),
        moe_intermediate_size=width,
        norm_topk_prob=True,
    )


def parameters(config: ModelConfig, spec: ModelSpec) -> list[Parameter]:
    """Checkpoint names: w1 is the gate, w3 the up, w2 the down projection."""
    return decoder_parameters(spec, TensorNames("block_sparse_moe", ("w1", "w3", "w2")))
