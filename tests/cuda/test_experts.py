"""cuda_src/experts.cu on the CPU against routing, SwiGLU and both projections in NumPy."""

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from npmoe.formats.fragments import RECORD_BYTES, ROWS
from npmoe.formats.quant_tensor import QuantTensor, quantize
from npmoe.models import stream
from npmoe.models.decode import EMPTY
from npmoe.models.stream import W_CODES, ExpertStream
from npmoe.ops.experts import PLAIN, SwiGLU, swiglu_ref
from npmoe.ops.linear import linear_ref
from npmoe.ops.route import top_k_ref
from tests.cuda.build import kernel, launch
from tests.cuda.support import (
    SHARED_BYTES,
    TOLERANCE,
    Memory,
    Streaming,
    activations,
    codes,
    norm_of_some,
    run_all_orders,
    streaming,
    weight,
)
from tests.helpers import relative_error

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """blocks: of each kernel, beside tokens; ring: chunks in the ring, 0 for no bulk copies;
    norm_size: columns of which the norm's mean is, 0 for all; biased: both projections are."""

    name: str
    fmt: str
    hidden: int
    width: int
    experts: int
    top_k: int
    renormalize: bool
    tokens: int
    blocks: int
    ring: int
    norm_size: int = 0
    biased: bool = False
    activation: SwiGLU = PLAIN

    def input(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The residual stream, the norm's weights, and what the norm makes of it."""
        x, size = activations(rng, self.tokens, self.hidden), self.norm_size or self.hidden
        x[:, size:] = 0
        norm = rng.uniform(0.5, 1.5, self.hidden).astype(np.float32)
        return x, norm, norm_of_some(x, norm, EPS, size)

    @property
    def kind(self) -> dict[str, int]:
        return {"BIASED": int(self.biased), "CLAMPED": int(self.activation != PLAIN)}

    def bias(self, rng: np.random.Generator, rows: int) -> np.ndarray | None:
        if not self.biased:
            return None
        return rng.standard_normal((self.experts, rows)).astype(np.float32)


CLAMPED = SwiGLU(1.702, 0.7, 1.0)
CASES = (
    Case("fp4_ring", "fp4", 384, 128, 5, 2, True, 2, 3, 2),
    Case("fp4_pairs", "fp4", 384, 256, 5, 2, True, 2, 3, 4),  # tiles two by two
    Case("nvfp4_pairs", "nvfp4", 512, 128, 4, 3, False, 1, 5, 5),
    Case("bf16_plain", "bf16", 256, 256, 40, 3, False, 3, 5, 0),
    Case("bf16_ring_wide", "bf16", 128, 1152, 6, 4, True, 1, 5, 2),
    Case("fp4_plain_many", "fp4", 640, 128, 33, 6, True, 2, 50, 0),  # more blocks than tiles
    Case("fp4_ring_narrow", "fp4", 256, 128, 7, 6, True, 1, 4, 3),  # a chunk for one warp alone
    Case("fp8_ring", "fp8", 256, 128, 4, 2, True, 1, 3, 2),
    Case("int4_plain", "int4", 128, 256, 4, 3, False, 2, 5, 0),
    Case("int4_asym_ring", "int4_asym", 384, 256, 4, 2, True, 1, 4, 2),
    Case("mxfp4_ring", "mxfp4", 256, 256, 5, 2, True, 2, 6, 2),
    Case("nvfp4_plain", "nvfp4", 256, 128, 4, 2, True, 2, 5, 0),
    Case("mxfp4_biased", "mxfp4", 384, 128, 5, 3, True, 2, 3, 3, 320, True, CLAMPED),
    Case("bf16_biased", "bf16", 256, 128, 5, 2, False, 1, 2, 0, 0, True),
)
SANITIZED = ("fp4_ring", "fp4_pairs", "int4_asym_ring", "mxfp4_biased")
PARAMS = [
    pytest.param(c, id=c.name, marks=[pytest.mark.sanitize] if c.name in SANITIZED else [])
    for c in CASES
]


def in_turn(bias: np.ndarray | None) -> np.ndarray | None:
    """Biases `[E, 2 I]` of gate and up in turn, as the kernel wants them."""
    if bias is None:
        return None
    return bias.reshape(len(bias), 2, -1).swapaxes(1, 2).reshape(bias.shape)


def interleaved(w: QuantTensor) -> QuantTensor:
    """Gate and up rows in turn, as the kernel wants them."""
    width = w.shape[-2] // 2
    order = np.arange(2 * width).reshape(2, width).T.ravel()
    arrays = {n: a[..., order, :] for n, a in w.arrays().items() if n != "global_scale"}
    return replace(w, **arrays)


def expert_kernel(name: str, case: Case) -> Streaming:
    columns = case.hidden if name == "gate_up" else case.width
    rows = case.top_k * 2 * case.width if name == "gate_up" else case.hidden
    macros = {"HIDDEN": case.hidden, "WIDTH": case.width, "EXPERTS": case.experts}
    macros |= {"TOP_K": case.top_k, "RENORMALIZE": case.renormalize}
    if case.norm_size:
        macros["NORM_SIZE"] = case.norm_size
    macros |= case.kind
    stacked, tiles = 1 if name == "gate_up" else case.top_k, -(-rows // ROWS // case.blocks)
    return streaming("experts", name, case.fmt, columns, tiles, rows, case.ring, stacked, **macros)


def inputs(case: Case) -> tuple[Any, ...]:
    rng = np.random.default_rng(case.hidden + case.width)
    gate_up = weight(rng, case.fmt, case.experts, 2 * case.width, case.hidden)
    down = weight(rng, case.fmt, case.experts, case.hidden, case.width)
    logits = rng.standard_normal((case.tokens, case.experts)).astype(np.float32)
    logits[0, 3:] = logits[0, 1]  # ties across the border of the choice
    return gate_up, down, logits, rng


def check_hidden(
    hidden: np.ndarray,
    w: QuantTensor,
    normed: np.ndarray,
    weights: np.ndarray,
    ids: np.ndarray,
    bias: np.ndarray | None = None,
    activation: SwiGLU = PLAIN,
) -> None:
    """hidden `[T, K, I]` against what experts w `[E, 2 I, H]` make of normed `[T, H]`."""
    dense = w.dequantize()
    for t in range(len(normed)):
        sums = normed[t] @ dense[ids[t]].transpose(0, 2, 1)
        gated = swiglu_ref(sums if bias is None else sums + bias[ids[t]], activation)
        assert relative_error(hidden[t], weights[t, :, None] * gated) < 2 * TOLERANCE


@pytest.mark.parametrize("case", PARAMS)
def test_gate_up(case: Case) -> None:
    w, _, logits, rng = inputs(case)
    x, norm, normed = case.input(rng)
    bias, kind = case.bias(rng, 2 * case.width), case.activation
    gate_up = expert_kernel("gate_up", case)
    records = codes(interleaved(w))

    def run(memory: Memory, seed: int) -> tuple[np.ndarray, ...]:
        hidden = memory.output(case.tokens, case.top_k, case.width)
        chosen = memory.writable(np.full((case.tokens, case.top_k), EMPTY, np.uint32))
        chosen_weights = memory.output(case.tokens, case.top_k)
        gate_up(
            *((case.blocks, case.tokens), hidden, chosen, chosen_weights),
            *(given(memory, a) for a in (records, in_turn(bias), logits, x, norm)),
            *(EPS, kind.alpha, kind.limit, kind.offset),
            seed=seed,
        )
        return hidden, chosen, chosen_weights[: case.tokens * case.biased]

    hidden, chosen, chosen_weights = run_all_orders(run)
    weights, ids = top_k_ref(logits, case.top_k, case.renormalize)
    assert (chosen == ids).all()
    assert relative_error(chosen_weights, weights[: len(chosen_weights)]) < 1e-6
    check_hidden(hidden, w, normed, weights, ids, bias, kind)


def given(memory: Memory, a: np.ndarray | None) -> np.ndarray | None:
    return None if a is None else memory.read_only(a)


@pytest.mark.parametrize("case", PARAMS)
def test_down(case: Case) -> None:
    _, w, logits, rng = inputs(case)
    hidden = activations(rng, case.tokens, case.top_k, case.width)
    before = rng.standard_normal((case.tokens, case.hidden)).astype(np.float32)
    down, bias = expert_kernel("down", case), case.bias(rng, case.hidden)
    weights, ids = top_k_ref(logits, case.top_k, case.renormalize)
    records = codes(w)

    def run(memory: Memory, seed: int) -> tuple[np.ndarray]:
        residual = memory.writable(before)
        down(
            *((case.blocks, case.tokens), residual),
            *(given(memory, a) for a in (records, bias, ids.astype(np.uint32), weights, hidden)),
            seed=seed,
        )
        return (residual,)

    (residual,) = run_all_orders(run)
    dense = w.dequantize()
    expected = [
        sum(hidden[t, k] @ dense[ids[t, k]].T for k in range(case.top_k))
        for t in range(case.tokens)
    ]
    if bias is not None:
        expected += (weights[..., None] * bias[ids]).sum(axis=1)
    assert relative_error(residual, before + expected) < TOLERANCE


IN_ONE = (  # name, format, hidden, width, experts, top_k, renormalize, blocks, chunks in the ring
    ("fp4", "fp4", 512, 256, 5, 2, True, 3, 4),  # tiles two by two; two batches
    ("fp4_window", "fp4", 256, 3072, 5, 4, True, 9, 5),  # activations of down through a window
    ("bf16", "bf16", 256, 128, 4, 3, False, 5, 4),
    ("bf16_window", "bf16", 128, 1536, 4, 4, True, 8, 4),
    ("nvfp4", "nvfp4", 384, 128, 4, 2, True, 40, 4),  # more blocks than tiles
    ("int4_asym", "int4_asym", 256, 256, 4, 2, True, 4, 6),
    ("mxfp4_biased", "mxfp4", 384, 128, 5, 3, True, 2, 4),  # clamped; two batches
)


@pytest.mark.parametrize("qkv_rows", [0, 96, 16], ids=["", "qkv", "short_qkv"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c[0], marks=[pytest.mark.sanitize] if c[0] == "fp4_window" else [])
        for c in IN_ONE
    ],
)
def test_experts_in_one_kernel(case: tuple[Any, ...], qkv_rows: int) -> None:
    """Both projections; and the next layer's q, k and v, of which the last case has one tile."""
    name, fmt, hidden, width, experts, top_k, renormalize, blocks, ring = case
    shape = Case(name, fmt, hidden, width, experts, top_k, renormalize, 1, blocks, ring)
    if name == "mxfp4_biased":
        shape = replace(shape, norm_size=hidden - 64, biased=True, activation=CLAMPED)
    norm_size, kind = shape.norm_size or hidden, shape.activation
    gate_up, down, logits, rng = inputs(shape)
    x, norm, normed = shape.input(rng)
    up_bias, down_bias = shape.bias(rng, 2 * width), shape.bias(rng, hidden)
    if down_bias is not None:  # of padding there is none
        down_bias[:, norm_size:] = 0
        down = quantize(down.dequantize() * (np.arange(hidden) < norm_size)[:, None], fmt)
    qkv = weight(rng, fmt, max(qkv_rows, ROWS), hidden)
    qkv_bias = None if fmt == "bf16" else rng.standard_normal(qkv.shape[0]).astype(np.float32)
    qkv_norm = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    chunk_bytes = 4 * RECORD_BYTES[fmt]
    changed = {"CHUNK_BYTES": chunk_bytes, "NARROW_CHUNK_BYTES": chunk_bytes}
    changed |= dict.fromkeys(("RING_BYTES", "NARROW_EXPERT_RING_BYTES"), ring * (chunk_bytes + 16))
    with patch.multiple(stream, **changed):
        fitted = ExpertStream.fit(fmt, hidden, width, top_k, blocks, SHARED_BYTES, qkv_rows)
    assert fitted is not None
    macros = {"HIDDEN": hidden, "WIDTH": width, "EXPERTS": experts, "TOP_K": top_k}
    macros |= {"RENORMALIZE": renormalize, "W_FORMAT": W_CODES[fmt]} | fitted.macros()
    macros |= {"NORM_SIZE": norm_size} | shape.kind
    function = kernel("experts", "experts_qkv" if qkv_rows else "experts", **macros)
    arrays = codes(interleaved(gate_up)), in_turn(up_bias), codes(down), down_bias, logits, norm

    def run(memory: Memory, seed: int) -> tuple[np.ndarray, ...]:
        residual, projected = memory.writable(x), memory.output(qkv_rows)
        words = np.full(top_k * width + hidden, EMPTY, np.uint32)
        read = [given(memory, a) for a in arrays]
        qkv_read = [given(memory, a) for a in (codes(qkv), qkv_bias, qkv_norm)]
        followed = projected, *qkv_read, qkv_rows
        launch(
            *(function, (blocks,), fitted.threads, residual),
            *(memory.writable(words.view(np.float32)), *read),
            *(EPS, kind.alpha, kind.limit, kind.offset),
            *(followed if qkv_rows else ()),
            shared=fitted.shared,
            seed=seed,
        )
        return residual, projected

    residual, projected = run_all_orders(run)
    weights, ids = top_k_ref(logits, top_k, renormalize)
    sums = normed[0] @ gate_up.dequantize()[ids[0]].transpose(0, 2, 1)
    gated = swiglu_ref(sums if up_bias is None else sums + up_bias[ids[0]], kind)
    made = np.einsum("ki,khi->kh", gated, down.dequantize()[ids[0]])
    if down_bias is not None:
        made += down_bias[ids[0]]
    expected = x + weights[0] @ made
    assert relative_error(residual, expected) < 2 * TOLERANCE
    if qkv_rows:  # of the residual that is there, so that its error does not count twice
        expected = linear_ref(norm_of_some(residual, qkv_norm, EPS, norm_size), qkv, qkv_bias)
        assert relative_error(projected, expected[0]) < TOLERANCE
