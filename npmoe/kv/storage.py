"""The arrays of the KV cache: pages of any format, K and V independent, all layers."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from npmoe.config import HeadDims, KVCacheConfig
from npmoe.dtypes import array_namespace
from npmoe.errors import UnsupportedModel
from npmoe.ops.paging import copy_kv_pages
from npmoe.ops.quantize import KVPages
from npmoe.runtime.device import to_device

BITS = {
    **{"fp32": 32, "bf16": 16, "fp8": 8, "int8": 8},
    **{"int4": 4, "int4_asym": 4, "fp4": 4, "mxfp4": 4, "nvfp4": 4},
}
"""Of an element."""
GROUP_BITS = {
    **{"fp8": 16, "int8": 16, "int4": 16, "int4_asym": 16 + 8},
    **{"fp4": 16, "mxfp4": 8, "nvfp4": 8},
}
"""Of a group of elements: its scale, and its zero point where it has one."""


def kv_bytes_per_token(config: KVCacheConfig, num_kv_heads: int, head_dim: HeadDims) -> float:
    """Bytes that one token takes in one layer, K and V together, scales and zeros included."""
    total = 0.0
    for name, width in _formats_and_widths(config, head_dim):
        bits = BITS[name] * width + GROUP_BITS.get(name, 0) * (width // config.group_size)
        total += num_kv_heads * bits / 8
    return total


def key_value_dims(head_dim: HeadDims) -> tuple[int, int]:
    """Elements of a head of K, and of V."""
    return (head_dim, head_dim) if isinstance(head_dim, int) else head_dim


def _formats_and_widths(config: KVCacheConfig, head_dim: HeadDims) -> list[tuple[str, int]]:
    """Format and elements of a head of K, then of V."""
    formats = config.key_format, config.value_format
    return list(zip(formats, key_value_dims(head_dim), strict=True))


class KVCache:
    """`layers[i]` is (K pages, V pages) of layer i."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: HeadDims,
        config: KVCacheConfig,
        device: str = "cpu",
    ) -> None:
        """Raises UnsupportedModel if the group size does not divide head_dim."""
        self.config, self._device = config, device
        grid = (num_layers, num_pages, num_kv_heads, page_size)
        check_kv_format(config, head_dim)
        self._slabs = [
            replace(_pages(name, grid, width, config.group_size, device), rotated=config.rotated)
            for name, width in _formats_and_widths(config, head_dim)
        ]
        keys, values = (_layers(slab) for slab in self._slabs)
        self.layers = list(zip(keys, values, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(a.nbytes for slab in self._slabs for a in slab.arrays())

    def copy_page(self, source: int, target: int) -> None:
        """Copies one page's contents in every layer."""
        self.copy_pages([(source, target)])

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies pages (source, target) in every layer, a launch an array.

        Raises ValueError for a page that is a target twice, or a target and a source.
        """
        sources, targets = {c[0] for c in copies}, {c[1] for c in copies}
        if len(targets) < len(copies) or targets & sources:
            raise ValueError(f"copies = {list(copies)}: a target must be nothing else besides")
        arrays = [a for slab in self._slabs for a in slab.arrays()]
        pairs = np.array(copies, np.int32).reshape(-1, 2)
        copy_kv_pages(arrays, to_device(pairs, self._device))


def check_kv_format(config: KVCacheConfig, head_dim: HeadDims) -> None:
    """Raises UnsupportedModel for a format that head_dim cannot hold."""
    if config.windows is not None and not isinstance(head_dim, int):
        raise UnsupportedModel(
            f"kv_cache {config}: a cache of latents (multi-head latent attention) has no windows; "
            "leave + or :windows away"
        )
    if config.rotated and not isinstance(head_dim, int):
        raise UnsupportedModel(
            f"kv_cache {config}: a cache of latents (multi-head latent attention) has no heads to "
            "rotate; leave :rotated away"
        )
    grouped = [
        (name, width) for name, width in _formats_and_widths(config, head_dim) if name in GROUP_BITS
    ]
    for name, width in grouped:
        if width % config.group_size:
            widths = [w for _, w in grouped]
            fitting = [str(g) for g in (16, 32, 64, 128) if all(w % g == 0 for w in widths)]
            hint = f"use group_size {' or '.join(fitting)}" if fitting else "use fp32 or bf16"
            raise UnsupportedModel(
                f"kv_cache {name}: head_dim = {width} is not a multiple of "
                f"group_size = {config.group_size}; {hint}"
            )


def _pages(name: str, grid: tuple, head_dim: int, group_size: int, device: str) -> KVPages:
    """Zeroed pages of one format; grid is (num_layers, num_pages, num_kv_heads, page_size)."""

    def zeros(width: int, dtype: type) -> np.ndarray:
        xp = array_namespace(to_device(np.zeros(1), device))
        return xp.zeros((*grid, width), dtype)

    if name == "fp32":
        return KVPages(name, zeros(head_dim, np.float32))
    if name == "bf16":
        return KVPages(name, zeros(head_dim, np.uint16))
    groups = head_dim // group_size
    codes = zeros(head_dim * BITS[name] // 8, np.uint8)
    zero_points = zeros(groups, np.uint8) if name == "int4_asym" else None
    scales = zeros(groups, np.uint8 if GROUP_BITS[name] == 8 else np.float16)
    return KVPages(name, codes, scales, zero_points)


def _layers(slab: KVPages) -> list[KVPages]:
    """The pages of each layer: views of arrays that have the layers as one more axis in front."""
    arrays = zip(*slab.arrays(), strict=True)
    pages = (KVPages(slab.format, *of_layer) for of_layer in arrays)
    return [replace(p, rotated=slab.rotated) for p in pages]
