"""Multi-head latent attention: against the plain formula, absorbed against expanded, by hand."""

import numpy as np
import pytest

from npmoe.formats import quantize
from npmoe.ops import latent
from npmoe.ops.latent import LatentWeights, latent_attention, latent_attention_ref, latent_qkv
from npmoe.ops.linear import prepare_linear
from npmoe.ops.norm import rms_norm_ref
from npmoe.ops.quantize import read_kv_pages, write_kv_pages
from npmoe.ops.rope import rope_ref
from tests.cases import KV_PAIRS
from tests.helpers import make_pages, normal, relative_error

HIDDEN, HEADS, NOPE, ROPE, VALUE, RANK, Q_RANK = 64, 4, 24, 16, 20, 32, 40
UP = normal(HEADS * (NOPE + VALUE), RANK, seed=1) * RANK**-0.5
PAGE = 4
CASES = {"decode": ((40,), (1,)), "few": ((5, 0), (8, 3)), "ragged": ((3, 20, 0), (12, 1, 9))}
both = pytest.mark.parametrize("attention", [latent_attention, latent_attention_ref])


class Filled:
    """Sequences with cached[s] + new[s] random rope keys and latents in shuffled pages."""

    def __init__(self, cached, new, pair=("fp32", "fp32"), up: str = "fp32") -> None:
        lengths = np.add(cached, new)
        counts = -(-lengths // PAGE)
        order = np.random.default_rng(0).permutation(counts.sum()).astype(np.int32)
        self.k_pages = make_pages(pair[0], len(order), 1, ROPE, PAGE)
        self.v_pages = make_pages(pair[1], len(order), 1, RANK, PAGE)
        self.table = np.full((len(lengths), counts.max()), -1, np.int32)
        for s, length in enumerate(lengths):
            first, positions = counts[:s].sum(), np.arange(length)
            self.table[s, : counts[s]] = order[first : first + counts[s]]
            slots = self.table[s, positions // PAGE] * PAGE + positions % PAGE
            write_kv_pages(self.k_pages, normal(length, 1, ROPE, seed=10 + s), slots)
            write_kv_pages(self.v_pages, normal(length, 1, RANK, seed=20 + s), slots)
        self.q = normal(sum(new), HEADS, NOPE + ROPE, seed=3)
        self.edges, self.lengths = np.cumsum([0, *new]), lengths.astype(np.int32)
        self.up = prepare_linear(quantize(UP, up))

    def run(self, attention, rows=slice(None), sequences=slice(None), edges=None) -> np.ndarray:
        return attention(
            self.q[rows],
            self.up,
            VALUE,
            self.k_pages,
            self.v_pages,
            self.table[sequences],
            self.edges if edges is None else edges,
            self.lengths[sequences],
            0.2,
        )


def plain(filled: Filled) -> np.ndarray:
    """Head by head and query by query in float64."""
    out = np.empty((*filled.q.shape[:2], VALUE))
    heads = UP.reshape(HEADS, NOPE + VALUE, RANK).astype(np.float64)
    for s, length in enumerate(filled.lengths):
        rope_keys = read_kv_pages(filled.k_pages, filled.table[s], length)[:, 0]
        latents = read_kv_pages(filled.v_pages, filled.table[s], length)[:, 0]
        for t in range(filled.edges[s], filled.edges[s + 1]):
            seen = length - (filled.edges[s + 1] - t) + 1
            for h, head in enumerate(heads):
                k = np.concatenate([latents @ head[:NOPE].T, rope_keys], axis=1)[:seen]
                weights = np.exp(0.2 * k @ filled.q[t, h])
                out[t, h] = weights @ (latents[:seen] @ head[NOPE:].T) / weights.sum()
    return out


@both
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pair", KV_PAIRS, ids="/".join)
def test_agrees_with_the_plain_formula(attention, name: str, pair: tuple[str, str]) -> None:
    filled = Filled(*CASES[name], pair)
    out = filled.run(attention)
    assert (out.shape, out.dtype) == ((*filled.q.shape[:2], VALUE), np.float32)
    assert relative_error(out, plain(filled)) < 2e-6


@pytest.mark.parametrize("up", ["bf16", "fp8", "int8", "fp4"])
def test_the_up_projection_may_have_any_format(up: str) -> None:
    filled = Filled((9, 3), (2, 10), up=up)
    exact, got = plain(filled), filled.run(latent_attention)
    assert relative_error(got, filled.run(latent_attention_ref)) < 2e-6
    assert relative_error(got, exact) < {"bf16": 0.02, "fp8": 0.2, "int8": 0.05, "fp4": 0.6}[up]


@pytest.mark.parametrize("name", ["few", "ragged"])
def test_a_sequence_gets_the_same_bits_alone(name: str) -> None:
    filled = Filled(*CASES[name], ("fp4", "int8"))
    together = filled.run(latent_attention)
    for s in range(len(filled.lengths)):
        rows = slice(filled.edges[s], filled.edges[s + 1])
        edges = [0, rows.stop - rows.start]
        alone = filled.run(latent_attention, rows, slice(s, s + 1), edges)
        np.testing.assert_array_equal(together[rows], alone)


def test_heads_expanded_one_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = Filled((30,), (12,))
    whole = filled.run(latent_attention)
    monkeypatch.setattr(latent, "EXPANDED_FLOATS", 1)
    assert relative_error(filled.run(latent_attention), whole) < 1e-6


@both
def test_by_hand(attention) -> None:
    # One head, all sizes 2. kv_b makes k_nope = latent and v = 10 latent. Scores of the two cached
    # tokens: 0 and log 3 (from the rope key), hence weights 1/4 and 3/4.
    up = quantize(np.concatenate([np.eye(2), 10 * np.eye(2)]).astype(np.float32), "fp32")
    k_pages, v_pages = make_pages("fp32", 1, 1, 2, PAGE), make_pages("fp32", 1, 1, 2, PAGE)
    slots = np.arange(2, dtype=np.int32)
    write_kv_pages(k_pages, np.array([[[0, 0]], [[np.log(3), 0]]], np.float32), slots)
    write_kv_pages(v_pages, np.array([[[4, 0]], [[0, 8]]], np.float32), slots)
    q = np.array([[[0, 0, 1, 0]]], np.float32)
    table, edges, lengths = np.zeros((1, 1), np.int32), np.array([0, 1]), np.array([2])
    out = attention(q, up, 2, k_pages, v_pages, table, edges, lengths, 1.0)
    np.testing.assert_allclose(out, [[[10, 60]]], rtol=1e-6)
    # A query that asks the latents instead: 1 for each 4 of the first, so weights 3/4 and 1/4.
    q = np.array([[[np.log(3) / 4, 0, 0, 0]]], np.float32)
    out = attention(q, up, 2, k_pages, v_pages, table, edges, lengths, 1.0)
    np.testing.assert_allclose(out, [[[30, 20]]], rtol=1e-6)


def matrix(rows: int, columns: int, seed: int) -> np.ndarray:
    return normal(rows, columns, seed=seed) * np.float32(columns**-0.5)


@pytest.mark.parametrize("compressed", [True, False], ids=["q_lora", "plain_q"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
def test_queries_and_what_lands_in_the_pages(compressed: bool, interleaved: bool) -> None:
    slots = np.array([6, 7, 0, -1, 2], np.int32)
    x, input_norm = normal(5, HIDDEN), 1 + normal(HIDDEN, seed=1)
    q_a = matrix(Q_RANK, HIDDEN, 2), normal(Q_RANK, seed=3), 1 + normal(Q_RANK, seed=4)
    q_b = matrix(HEADS * (NOPE + ROPE), Q_RANK if compressed else HIDDEN, 5)
    kv_a = matrix(RANK + ROPE, HIDDEN, 6), normal(RANK + ROPE, seed=7), 1 + normal(RANK, seed=8)

    def prepared(w: np.ndarray):
        return prepare_linear(quantize(w, "fp32"))

    query = (prepared(q_a[0]), q_a[1], q_a[2]) if compressed else (None, None, None)
    w = LatentWeights(input_norm, *query, prepared(q_b), prepared(kv_a[0]), *kv_a[1:])
    k_pages, v_pages = make_pages("fp32", 2, 1, ROPE, PAGE), make_pages("fp32", 2, 1, RANK, PAGE)
    turns = normal(5, ROPE // 2, seed=9)
    cos, sin = np.cos(turns), np.sin(turns)
    got = latent_qkv(x, w, 1e-3, HEADS, interleaved, cos, sin, k_pages, v_pages, slots)

    normed = rms_norm_ref(x, input_norm, 1e-3)
    hidden = rms_norm_ref(normed @ q_a[0].T + q_a[1], q_a[2], 1e-6) if compressed else normed
    q = (hidden @ q_b.T).reshape(5, HEADS, NOPE + ROPE)
    projected = normed @ kv_a[0].T + kv_a[1]
    order = [*range(0, ROPE, 2), *range(1, ROPE, 2)] if interleaved else list(range(ROPE))
    q_rope = rope_ref(q[..., NOPE:][..., order], cos, sin)
    rope_key = rope_ref(projected[:, None, RANK:][..., order], cos, sin)
    assert relative_error(got, np.concatenate([q[..., :NOPE], q_rope], axis=2)) < 2e-6
    cached = [read_kv_pages(pages, np.array([0, 1]), 8)[:, 0] for pages in (k_pages, v_pages)]
    wanted = rope_key[:, 0], rms_norm_ref(projected[:, :RANK], kv_a[2], 1e-6)
    for pages, values in zip(cached, wanted, strict=True):
        assert relative_error(pages[[6, 7, 0, 2]], values[[0, 1, 2, 4]]) < 2e-6
        assert not pages[[1, 3, 4, 5]].any()
