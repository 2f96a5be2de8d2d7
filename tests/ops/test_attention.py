"""Paged attention in every KV format."""

from dataclasses import replace

import numpy as np
import pytest

from npmoe.ops.attention import paged_attention, paged_attention_ref, read_rows
from npmoe.ops.quantize import KVPages, read_kv_pages, write_kv_pages
from tests.cases import ATTENTION, KV_PAIRS, AttentionCase
from tests.helpers import by_name, make_pages, normal, relative_error

both = pytest.mark.parametrize("attention", [paged_attention, paged_attention_ref])


class Filled:
    """K and V pages of a case with random contents, and what attention needs besides q."""

    def __init__(
        self,
        case: AttentionCase,
        pair: tuple[str, str],
        seed: int = 0,
        rotated: bool = False,
        outlier: float = 0,
    ) -> None:
        """outlier: added to one channel of every key."""
        lengths = np.add(case.cached, case.new)
        counts = -(-lengths // case.page_size)
        order = np.random.default_rng(seed).permutation(counts.sum() + 2).astype(np.int32)
        self.table = np.full((len(lengths), counts.max()), -1, np.int32)
        shape = (case.num_kv_heads, case.head_dim, case.page_size)
        self.k_pages, self.v_pages = (
            replace(make_pages(f, len(order), *shape), rotated=rotated) for f in pair
        )
        for pages in (self.k_pages, self.v_pages):  # what no token has written must not matter
            pages.codes[:] = 0x55
            if pages.scales is not None:
                pages.scales.view(np.uint8)[:] = 0xFF  # NaN in fp16, E8M0 and E4M3
        for s, length in enumerate(lengths):
            first = counts[:s].sum()
            self.table[s, : counts[s]] = order[first : first + counts[s]]
            positions = np.arange(length)
            slots = self.table[s, positions // case.page_size] * case.page_size
            slots += (positions % case.page_size).astype(np.int32)
            for which, pages in enumerate((self.k_pages, self.v_pages)):
                x = normal(length, *shape[:2], seed=seed + 10 * s + which)
                x[..., 3] += outlier if which == 0 else 0
                write_kv_pages(pages, x, slots)
        self.q = normal(sum(case.new), case.num_heads, case.head_dim, seed=seed + 100)
        self.edges = np.cumsum([0, *case.new]).astype(np.int32)
        self.lengths = lengths.astype(np.int32)
        self.scale, self.window = case.head_dim**-0.5, case.window
        self.sinks = 1 + normal(case.num_heads, seed=seed + 101) if case.sinks else None

    def run(self, attention) -> np.ndarray:
        arrays = (self.k_pages, self.v_pages, self.table, self.edges, self.lengths)
        return attention(self.q, *arrays, self.scale, self.window, self.sinks)

    def run_alone(self, s: int) -> np.ndarray:
        """Only sequence s."""
        start, stop = self.edges[s], self.edges[s + 1]
        rows = self.table[s : s + 1], np.array([0, stop - start]), self.lengths[s : s + 1]
        arrays = (self.q[start:stop], self.k_pages, self.v_pages, *rows)
        return paged_attention(*arrays, self.scale, self.window, self.sinks)


@by_name(ATTENTION)
@pytest.mark.parametrize("pair", KV_PAIRS, ids="/".join)
def test_agrees_with_the_definition(case: AttentionCase, pair: tuple[str, str]) -> None:
    filled = Filled(case, pair)
    got, want = filled.run(paged_attention), filled.run(paged_attention_ref)
    assert (got.shape, got.dtype) == (filled.q.shape, np.float32)
    assert relative_error(got, want) < 5e-6


@by_name([c for c in ATTENTION if len(c.new) > 1])
@pytest.mark.parametrize("pair", [("fp32", "fp32"), ("fp4", "int8")], ids="/".join)
def test_a_sequence_gets_the_same_bits_alone(case: AttentionCase, pair: tuple[str, str]) -> None:
    filled = Filled(case, pair)
    together = filled.run(paged_attention)
    for s in range(len(case.new)):
        got = together[filled.edges[s] : filled.edges[s + 1]]
        np.testing.assert_array_equal(got, filled.run_alone(s))


def one_sequence(k: np.ndarray, v: np.ndarray) -> tuple[KVPages, KVPages, np.ndarray]:
    """k, v `[L, 1, D]` in two pages of 4, the second one first, and the block table."""
    pages = [make_pages("fp32", 2, 1, k.shape[2], page_size=4) for _ in range(2)]
    slots = np.array([4, 5, 6, 7, 0, 1, 2, 3], np.int32)[: len(k)]
    write_kv_pages(pages[0], k, slots)
    write_kv_pages(pages[1], v, slots)
    return pages[0], pages[1], np.array([[1, 0]], np.int32)


def attend(attention, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options) -> np.ndarray:
    """q `[T, heads, D]` are the last T positions of k, v `[L, 1, D]`."""
    arguments = (*one_sequence(k, v), np.array([0, len(q)]), np.array([len(k)]))
    return attention(q, *arguments, scale=1.0, **options)


@pytest.mark.parametrize("kv_format", sorted({name for pair in KV_PAIRS for name in pair}))
def test_compiled_reading_gives_what_the_definition_gives(kv_format: str) -> None:
    filled = Filled(AttentionCase("", (40,), (3,), page_size=4), (kv_format, "fp32"))
    for length in (1, 4, 43):
        got = read_rows(filled.k_pages, filled.table[0], length)
        np.testing.assert_array_equal(got, read_kv_pages(filled.k_pages, filled.table[0], length))


@both
def test_equal_keys_give_the_mean_of_the_values_seen_so_far(attention) -> None:
    k = np.ones((6, 1, 16), np.float32)
    v = np.zeros((6, 1, 16), np.float32)
    v[:, 0, 0] = 1, 2, 3, 4, 5, 6
    out = attend(attention, normal(6, 2, 16), k, v)
    for head in range(2):
        np.testing.assert_allclose(out[:, head, 0], [1, 1.5, 2, 2.5, 3, 3.5], rtol=1e-6)


@both
def test_a_window_of_two_sees_the_token_and_the_one_before(attention) -> None:
    k = np.ones((6, 1, 16), np.float32)
    v = np.zeros((6, 1, 16), np.float32)
    v[:, 0, 0] = 1, 2, 3, 4, 5, 6
    out = attend(attention, normal(6, 1, 16), k, v, window=2)
    np.testing.assert_allclose(out[:, 0, 0], [1, 1.5, 2.5, 3.5, 4.5, 5.5], rtol=1e-6)


@both
def test_softmax_by_hand(attention) -> None:
    # Scores 0 and log 3 give weights 1/4 and 3/4.
    q, k, v = np.zeros((1, 1, 16)), np.zeros((2, 1, 16)), np.zeros((2, 1, 16))
    q[0, 0, 0], k[1, 0, 0] = 1, np.log(3)
    v[:, 0, 3] = 8, 4
    out = attend(attention, *(a.astype(np.float32) for a in (q, k, v)))
    assert out[0, 0, 3] == pytest.approx(2 + 3)


@both
def test_sinks_by_hand(attention) -> None:
    # Keys of zero score 0. Token t sees t + 1 of them, at most 2; a sink of log 2 counts as two
    # more without a value, one of minus infinity not at all.
    k, v = np.zeros((6, 1, 16), np.float32), np.zeros((6, 1, 16), np.float32)
    v[:, 0, 0] = 1, 2, 3, 4, 5, 6
    sinks = np.array([np.log(2), -np.inf], np.float32)
    out = attend(attention, normal(6, 2, 16), k, v, window=2, sinks=sinks)
    np.testing.assert_allclose(out[:, 0, 0], [1 / 3, 3 / 4, 5 / 4, 7 / 4, 9 / 4, 11 / 4], rtol=1e-6)
    np.testing.assert_allclose(out[:, 1, 0], [1, 1.5, 2.5, 3.5, 4.5, 5.5], rtol=1e-6)


@both
@pytest.mark.parametrize(("sink", "expected"), [(1000, 0), (-1000, 1)])
def test_a_sink_far_from_the_scores_does_not_overflow(attention, sink, expected) -> None:
    ones = np.ones((3, 1, 16), np.float32)
    out = attend(attention, ones[:1], ones, ones, sinks=np.array([sink], np.float32))
    np.testing.assert_allclose(out, expected, atol=1e-30)


@both
def test_scores_of_a_thousand_do_not_overflow(attention) -> None:
    q, k = np.full((1, 1, 16), 100, np.float32), np.full((3, 1, 16), 100, np.float32)
    v = np.ones((3, 1, 16), np.float32)
    np.testing.assert_allclose(attend(attention, q, k, v), 1)


@both
def test_queries_share_the_keys_of_their_group(attention) -> None:
    # Heads 0, 1 belong to KV head 0 and heads 2, 3 to KV head 1, with values 1 and 2.
    filled = Filled(AttentionCase("", (3,), (1,), num_heads=4, num_kv_heads=2), ("fp32", "fp32"))
    filled.v_pages.codes[:, 0], filled.v_pages.codes[:, 1] = 1, 2
    np.testing.assert_allclose(filled.run(attention)[0, :, 0], [1, 1, 2, 2], rtol=1e-6)


@both
@by_name(ATTENTION)
def test_rotation_changes_nothing_but_rounding(case: AttentionCase, attention) -> None:
    exact = "fp32", "fp32"
    plain, turned = (Filled(case, exact, rotated=r).run(attention) for r in (False, True))
    assert relative_error(turned, plain) < 1e-5


@pytest.mark.parametrize("kv_format", ["int4", "fp4", "mxfp4", "nvfp4"])
def test_rotation_spreads_an_outlier(kv_format: str) -> None:
    """One channel of the keys is 30 where others are about 1: it takes its group's scale."""
    case, pair = max(ATTENTION, key=lambda c: max(c.cached)), (kv_format, "fp32")
    exact = Filled(case, ("fp32", "fp32"), outlier=30).run(paged_attention)
    plain, turned = (
        relative_error(Filled(case, pair, rotated=r, outlier=30).run(paged_attention), exact)
        for r in (False, True)
    )
    assert turned < 0.75 * plain
