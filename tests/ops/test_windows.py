"""Windows of high precision: which copies a query reads, and that their ring holds them."""

from dataclasses import replace

import numpy as np
import pytest

from npmoe.ops.attention import paged_attention, paged_attention_ref
from npmoe.ops.quantize import KVCopies, KVPages, read_kv_copies, read_kv_pages, write_kv_pages
from tests.cases import ATTENTION, FOUR_BIT, AttentionCase
from tests.helpers import by_name, make_pages, normal, relative_error

both = pytest.mark.parametrize("attention", [paged_attention, paged_attention_ref])


def with_copies(
    pages: KVPages, copy_format: str, num_slots: int, first: int, recent: int, most_new: int
) -> KVPages:
    """The same pages, with a page of copies for each slot; what no token has written is poison."""
    heads, width = pages.codes.shape[1], pages.codes.shape[3]
    dim = 2 * width if pages.format in FOUR_BIT else width
    copies = make_pages(copy_format, num_slots, heads, dim, first + recent + most_new)
    copies.codes[:] = 0x7F if copy_format == "fp8" else 0x7FC0  # NaN
    return replace(pages, copies=KVCopies(replace(copies, rotated=pages.rotated), first, recent))


def test_offsets_are_the_first_tokens_then_a_ring() -> None:
    copies = KVCopies(make_pages("fp32", 2, 1, 16, page_size=2 + 3 + 2), first=2, recent=3)
    assert copies.offsets(np.arange(13)).tolist() == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 5, 6, 2]
    slots = copies.slots(np.array([0, 1, 9]), np.array([0, 2, 3]), np.array([1, 0]))
    assert slots.tolist() == [7 + 0, 7 + 1, 4]
    with pytest.raises(AssertionError, match="4 tokens of a sequence, the ring takes 3"):
        copies.slots(np.arange(4), np.array([0, 4]), np.array([0]))


def test_what_queries_reach() -> None:
    copies = KVCopies(make_pages("fp32", 1, 1, 16, page_size=8), first=2, recent=3)
    assert copies.reach(7, 9).tolist() == [0, 1, 5, 6, 7, 8]
    assert copies.reach(3, 4).tolist() == [0, 1, 2, 3]
    assert copies.reach(0, 1).tolist() == [0]
    served = copies.serves(np.array([7]), np.arange(8))[0]
    assert np.flatnonzero(served).tolist() == [0, 1, 5, 6, 7]


class Sequence:
    """One sequence of one head of 16, in slot 1 of 3, pages in a row."""

    def __init__(self, first: int, recent: int, most_new: int) -> None:
        self.pages = [
            with_copies(make_pages("fp32", 8, 1, 16, 4), "bf16", 3, first, recent, most_new)
            for _ in range(2)
        ]
        self.length, self.slot = 0, np.array([1], np.int32)

    def write(self, k: np.ndarray, v: np.ndarray) -> None:
        """k, v `[T, 1, 16]` of the next tokens."""
        slots = np.arange(self.length, self.length + len(k), dtype=np.int32)
        copies = self.pages[0].copies
        assert copies is not None
        copy_slots = copies.slots(slots, np.array([0, len(k)]), self.slot)
        for pages, x in zip(self.pages, (k, v), strict=True):
            write_kv_pages(pages, x, slots, copy_slots)
        self.length += len(k)

    def attend(self, attention, q: np.ndarray, window: int | None = None) -> np.ndarray:
        ragged = np.array([0, len(q)]), np.array([self.length])
        table = np.arange(8, dtype=np.int32)[None]
        return attention(q, *self.pages, table, *ragged, 1.0, window, state_slots=self.slot)


@both
@pytest.mark.parametrize(
    ("first", "recent", "window", "want"),
    [
        # Keys are zero, so a query takes the mean; token j has the value j + 1 in its copy, 0 else.
        (1, 2, None, [1, 3 / 2, 6 / 3, 8 / 4, 10 / 5, 12 / 6, 14 / 7, 16 / 8]),
        (0, 1, None, [1, 2 / 2, 3 / 3, 4 / 4, 5 / 5, 6 / 6, 7 / 7, 8 / 8]),
        (3, 1, None, [1, 3 / 2, 6 / 3, 10 / 4, 11 / 5, 12 / 6, 13 / 7, 14 / 8]),
        (0, 100, None, [1, 3 / 2, 6 / 3, 10 / 4, 15 / 5, 21 / 6, 28 / 7, 36 / 8]),
        (100, 1, None, [1, 3 / 2, 6 / 3, 10 / 4, 15 / 5, 21 / 6, 28 / 7, 36 / 8]),
        (1, 2, 3, [1, 3 / 2, 6 / 3, 7 / 3, 9 / 3, 11 / 3, 13 / 3, 15 / 3]),
    ],
)
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_by_hand(
    attention, first: int, recent: int, window: int | None, want: list[float], chunk: int
) -> None:
    sequence, outputs = Sequence(first, recent, chunk), []
    for start in range(0, 8, chunk):
        values = np.zeros((min(chunk, 8 - start), 1, 16), np.float32)
        values[:, 0, 0] = np.arange(start, start + len(values)) + 1
        sequence.write(np.zeros_like(values), values)
        sequence.pages[1].codes[:] = 0
        outputs.append(sequence.attend(attention, normal(len(values), 2, 16), window))
    for head in range(2):
        np.testing.assert_allclose(np.concatenate(outputs)[:, head, 0], want, rtol=1e-6)


