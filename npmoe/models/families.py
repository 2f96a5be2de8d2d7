"""Which file reads which `model_type`."""

from types import ModuleType
from typing import Any

from npmoe.config import ConfigReader, ModelConfig
from npmoe.errors import UnsupportedModel
from npmoe.models import (
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5_moe,
    flex_olmo,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granitemoe,
    granitemoeshared,
    hunyuan_v1_moe,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmoe,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5_moe,
    qwen3_5_moe_text,
    qwen3_moe,
    qwen3_next,
)
from npmoe.models.parameters import Parameter
from npmoe.models.specs import ModelSpec

FAMILIES: dict[str, ModuleType] = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "dots1": dots1,
    "ernie4_5_moe": ernie4_5_moe,
    "flex_olmo": flex_olmo,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "gpt_oss": gpt_oss,
    "granitemoe": granitemoe,
    "granitemoeshared": granitemoeshared,
    "hunyuan_v1_moe": hunyuan_v1_moe,
    "llama": llama,
    "minimax_m2": minimax_m2,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "phimoe": phimoe,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
}


def read_model(
    raw: dict[str, Any], where: str, ignored: tuple[str, ...] = ()
) -> tuple[ModelConfig, ModelSpec, list[Parameter]]:
    """A config dict as config, spec and parameter list.

    Raises UnsupportedModel for an unknown model_type and for keys that are not implemented.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModel(
            f"{where}: model_type {model_type!r} is not implemented "
            f"(npmoe runs {', '.join(FAMILIES)})"
        )
    family = FAMILIES[model_type]
    reader = ConfigReader(raw, where, ignored)
    config = family.read_config(reader)
    reader.finish()
    spec = family.model_spec(config)
    return config, spec, family.parameters(config, spec)
