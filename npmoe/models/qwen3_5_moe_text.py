"""qwen3_5_moe_text: qwen3_next with four delta-net projections for two, and experts on every layer.

Text has one position on all three axes of the multimodal rotary embedding, which is the plain one
then: its keys are without effect.
"""

from typing import Any

from npmoe.config import ConfigReader, ModelConfig, read_common, read_rope
from npmoe.models import qwen3_next
from npmoe.models.parameters import Parameter, TensorNames, decoder_parameters
from npmoe.models.specs import ModelSpec

MROPE_KEYS = ("mrope_section", "mrope_interleaved")
ROPE_SPELLINGS = ("rope_parameters", "rope_scaling")

model_spec = qwen3_next.model_spec


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a text model, or the text_config of a multimodal one."""
    plain = reader.inner("rotary", {k: _without_mrope(k, v) for k, v in reader.raw.items()})
    reader.ignore("rope_theta", "partial_rotary_factor", *ROPE_SPELLINGS)  # read by `plain`
    reader.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
    reader.expect("attn_output_gate", True)
    reader.expect("norm_topk_prob", True)
    return read_common(
        reader,
        **qwen3_next.common_fields(reader),
        rope=read_rope(plain, default_partial=qwen3_next.ROTARY_PART),
        intermediate_size=reader.take_int("moe_intermediate_size"),
        layer_is_moe=(True,) * reader.take_int("num_hidden_layers"),
        norm_topk_prob=True,
    )


def _without_mrope(key: str, value: Any) -> Any:
    if key not in ROPE_SPELLINGS or not isinstance(value, dict):
        return value
    return {k: v for k, v in value.items() if k not in MROPE_KEYS}


def parameters(config: ModelConfig, spec: ModelSpec, model: str = "model") -> list[Parameter]:
    """Checkpoint names, all but the head's below `model`; experts stand alone or are fused."""
    names = TensorNames(shared="shared_expert", model=model)
    return qwen3_next.norms_from_one(decoder_parameters(spec, names))
