"""Block tables that follow the host's lists of pages."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from npmoe.kv.tables import MAX_COMMANDS, MIN_PAGE_IDS, BlockTables

ROWS, MAX_PAGES, EMPTY = 3, 5, 99
rows = st.integers(0, ROWS - 1)
some_pages = st.lists(st.integers(0, 9), max_size=MAX_PAGES)


class Tables(RuleBasedStateMachine):
    """The device's table is, after every flush, what plain lists say."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables(ROWS, MAX_PAGES, "cpu", EMPTY)
        self.expected: list[list[int]] = [[] for _ in range(ROWS)]

    @rule(row=rows, pages=some_pages)
    def append(self, row: int, pages: list[int]) -> None:
        pages = pages[: MAX_PAGES - len(self.expected[row])]
        self.tables.append(row, pages)
        self.expected[row] = self.expected[row] + pages

    @rule(row=rows, share=st.floats(0, 1))
    def truncate(self, row: int, share: float) -> None:
        count = int(share * len(self.expected[row]))
        self.tables.truncate(row, count)
        self.expected[row] = self.expected[row][:count]

    @rule(row=rows, pages=some_pages)
    def assign(self, row: int, pages: list[int]) -> None:
        self.tables.assign(row, pages)
        self.expected[row] = pages

    @rule(source=rows, step=st.integers(1, ROWS - 1), share=st.floats(0, 1))
    def fork(self, source: int, step: int, share: float) -> None:
        target, count = (source + step) % ROWS, int(share * len(self.expected[source]))
        self.tables.fork(source, target, count)
        self.expected[target] = self.expected[source][:count]

    @rule()
    def flush(self) -> None:
        self.tables.flush()
        for row, pages in zip(self.tables.block_table, self.expected, strict=True):
            assert row.tolist() == pages + [EMPTY] * (MAX_PAGES - len(pages))

    @invariant()
    def the_host_knows(self) -> None:
        assert [self.tables.pages(row) for row in range(ROWS)] == self.expected


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=30)


def test_only_what_is_new_is_sent() -> None:
    tables = BlockTables(8, 1000, "cpu")
    tables.assign(3, list(range(900)))
    header = 4 * 5 * MAX_COMMANDS
    assert tables.flush() == header + 4 * 900
    tables.assign(3, list(range(901)))
    assert tables.flush() == header + 4
    tables.assign(3, list(range(901)))
    assert tables.flush() == 0
    tables.fork(3, 4, 900)
    assert tables.flush() == header
    assert tables.block_table[4, :901].tolist() == [*range(900), -1]


def test_more_changes_than_one_message_holds() -> None:
    count = 2 * MAX_COMMANDS + 1
    tables = BlockTables(count, MIN_PAGE_IDS, "cpu")
    for row in range(count):
        tables.append(row, [row, row + 1])
    tables.append(0, [7] * (MIN_PAGE_IDS - 2))
    tables.append(1, [8] * (MIN_PAGE_IDS - 2))
    tables.flush()
    expected = np.arange(count)[:, None] + [0, 1]
    np.testing.assert_array_equal(tables.block_table[:, :2], expected)
    assert (tables.block_table[0, 2:] == 7).all()
    assert (tables.block_table[1, 2:] == 8).all()
    assert (tables.block_table[2:, 2:] == -1).all()


def test_what_a_row_cannot_hold_is_refused_and_changes_nothing() -> None:
    tables = BlockTables(2, 3, "cpu")
    tables.append(0, [5, 6])
    with pytest.raises(ValueError, match="row 0 holds 2 pages: 2 more are above 3"):
        tables.append(0, [7, 8])
    with pytest.raises(ValueError, match="count = 3: legal are 0 to 2"):
        tables.truncate(0, 3)
    with pytest.raises(ValueError, match="count = 3: legal are 0 to 2"):
        tables.fork(0, 1, 3)
    with pytest.raises(ValueError, match="target = 0"):
        tables.fork(0, 0, 1)
    with pytest.raises(ValueError, match="row = 2: legal are 0 to 1"):
        tables.fork(0, 2, 1)
    with pytest.raises(ValueError, match="row = -1"):
        tables.append(-1, [1])
    tables.flush()
    assert tables.block_table.tolist() == [[5, 6, -1], [-1, -1, -1]]
