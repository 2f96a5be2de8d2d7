"""RMS norm: x / sqrt(mean(x^2) + eps) * weight, in float32 (Zhang and Sennrich, 2019), and layer
norm, which takes the mean off first and adds a bias (Ba et al., 2016)."""

import numpy as np

from npmoe.dtypes import Array
from npmoe.runtime.device import jit


def rms_norm_ref(x: Array, weight: Array, eps: float) -> Array:
    """The definition. x float32 `[..., H]`, weight float32 `[H]` -> float32 `[..., H]`."""
    mean_square = (x * x).mean(axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x float32 `[..., H]`, weight float32 `[H]` -> float32 `[..., H]`."""
    x = np.ascontiguousarray(x)
    out = np.empty_like(x)
    _rms_norm_cpu(x.reshape(-1, x.shape[-1]), weight, np.float32(eps), out.reshape(-1, x.shape[-1]))
    return out


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """x float32 `[..., H]`, weight and bias float32 `[H]` -> float32 `[..., H]`."""
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = (centered * centered).mean(axis=-1, keepdims=True)
    return centered / np.sqrt(variance + np.float32(eps)) * weight + bias


@jit
def _rms_norm_cpu(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """x [R, H] -> out [R, H]; eight partial sums of squares."""
    rows, width = x.shape
    part = np.empty(8, np.float32)
    for r in range(rows):
        part[:] = 0
        for c in range(0, width - width % 8, 8):
            for i in range(8):
                part[i] += x[r, c + i] * x[r, c + i]
        for c in range(width - width % 8, width):
            part[0] += x[r, c] * x[r, c]
        total = np.float32(0)
        for i in range(8):
            total += part[i]
        inverse = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for c in range(width):
            out[r, c] = x[r, c] * inverse * weight[c]
