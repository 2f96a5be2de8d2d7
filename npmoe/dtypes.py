"""Array and dtype words shared by every layer: NumPy or CuPy, and the checkpoint's dtype names."""

import sys
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray: same methods, told apart by array_namespace

SAFETENSORS_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Dtype words of a safetensors header -> NumPy dtype (https://github.com/huggingface/safetensors)."""


def array_namespace(x: Array) -> ModuleType:
    """The module whose functions take `x`: numpy for NumPy arrays, cupy for CuPy arrays."""
    return sys.modules[type(x).__module__.partition(".")[0]]


def gigabytes(num_bytes: float) -> str:
    """`num_bytes` as a short human text in decimal units, such as '1.4 GB' or '23 kB'."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"
