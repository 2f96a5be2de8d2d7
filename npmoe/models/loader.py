"""Stored weights -> prepared weights: converted as the user asks, laid out for the device."""

from typing import Any

from npmoe.config import WeightsPolicy
from npmoe.models.conversion import conversions, convert_parameter, loaded_formats
from npmoe.models.gpu import GpuModel
from npmoe.models.layers import CausalLM
from npmoe.models.parameters import TABLE, VECTOR
from npmoe.models.stored import OpenModel, listing, read_parameter
from npmoe.models.upload import load_on_gpu
from npmoe.ops.linear import prepare_linear
from npmoe.runtime.progress import progress, say


def load_model(
    opened: OpenModel, policy: WeightsPolicy, device: str, quiet: bool = False
) -> CausalLM | GpuModel:
    """Reads, converts and lays out every parameter; on a GPU, conversion and layout run there.

    Raises UnsupportedModel where a quantised part would be quantised again, and ValueError where a
    format cannot hold a matrix.
    """
    formats = loaded_formats(opened, policy, device)
    for line in conversions(opened, policy, formats):
        say(line, quiet)
    model: CausalLM | GpuModel
    if device == "cuda":
        model = GpuModel(opened.spec, load_on_gpu(opened, formats, quiet))
    else:
        model = CausalLM(opened.spec, _load_on_cpu(opened, policy, quiet))
    extra = [n for n in opened.checkpoint.unused() if not n.endswith("inv_freq")]
    if extra:
        say(f"left out {listing(extra)}: no part of this model's forward pass", quiet)
    return model


def _load_on_cpu(opened: OpenModel, policy: WeightsPolicy, quiet: bool) -> dict[str, Any]:
    """Parameter name -> float32 vector or prepared matrix; the embedding stays in its file."""
    weights: dict[str, Any] = {}
    for parameter in progress(opened.parameters, "loading weights", quiet):
        w = read_parameter(opened, parameter)
        if parameter.part not in (VECTOR, TABLE):
            w = prepare_linear(convert_parameter(parameter, w, policy))
        weights[parameter.name] = w
    return weights
