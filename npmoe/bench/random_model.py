"""Random weights and a filled KV cache, made on the device that runs them."""

from dataclasses import replace
from typing import Any

import numpy as np

from npmoe.config import KVCacheConfig
from npmoe.dtypes import Array, array_namespace
from npmoe.formats.quant_tensor import QuantTensor, concatenate_rows, quantize
from npmoe.kv.states import RecurrentState
from npmoe.kv.storage import key_value_dims
from npmoe.models.cache import ModelCache
from npmoe.models.conversion import cannot_be
from npmoe.models.kernel_layout import prepare_for_gpu, prepare_vector
from npmoe.models.parameters import TABLE, VECTOR, Parameter
from npmoe.models.specs import ModelSpec
from npmoe.ops.linear import prepare_linear
from npmoe.ops.quantize import KVPages, write_kv_pages
from npmoe.runtime.device import to_device
from npmoe.runtime.progress import progress

CHUNK = 1 << 24
"""Most elements that are float32 at once; rows of a chunk are a multiple of every layout's tile."""
ROWS_MULTIPLE = 64


def random_weights(
    parameters: list[Parameter], formats: dict[str, str], device: str, quiet: bool = True
) -> dict[str, Any]:
    """Prepared weights by name; formats: part -> format.

    Products of normal activations are normal. The experts of a layer are copies of one, each at an
    address of its own, so that making them takes seconds.
    Raises ValueError where a format cannot hold a matrix.
    """
    rng = array_namespace(to_device(np.zeros(1), device)).random.default_rng(0)
    weights = {}
    for p in progress(parameters, "making random weights", quiet):
        if p.part == VECTOR:
            vector = random_vector(p, np.random.default_rng(0))
            weights[p.name] = device_vector(p, vector, device)
            continue
        one = replace(p, shape=(1, *p.shape[1:])) if p.stacked else p
        try:
            w = prepare(one, random_matrix(one, formats[p.part], rng), device)
        except ValueError as error:
            raise cannot_be(p, formats[p.part], error) from None
        weights[p.name] = _copies(w, p.shape[0]) if p.stacked else w
    return weights


def random_vector(p: Parameter, rng: Any) -> np.ndarray:
    """Norms around 1, biases around 0, float32."""
    center = 1.0 if "norm" in p.name else 0.0
    return (center + 0.1 * rng.standard_normal(p.shape, dtype=np.float32)).astype(np.float32)


def random_matrix(p: Parameter, format_name: str, rng: Any) -> QuantTensor:
    """A random weight in "rows" layout: rows of norm 1, those of an embedding of norm sqrt(K)."""
    *lead, rows, columns = p.shape
    scale = np.float32(1.0 if p.part == TABLE else columns**-0.5)
    step = max(1, CHUNK // (columns * ROWS_MULTIPLE)) * ROWS_MULTIPLE
    if lead or format_name == "nvfp4":  # one global scale a matrix
        step = rows
    parts = []
    for first in range(0, rows, step):
        shape = (*lead, min(step, rows - first), columns)
        values = rng.standard_normal(shape, dtype=np.float32) * scale
        parts.append(quantize(values, format_name))
    return concatenate_rows(parts)


def device_vector(p: Parameter, v: np.ndarray, device: str) -> Array:
    """A vector as the loader puts it on a device."""
    return to_device(prepare_vector(p, v), device) if device == "cuda" else v


def prepare(p: Parameter, w: QuantTensor, device: str) -> QuantTensor | Array:
    """A matrix as the loader lays it out for the device that it is on."""
    if device == "cuda":
        return prepare_for_gpu(p, w)
    return w if p.part == TABLE else prepare_linear(w)


def _copies(w: QuantTensor, count: int) -> QuantTensor:
    """A stack of one matrix `count` times."""
    xp = array_namespace(w.codes)
    copied = w.map_arrays(lambda a: xp.repeat(a, count, axis=0))
    return replace(copied, shape=(count, *w.shape[1:]))


def random_cache(
    spec: ModelSpec,
    kv: KVCacheConfig,
    num_pages: int,
    page_size: int,
    device: str,
    num_slots: int = 1,
) -> ModelCache:
    """A cache for single steps, in which every page of a layer holds the same random keys and
    values; recurrent states and copies in windows, where there are any, for num_slots sequences."""
    heads, widths = spec.num_kv_heads, key_value_dims(spec.head_dim)
    cache = ModelCache(spec, num_pages, page_size, kv, num_slots, device, prefill_chunk=1)
    single = ModelCache(spec, 1, page_size, kv, prefill_chunk=1)
    rng = np.random.default_rng(1)

    def fill(many: KVPages, one: KVPages, width: int) -> None:
        values = rng.standard_normal((one.page_size, heads, width), dtype=np.float32)
        slots = np.arange(one.page_size, dtype=np.int32)
        write_kv_pages(replace(one, copies=None), values, slots)
        for a, b in zip(many.arrays(), one.arrays(), strict=True):
            a[...] = to_device(b, device)

    for layer, page in zip(cache.pages, single.pages, strict=True):
        for many, one, width in zip(layer, page, widths, strict=True):
            fill(many, one, width)
            if many.copies is not None and one.copies is not None:
                fill(many.copies.pages, one.copies.pages, width)
    for state in cache.layers:
        if isinstance(state, RecurrentState):
            for a in (state.conv, state.memory):
                a[...] = 0.1 * rng.standard_normal(a.shape, dtype=np.float32)
    return cache
