"""Rotation of heads by a Hadamard matrix, which spreads an outlier over its whole block.

Rotating queries and keys alike leaves their products as they are; a rotation of values is undone by
the same rotation of what attention makes of them. The cache then holds no outliers, and a group's
scale wastes fewer codes (QuaRot, arXiv:2404.00456, section 4).
"""

from functools import cache

import numpy as np

from npmoe.dtypes import Array


def hadamard(x: Array) -> Array:
    """x `[..., D]` times an orthonormal, symmetric matrix: its own inverse. float32 like x.

    Sylvester's Hadamard matrix over the square root of its size, where D is a power of two; else
    blocks of the largest power of two that divides D.
    """
    size = x.shape[-1] & -x.shape[-1]
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return (blocks @ _matrix(size)).reshape(x.shape)


@cache
def _matrix(size: int) -> np.ndarray:
    h = np.ones((1, 1), np.float32)
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(np.float32(size))
