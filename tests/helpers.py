"""What tests share: comparing, small random data, safetensors by hand, and running a model."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npmoe.batch import Batch
from npmoe.config import KVCacheConfig
from npmoe.kv.storage import KVCache, key_value_dims
from npmoe.models.cache import ModelCache
from npmoe.models.layers import CausalLM
from npmoe.models.loader import load_model
from npmoe.models.specs import AttentionSpec, ModelSpec
from npmoe.models.stored import open_model
from npmoe.ops.quantize import KVPages

GOLDEN = Path(__file__).parent / "golden"
PAGE_SIZE = 16
SLOTS = 5


def by_name(cases: Any) -> Any:
    """`parametrize` over a list of cases with their names as test ids."""
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal float32 numbers, the same at every call."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def greedy_keys(logits: np.ndarray) -> np.ndarray:
    """lm_head.cu's choice of each row of logits float32 `[S, vocab]`, u64 `[S]`: the larger the
    logit, the larger its upper half; the lower the token, the larger the other."""
    tokens = logits.argmax(axis=1)
    bits = (logits[np.arange(len(logits)), tokens] + np.float32(0)).view(np.uint32)
    upper = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
    return upper << np.uint64(32) | (~tokens & 0xFFFFFFFF).astype(np.uint64)


def with_attention(spec: ModelSpec, changes: list[dict[str, Any]]) -> ModelSpec:
    """The same model with other fields in the AttentionSpec of each layer."""
    layers = []
    for layer, fields in zip(spec.layers, changes, strict=True):
        assert isinstance(layer.attention, AttentionSpec)
        layers.append(replace(layer, attention=replace(layer.attention, **fields)))
    return replace(spec, layers=tuple(layers))


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over largest reference value of each row; the worst row (DESIGN 7)."""
    if got.size == 0:
        return 0.0
    difference, scale = np.abs(got - want).max(axis=-1), np.abs(want).max(axis=-1)
    return float((difference / np.maximum(scale, 1e-30)).max())


def make_pages(
    kv_format: str,
    num_pages: int,
    heads: int,
    head_dim: int,
    page_size: int = PAGE_SIZE,
    group_size: int | None = None,
) -> KVPages:
    """Empty pages of one format; if not told, scales per 32 elements, or 16 of smaller heads."""
    group_size = group_size or (32 if head_dim % 32 == 0 else 16)
    config = KVCacheConfig(kv_format, kv_format, group_size=group_size)
    return KVCache(1, num_pages, page_size, heads, head_dim, config).layers[0][0]


Tensors = dict[str, tuple[str, list[int], bytes]]
"""Name -> dtype word, shape, bytes: a safetensors file taken apart."""


def read_safetensors(path: Path) -> Tensors:
    """A whole file, without the code under test."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    return {n: (h["dtype"], h["shape"], data[slice(*h["data_offsets"])]) for n, h in header.items()}


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """The inverse of `read_safetensors`."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        end = offset + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # the data begins at a multiple of 8
    write_raw_safetensors(path, raw, b"".join(t[2] for t in tensors.values()))


def write_raw_safetensors(path: Path, header: bytes, data: bytes = b"") -> None:
    """A file with any bytes for a header."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@cache
def golden_arrays(name: str) -> dict[str, np.ndarray]:
    """The expected arrays of a golden case."""
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        return dict(arrays)


@cache
def golden_model(name: str) -> CausalLM:
    """The loaded model of a golden case, weights as stored."""
    return load_model(open_model(GOLDEN / name), {}, "cpu", quiet=True)


class Session:
    """Sequences of one model in one KV cache, pages handed out in a shuffled order."""

    def __init__(
        self, model: CausalLM, kv: str | KVCacheConfig = "fp32", num_pages: int = 48
    ) -> None:
        spec = model.spec
        dims = key_value_dims(spec.head_dim)
        group_size = 32 if all(d % 32 == 0 for d in dims) else 16
        config = replace(KVCacheConfig.parse(kv), group_size=group_size)
        self.model = model
        self.cache = ModelCache(spec, num_pages, PAGE_SIZE, config, num_slots=SLOTS).layers
        self._slots: dict[str, int] = {}
        self._free = [int(page) for page in np.random.default_rng(1).permutation(num_pages)]
        self._pages: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(self, long_rope: bool = True, **new: np.ndarray) -> dict[str, np.ndarray]:
        """Feeds token ids to the named sequences in one batch; logits of every token by name."""
        counts = [len(ids) for ids in new.values()]
        for name in new:
            self._slots.setdefault(name, SLOTS - 1 - len(self._slots))
        positions, slots, tables, lengths = [], [], [], []
        for name, ids in new.items():
            start = self._lengths.get(name, 0)
            stop = self._lengths[name] = start + len(ids)
            pages = self._pages.setdefault(name, [])
            while len(pages) * PAGE_SIZE < stop:
                pages.append(self._free.pop())
            where = np.arange(start, stop)
            positions.append(where)
            slots.append(np.array(pages)[where // PAGE_SIZE] * PAGE_SIZE + where % PAGE_SIZE)
            tables.append(pages)
            lengths.append(stop)
        widest = max(map(len, tables))
        edges = np.cumsum([0, *counts])
        total = int(edges[-1])
        has_variants = self.model.spec.longrope_switch is not None
        batch = Batch(
            input_ids=_int32(np.concatenate(list(new.values()))),
            positions=_int32(np.concatenate(positions)),
            slot_mapping=_int32(np.concatenate(slots)),
            cu_seqlens_q=_int32(edges),
            seq_lens=_int32(lengths),
            block_table=_int32([t + [0] * (widest - len(t)) for t in tables]),
            logits_rows=np.arange(total, dtype=np.int32),
            rope_variant=np.full(total, int(long_rope), np.int32) if has_variants else None,
            state_slots=_int32([self._slots[name] for name in new]),
        )
        logits = self.model.forward(batch, self.cache)
        return dict(zip(new, np.split(logits, edges[1:-1]), strict=True))


def logits_in_chunks(
    model: CausalLM, ids: np.ndarray, chunk: int, kv: str | KVCacheConfig = "fp32"
) -> np.ndarray:
    """Logits of every position, with `chunk` tokens a step."""
    session = Session(model, kv)
    switch = model.spec.longrope_switch
    long_rope = switch is not None and len(ids) > switch
    pieces = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
    return np.concatenate([session.step(long_rope, it=piece)["it"] for piece in pieces])


def _int32(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)
