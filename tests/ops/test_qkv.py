"""Step 1 of a layer: norms, clip, rotary, and what lands in the pages."""

from typing import Any

import numpy as np
import pytest

from npmoe.formats import quantize
from npmoe.ops.linear import prepare_linear
from npmoe.ops.norm import rms_norm_ref
from npmoe.ops.qkv import QKVWeights, gated_qkv, qkv
from npmoe.ops.quantize import KVPages, read_kv_pages
from npmoe.ops.rope import rope_ref
from tests.cases import KV_FORMATS
from tests.helpers import make_pages, normal, relative_error

HIDDEN, HEADS, KV_HEADS, DIM, TOKENS = 64, 4, 2, 16, 5
ROWS = (HEADS + 2 * KV_HEADS) * DIM
SLOTS = np.array([6, 7, 0, -1, 2], np.int32)
EPS = 1e-6


def weights(**changes: Any) -> QKVWeights:
    projection = prepare_linear(quantize(normal(ROWS, HIDDEN, seed=1), "bf16"))
    fields = {"bias": None, "q_norm": None, "k_norm": None} | changes
    return QKVWeights(normal(HIDDEN, seed=2), projection, **fields)


def angles() -> tuple[np.ndarray, np.ndarray]:
    turns = normal(TOKENS, DIM // 2, seed=3)
    return np.cos(turns), np.sin(turns)


def run(w: QKVWeights, x: np.ndarray, clip: float | None = None, kv_format: str = "fp32") -> Any:
    """q, and the K and V of slots 0 to 7 `[8, KV_HEADS, DIM]`."""
    k_pages, v_pages = (make_pages(kv_format, 2, KV_HEADS, DIM, page_size=4) for _ in range(2))
    q = qkv(x, w, EPS, DIM, *angles(), k_pages, v_pages, SLOTS, clip)
    return q, _all_slots(k_pages), _all_slots(v_pages)


def _all_slots(pages: KVPages) -> np.ndarray:
    return read_kv_pages(pages, np.array([0, 1]), 8)


def expected(w: QKVWeights, x: np.ndarray, clip: float | None = None) -> list[np.ndarray]:
    """q, k, v of every token by the plain formulas."""
    matrix = quantize(normal(ROWS, HIDDEN, seed=1), "bf16").dequantize()
    y = rms_norm_ref(x, w.input_norm, EPS) @ matrix.T + (0 if w.bias is None else w.bias)
    parts = np.split(y, [HEADS * DIM, (HEADS + KV_HEADS) * DIM], axis=1)
    for i, norm in enumerate((w.q_norm, w.k_norm)):
        if norm is not None:
            rows = parts[i].reshape(-1, len(norm))
            parts[i] = rms_norm_ref(rows, norm, EPS).reshape(TOKENS, -1)
    if clip is not None:
        parts = [np.clip(p, -clip, clip) for p in parts]
    q, k, v = (p.reshape(TOKENS, -1, DIM) for p in parts)
    return [rope_ref(q, *angles()), rope_ref(k, *angles()), v]


@pytest.mark.parametrize(
    ("changes", "clip"),
    [
        ({}, None),
        ({"bias": normal(ROWS, seed=4)}, None),
        ({"q_norm": normal(DIM, seed=5), "k_norm": normal(DIM, seed=6)}, None),
        ({"q_norm": normal(HEADS * DIM, seed=5), "k_norm": normal(KV_HEADS * DIM, seed=6)}, 0.5),
        ({}, 2.0),
    ],
    ids=["plain", "bias", "norm_per_head", "norm_of_projection_and_clip", "clip"],
)
def test_agrees_with_the_plain_formulas(changes: dict[str, Any], clip: float | None) -> None:
    w, x = weights(**changes), normal(TOKENS, HIDDEN)
    q, k, v = run(w, x, clip)
    want_q, want_k, want_v = expected(w, x, clip)
    assert (q.shape, q.dtype) == ((TOKENS, HEADS, DIM), np.float32)
    assert relative_error(q, want_q) < 5e-6
    written = SLOTS >= 0
    for got, want in ((k, want_k), (v, want_v)):
        assert relative_error(got[SLOTS[written]], want[written]) < 5e-6
        assert not got[[1, 3, 4, 5]].any(), "a slot that no token was given"


def test_a_norm_per_head_differs_from_one_over_the_projection() -> None:
    x = normal(TOKENS, HIDDEN)
    per_head, _, _ = run(weights(q_norm=np.ones(DIM, np.float32)), x)
    whole, _, _ = run(weights(q_norm=np.ones(HEADS * DIM, np.float32)), x)
    # The mean square of each head is 1; of the whole it is 1 only over all heads.
    np.testing.assert_allclose((per_head**2).mean(axis=-1), 1, rtol=1e-4)
    np.testing.assert_allclose((whole**2).mean(axis=(-1, -2)), 1, rtol=1e-4)
    assert np.abs((whole**2).mean(axis=-1) - 1).max() > 0.1


@pytest.mark.parametrize("kv_format", [f for f in KV_FORMATS if f != "fp32"])
def test_the_pages_hold_quantised_keys_after_rotary(kv_format: str) -> None:
    w, x = weights(), normal(TOKENS, HIDDEN)
    _, k, v = run(w, x, kv_format=kv_format)
    _, want_k, want_v = expected(w, x)
    share = {"bf16": 0.005, "int8": 0.005, "fp8": 0.04, "mxfp4": 0.2}.get(kv_format, 0.17)
    for got, want in ((k, want_k), (v, want_v)):
        assert 0 < relative_error(got[SLOTS[[0, 1, 2, 4]]], want[[0, 1, 2, 4]]) < share


def test_gates_follow_each_head_of_q() -> None:
    """The same q, k and v as without gates, whose rows stand between those of q."""
    norms = {"q_norm": normal(DIM, seed=5), "k_norm": normal(DIM, seed=6)}
    plain, x = weights(**norms), normal(TOKENS, HIDDEN)
    rows = quantize(normal(ROWS, HIDDEN, seed=1), "bf16").dequantize()
    gate_rows = quantize(normal(HEADS * DIM, HIDDEN, seed=7), "bf16").dequantize()
    heads = [a.reshape(HEADS, DIM, HIDDEN) for a in (rows[: HEADS * DIM], gate_rows)]
    both = np.concatenate(heads, axis=1).reshape(-1, HIDDEN)
    projection = prepare_linear(quantize(np.concatenate([both, rows[HEADS * DIM :]]), "bf16"))
    gated = QKVWeights(plain.input_norm, projection, None, plain.q_norm, plain.k_norm)
    pages = [make_pages("fp32", 2, KV_HEADS, DIM, page_size=4) for _ in range(2)]
    q, gates = gated_qkv(x, gated, EPS, DIM, *angles(), *pages, SLOTS)
    for got, want in zip((q, *map(_all_slots, pages)), run(plain, x), strict=True):
        np.testing.assert_array_equal(got, want)
    want = rms_norm_ref(x, plain.input_norm, EPS) @ gate_rows.T
    assert gates.shape == (TOKENS, HEADS, DIM)
    assert relative_error(gates.reshape(TOKENS, -1), want) < 5e-6


def test_interleaved_rotary_turns_neighbours() -> None:
    """q . k is that of heads whose elements 2i and 2i + 1 turn by angle i; the rest stays."""
    w, x = weights(), normal(TOKENS, HIDDEN)
    cos, sin = (a[:, :3] for a in angles())  # the first 6 of 16 elements
    k_pages, v_pages = (make_pages("fp32", 2, KV_HEADS, DIM, page_size=4) for _ in range(2))
    q = qkv(x, w, EPS, DIM, cos, sin, k_pages, v_pages, SLOTS, interleaved=True)
    matrix = quantize(normal(ROWS, HIDDEN, seed=1), "bf16").dequantize()
    plain = (rms_norm_ref(x, w.input_norm, EPS) @ matrix.T).reshape(TOKENS, -1, DIM)
    turned = plain.copy()
    for i in range(3):
        a, b = plain[..., 2 * i], plain[..., 2 * i + 1]
        c, s = cos[:, i, None], sin[:, i, None]
        turned[..., 2 * i], turned[..., 2 * i + 1] = a * c - b * s, b * c + a * s
    written = SLOTS >= 0
    k = _all_slots(k_pages)[SLOTS[written]]
    scores = np.einsum("thd,shd->hts", q[:, :KV_HEADS], k)
    want_k = turned[written][:, HEADS : HEADS + KV_HEADS]
    want = np.einsum("thd,shd->hts", turned[:, :KV_HEADS], want_k)
    assert relative_error(scores, want) < 1e-5