class Case:
    """A case with random contents: its cached tokens were written one by one, the rest at once."""

    def __init__(
        self, case: AttentionCase, kv: str, copy_format: str, first: int, recent: int, rotated: bool
    ) -> None:
        lengths, self.case = np.add(case.cached, case.new), case
        counts = -(-lengths // case.page_size)
        order = np.random.default_rng(0).permutation(counts.sum()).astype(np.int32)
        self.table = np.full((len(lengths), counts.max()), -1, np.int32)
        shape = case.num_kv_heads, case.head_dim, case.page_size
        numbers = len(lengths) + 1, first, recent, max(case.new)
        self.pages = [
            with_copies(
                replace(make_pages(kv, len(order), *shape), rotated=rotated), copy_format, *numbers
            )
            for _ in range(2)
        ]
        self.state_slots = np.arange(len(lengths), 0, -1, dtype=np.int32)
        for s, (length, cached) in enumerate(zip(lengths, case.cached, strict=True)):
            self.table[s, : counts[s]] = order[counts[:s].sum() :][: counts[s]]
            x = [normal(length, *shape[:2], seed=10 * s + i) for i in range(2)]
            for start, stop in [*((i, i + 1) for i in range(cached)), (cached, length)]:
                self.write(s, start, [a[start:stop] for a in x])
        self.q = normal(sum(case.new), case.num_heads, case.head_dim, seed=100)
        self.edges = np.cumsum([0, *case.new]).astype(np.int32)
        self.lengths = lengths.astype(np.int32)
        self.sinks = 1 + normal(case.num_heads, seed=101) if case.sinks else None

    def write(self, s: int, start: int, x: list[np.ndarray]) -> None:
        size, positions = self.case.page_size, np.arange(start, start + len(x[0]))
        slots = self.table[s, positions // size] * size + positions % size
        copies = self.pages[0].copies
        assert copies is not None
        edges = np.array([0, len(positions)])
        copy_slots = copies.slots(positions, edges, self.state_slots[s : s + 1])
        for pages, a in zip(self.pages, x, strict=True):
            write_kv_pages(pages, a, slots.astype(np.int32), copy_slots)

    def run(self, attention) -> np.ndarray:
        arrays = *self.pages, self.table, self.edges, self.lengths
        options = self.case.head_dim**-0.5, self.case.window, self.sinks, self.state_slots
        return attention(self.q, *arrays, *options)

    def by_definition(self) -> np.ndarray:
        """Each query alone, over keys and values of which those that it may read are copies."""
        out = np.empty_like(self.q)
        for s, length in enumerate(self.lengths):
            for row in range(self.edges[s], self.edges[s + 1]):
                i = int(length - self.edges[s + 1] + row)
                k, v = (self.as_read(pages, s, i) for pages in self.pages)
                plain = [make_pages("fp32", 1, *k.shape[1:], i + 1) for _ in range(2)]
                for pages, x in zip(plain, (k, v), strict=True):
                    write_kv_pages(pages, x, np.arange(i + 1))
                turned = [
                    replace(p, rotated=q.rotated) for p, q in zip(plain, self.pages, strict=True)
                ]
                ragged = np.zeros((1, 1), np.int32), np.array([0, 1]), np.array([i + 1])
                options = self.case.head_dim**-0.5, self.case.window, self.sinks
                out[row] = paged_attention_ref(self.q[row : row + 1], *turned, *ragged, *options)[0]
        return out

    def as_read(self, pages: KVPages, s: int, i: int) -> np.ndarray:
        x, copies = read_kv_pages(pages, self.table[s], i + 1).copy(), pages.copies
        assert copies is not None
        served = [j for j in range(i + 1) if j < copies.first or j > i - copies.recent]
        x[served] = read_kv_copies(copies, int(self.state_slots[s]), np.array(served))
        return x


@both
@by_name(ATTENTION)
@pytest.mark.parametrize(
    ("kv", "copy_format", "first", "recent", "rotated"),
    [
        *[("fp4", "bf16", 4, 8, True), ("int8", "fp8", 0, 1, False), ("fp4", "bf16", 3, 64, False)],
        *[("mxfp4", "fp8", 2, 5, False), ("nvfp4", "bf16", 4, 8, True)],
    ],
)
def test_agrees_with_the_definition(
    case: AttentionCase,
    attention,
    kv: str,
    copy_format: str,
    first: int,
    recent: int,
    rotated: bool,
) -> None:
    filled = Case(case, kv, copy_format, first, recent, rotated)
    assert relative_error(filled.run(attention), filled.by_definition()) < 5e-6
