"""npmoe's own layout, which `npmoe convert` writes: one tensor for each array of a QuantTensor.

They have npmoe's own names, for example `layers.0.down_proj.codes` and `layers.0.down_proj.scales`;
config.json names each part's format. A tied head in the embedding's format is not stored again.
"""

from typing import Any

from npmoe.checkpoint import Checkpoint
from npmoe.errors import CheckpointError, UnsupportedModel
from npmoe.formats.quant_tensor import CODES_PER_BYTE, DEFAULT_GROUP_SIZE, WEIGHT_FORMATS
from npmoe.models.parameters import TABLE, Parameter

QUANT_METHOD = "npmoe"
LAYOUT_VERSION = 1
NATIVE_WORDS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
"""Dtype word of a plain tensor -> our format."""
_WORD_OF = {name: word for word, name in NATIVE_WORDS.items()}
_SCALE_WORDS = {"fp8": "F32", "mxfp4": "U8", "nvfp4": "U8"}  # the others have fp16 scales


def read_own_formats(checkpoint: Checkpoint, quantization: dict[str, Any]) -> dict[str, str]:
    """Part -> format, from `quantization_config`.

    Raises UnsupportedModel for another version or format, CheckpointError where there is none.
    """
    where = f"{checkpoint.folder / 'config.json'}: quantization_config"
    if quantization.get("version") != LAYOUT_VERSION:
        raise UnsupportedModel(
            f"{where}: version {quantization.get('version')!r} is not implemented (npmoe reads "
            f"{LAYOUT_VERSION}); convert the original checkpoint with this npmoe"
        )
    formats = quantization.get("formats")
    if not isinstance(formats, dict):
        raise CheckpointError(f"{where}: formats = {formats!r}, expected part -> format")
    for part, name in formats.items():
        if not isinstance(name, str) or name not in WEIGHT_FORMATS:
            raise UnsupportedModel(
                f"{where}: {part} has the format {name!r}; npmoe reads {', '.join(WEIGHT_FORMATS)}"
            )
    return formats


def shares_table(parameter: Parameter, tied: bool, formats: dict[str, str]) -> bool:
    """Whether a converted checkpoint stores this parameter, the head, as the embedding only."""
    return parameter.part == "lm_head" and tied and formats["lm_head"] == formats.get(TABLE)


def stored_arrays(
    format_name: str, shape: tuple[int, ...]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """QuantTensor field -> (dtype word, shape): how a converted matrix `[..., N, K]` is stored.

    Raises ValueError where K is not a multiple of the format's group.
    """
    *lead, columns = shape
    if format_name in _WORD_OF:
        return {"codes": (_WORD_OF[format_name], shape)}
    group = DEFAULT_GROUP_SIZE.get(format_name, columns)
    if columns % group:
        raise ValueError(f"{columns} columns are not a multiple of its group, {group}")
    scales = (*lead, columns // group)
    arrays = {
        "codes": ("U8", (*lead, columns // CODES_PER_BYTE.get(format_name, 1))),
        "scales": (_SCALE_WORDS.get(format_name, "F16"), scales),
    }
    if format_name == "int4_asym":
        arrays["zeros"] = ("U8", scales)
    if format_name == "nvfp4":
        arrays["global_scale"] = ("F32", tuple(lead[:-1]))
    return arrays
