"""The kernels of cuda_src/experts.cu for several tokens, on the CPU, against NumPy."""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from npmoe.formats.fragments import COLUMNS, RECORD_BYTES, ROWS
from npmoe.models import stream
from npmoe.models.grouped import COMBINE_THREADS, COMBINED_ROWS
from npmoe.models.stream import W_CODES, GroupedStream
from npmoe.ops.experts import PLAIN, SwiGLU
from npmoe.ops.group import group_by_expert_ref
from npmoe.ops.norm import rms_norm_ref
from tests.cuda.build import kernel, launch
from tests.cuda.support import (
    SHARED_BYTES,
    TOLERANCE,
    Memory,
    activations,
    codes,
    run_all_orders,
    same_bits,
    weight,
)
from tests.cuda.test_experts import CLAMPED, check_hidden, given, in_turn, interleaved
from tests.helpers import relative_error

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """blocks: multiprocessors; ring: chunks in the ring, 0 for no bulk copies; at_once: pairs for
    which an expert is read once; biased: both projections are."""

    name: str
    fmt: str
    hidden: int
    width: int
    experts: int
    top_k: int
    tokens: int
    blocks: int
    ring: int
    at_once: int = 4
    biased: bool = False
    activation: SwiGLU = PLAIN

    @property
    def macros(self) -> dict[str, int]:
        sizes = {"HIDDEN": self.hidden, "WIDTH": self.width, "EXPERTS": self.experts}
        sizes |= {"TOP_K": self.top_k, "TOKENS": self.tokens, "W_FORMAT": W_CODES[self.fmt]}
        return sizes | {"BIASED": int(self.biased), "CLAMPED": int(self.activation != PLAIN)}

    def fit(self, name: str) -> GroupedStream:
        """How the kernel streams, with chunks of at most 4 records, so that rings wrap round."""
        ups = name == "grouped_gate_up"
        columns, rows = (self.hidden, 2 * self.width) if ups else (self.width, self.hidden)
        at_once, chunk_bytes = min(self.at_once, self.tokens), 4 * RECORD_BYTES[self.fmt]
        changed = {"CHUNK_BYTES": chunk_bytes, "NARROW_CHUNK_BYTES": chunk_bytes}
        with patch.multiple(stream, RING_BYTES=self.ring * (chunk_bytes + 16), **changed):
            return GroupedStream.fit(
                *(self.fmt, columns // COLUMNS, at_once, rows // ROWS),
                *(self.tokens * self.top_k, self.experts, self.blocks, self.ring > 0),
                *(SHARED_BYTES, self.tokens if ups else 0),
            )

    def bias(self, rng: np.random.Generator, rows: int) -> np.ndarray | None:
        if not self.biased:
            return None
        return rng.standard_normal((self.experts, rows)).astype(np.float32)

    def run(self, name: str, seed: int, *arguments: Any) -> None:
        """Launches grouped_gate_up or grouped_down as the decode step would."""
        fitted = self.fit(name)
        function = kernel("experts", name, **self.macros, **fitted.macros())
        how = fitted.stream
        grid = (self.blocks * fitted.blocks_each,)
        launch(function, grid, how.threads, *arguments, shared=how.shared, seed=seed)


CASES = (
    Case("fp4_two", "fp4", 384, 128, 5, 2, 2, 3, 2),
    Case("fp4_pairs", "fp4", 256, 256, 6, 2, 3, 5, 4),  # tiles two by two
    Case("fp4_eight", "fp4", 256, 384, 40, 3, 8, 7, 3),
    Case("fp4_read_again", "fp4", 256, 128, 5, 2, 8, 2, 3, at_once=3),
    Case("fp4_one_by_one", "fp4", 128, 256, 4, 2, 3, 3, 3, at_once=1),
    Case("fp4_plain", "fp4", 256, 256, 7, 2, 3, 3, 0),
    Case("bf16_few_tiles", "bf16", 128, 128, 3, 1, 2, 40, 2),  # more blocks than tiles
    Case("bf16_plain", "bf16", 128, 256, 34, 4, 8, 50, 0),
    Case("bf16_parts", "bf16", 1152, 640, 4, 2, 8, 4, 2),
    Case("nvfp4_ring", "nvfp4", 256, 128, 4, 2, 3, 4, 5),
    Case("int4_asym_ring", "int4_asym", 256, 256, 4, 2, 8, 3, 2),
    Case("fp8_plain", "fp8", 128, 128, 4, 4, 2, 3, 0),  # every token takes every expert
    Case("mxfp4_biased", "mxfp4", 256, 256, 6, 2, 5, 5, 3, 4, True, CLAMPED),
)
SANITIZED = ("fp4_pairs", "fp4_read_again", "bf16_plain", "mxfp4_biased")
PARAMS = [
    pytest.param(c, id=c.name, marks=[pytest.mark.sanitize] if c.name in SANITIZED else [])
    for c in CASES
]


def choice(rng: np.random.Generator, case: Case) -> np.ndarray:
    """int32 `[T, K]`: all tokens take expert 1, at any place; nobody takes expert 0, if others
    suffice."""
    others = [e for e in range(case.experts) if e > 1 or (e == 0 and case.top_k == case.experts)]

    def one() -> np.ndarray:
        return rng.permutation([1, *rng.permutation(others)[: case.top_k - 1]])

    return np.array([one() for _ in range(case.tokens)], np.int32)


@pytest.mark.parametrize("case", PARAMS)
def test_grouped_gate_up(case: Case) -> None:
    rng = np.random.default_rng(case.hidden + case.tokens)
    w = weight(rng, case.fmt, case.experts, 2 * case.width, case.hidden)
    x = activations(rng, case.tokens, case.hidden)
    norm = rng.uniform(0.5, 1.5, case.hidden).astype(np.float32)
    ids = choice(rng, case)
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    bias, kind = case.bias(rng, 2 * case.width), case.activation
    groups = group_by_expert_ref(ids, case.experts)
    arrays = codes(interleaved(w)), in_turn(bias), weights, *groups, x, norm

    def run(memory: Memory, seed: int) -> tuple[np.ndarray]:
        hidden = memory.output(case.tokens, case.top_k, case.width)
        read = [given(memory, a) for a in arrays]
        how = EPS, kind.alpha, kind.limit, kind.offset
        case.run("grouped_gate_up", seed, hidden, *read, *how)
        return (hidden,)

    (hidden,) = run_all_orders(run)
    check_hidden(hidden, w, rms_norm_ref(x, norm, EPS), weights, ids, bias, kind)


@pytest.mark.parametrize("case", PARAMS)
def test_grouped_down(case: Case) -> None:
    rng = np.random.default_rng(case.width + case.tokens)
    w = weight(rng, case.fmt, case.experts, case.hidden, case.width)
    hidden, ids = activations(rng, case.tokens, case.top_k, case.width), choice(rng, case)
    arrays = codes(w), *group_by_expert_ref(ids, case.experts), hidden

    def run(memory: Memory, seed: int) -> tuple[np.ndarray]:
        pair_out = memory.output(case.tokens, case.top_k, case.hidden)
        case.run("grouped_down", seed, pair_out, *map(memory.read_only, arrays))
        return (pair_out,)

    (pair_out,) = run_all_orders(run)
    dense = w.dequantize()
    for t, k in np.ndindex(ids.shape):
        expected = hidden[t, k] @ dense[ids[t, k]].T
        assert relative_error(pair_out[t, k], expected) < 2 * TOLERANCE


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[8]], ids=lambda c: c.name)
def test_combine(case: Case) -> None:
    """Sums are of small integers, hence exact, but for what only one order of them makes 0."""
    rng = np.random.default_rng(7)
    pairs = rng.integers(-9, 9, (case.tokens, case.top_k, case.hidden)).astype(np.float32)
    pairs[:, 0, 0], pairs[:, 1, 0] = 2**26, 1  # float32 takes the sum for 2^26
    before = rng.integers(-9, 9, (case.tokens, case.hidden)).astype(np.float32)
    before[:, 0] = -(2**26)
    combine = kernel("experts", "combine", **case.macros, **case.fit("grouped_down").macros())
    grid = (-(-case.hidden // COMBINED_ROWS), case.tokens)

    def run(memory: Memory, seed: int) -> tuple[np.ndarray]:
        residual, read = memory.writable(before), memory.read_only(pairs)
        launch(combine, grid, COMBINE_THREADS, residual, read, None, None, None, seed=seed)
        return (residual,)

    (residual,) = run_all_orders(run)
    assert (residual[:, 1:] == before[:, 1:] + pairs.sum(axis=1)[:, 1:]).all()
    expected = np.float32(2**26) + np.float32(1)
    for k in range(2, case.top_k):
        expected = expected + pairs[:, k, 0]
    assert (residual[:, 0] == expected - np.float32(2**26)).all()


def test_combine_adds_biases_times_weights() -> None:
    """Small integers and halves, hence exact."""
    case, rng = CASES[-1], np.random.default_rng(9)
    assert case.biased
    pairs = rng.integers(-9, 9, (case.tokens, case.top_k, case.hidden)).astype(np.float32)
    before = rng.integers(-9, 9, (case.tokens, case.hidden)).astype(np.float32)
    bias = rng.integers(-9, 9, (case.experts, case.hidden)).astype(np.float32)
    ids = choice(rng, case)
    weights = (rng.integers(0, 5, ids.shape) / 2).astype(np.float32)
    combine = kernel("experts", "combine", **case.macros, **case.fit("grouped_down").macros())
    grid = (-(-case.hidden // COMBINED_ROWS), case.tokens)

    def run(memory: Memory, seed: int) -> tuple[np.ndarray]:
        residual = memory.writable(before)
        read = map(memory.read_only, (pairs, bias, weights, ids))
        launch(combine, grid, COMBINE_THREADS, residual, *read, seed=seed)
        return (residual,)

    (residual,) = run_all_orders(run)
    expected = before + pairs.sum(axis=1) + (weights[..., None] * bias[ids]).sum(axis=1)
    assert (residual == expected).all()


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[3], CASES[5]], ids=lambda c: c.name)
def test_a_token_does_not_depend_on_others(case: Case) -> None:
    """A token among others that choose otherwise, and at another place: bit for bit the same."""
    rng = np.random.default_rng(3)
    gate_up = codes(interleaved(weight(rng, case.fmt, case.experts, 2 * case.width, case.hidden)))
    down = codes(weight(rng, case.fmt, case.experts, case.hidden, case.width))
    norm = rng.uniform(0.5, 1.5, case.hidden).astype(np.float32)
    own_x, own_ids = activations(rng, case.hidden), rng.permutation(case.experts)[: case.top_k]
    own_weights = rng.uniform(0.1, 1, case.top_k).astype(np.float32)
    seen = []
    for place in (0, case.tokens - 1, 1):
        x, ids = activations(rng, case.tokens, case.hidden), choice(rng, case)
        weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
        x[place], ids[place], weights[place] = own_x, own_ids, own_weights
        groups = group_by_expert_ref(ids, case.experts)
        hidden = np.full((case.tokens, case.top_k, case.width), np.nan, np.float32)
        pair_out = np.full((case.tokens, case.top_k, case.hidden), np.nan, np.float32)
        arrays = gate_up, None, weights, *groups, x, norm
        case.run("grouped_gate_up", 2, hidden, *arrays, EPS, 1.0, np.inf, 0.0)
        case.run("grouped_down", 2, pair_out, down, *groups, hidden)
        seen.append((hidden[place], pair_out[place]))
    for hidden, pair_out in seen[1:]:
        assert same_bits(hidden, seen[0][0])
        assert same_bits(pair_out, seen[0][1])


def test_short_tiles_get_several_blocks_and_wide_ones_fewer_pairs() -> None:
    """What a multiprocessor of an H200 takes: qwen3-30b-a3b, seed-67b, mixtral-8x7b; 8 tokens."""
    h200 = 132, True, SHARED_BYTES
    for width, hidden, top_k, experts, columns, blocks_each in (
        (768, 2048, 8, 128, 4, 3),
        (2560, 4096, 8, 64, 4, 1),
        (14336, 4096, 2, 8, 3, 1),
    ):
        work = width // COLUMNS, 4, hidden // ROWS, 8 * top_k, experts
        fitted = GroupedStream.fit("fp4", *work, *h200)
        assert (fitted.columns, fitted.blocks_each) == (columns, blocks_each)
        assert not fitted.stream.resident
        taken = fitted.stream.shared + stream.STATIC_BYTES + stream.BLOCK_BYTES
        assert taken * (blocks_each + 1) > SHARED_BYTES + stream.BLOCK_BYTES
