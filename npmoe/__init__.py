"""npmoe: Mixture-of-Experts language models on NumPy and CuPy, without PyTorch.

Names are loaded when they are first used, so that importing npmoe is quick and needs no GPU.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "npmoe.config": ("KVCacheConfig", "KVWindows"),
    "npmoe.formats.kv_cache": tuple(
        f"{verb}_kv_cache_{name}"
        for verb in ("quantize", "dequantize")
        for name in ("fp4", "mxfp4", "nvfp4", "int4", "int4_asym", "int8", "fp8")
    ),
    "npmoe.llm": ("LLM",),
    "npmoe.sampling": ("SamplingParams",),
    "npmoe.engine.output": ("Choice", "Completion", "Timings"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = [*sorted(_HOME_OF), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'npmoe' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
