"""Block tables where the model runs, changed by short lists of commands instead of being sent anew.

The host's side is plain ints: it knows what every row holds, and sends only what has changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from npmoe.dtypes import array_namespace
from npmoe.ops.paging import (
    CLEAR,
    COMMAND_WIDTH,
    END,
    NO_PAGE,
    SHARE,
    WRITE,
    apply_page_commands,
)
from npmoe.runtime.device import cupy, to_device

MAX_COMMANDS = 64
MIN_PAGE_IDS = 256
_HEADER = MAX_COMMANDS * COMMAND_WIDTH


@dataclass(frozen=True)
class _Change:
    """A command of ops/paging.py before its page ids have a place in a message."""

    kind: int
    row: int
    start: int = 0
    count: int = 0
    source: int = 0
    pages: Sequence[int] = ()


class BlockTables:
    """`block_table` int32 `[num_rows, max_pages]`, a row for each sequence.

    Changes are gathered until `flush`, and take effect in the order in which they were made.
    Every method raises ValueError for a row or a count of pages that there is not.
    """

    def __init__(self, num_rows: int, max_pages: int, device: str, empty: int = NO_PAGE) -> None:
        """empty: what an entry without a page holds (a page to be read in vain, or -1)."""
        self.max_pages = max_pages
        self._empty = empty
        self._rows: list[list[int]] = [[] for _ in range(num_rows)]
        self._pending: list[_Change] = []
        self._num_page_ids = max(max_pages, MIN_PAGE_IDS)
        self._message = to_device(np.zeros(_HEADER + self._num_page_ids, np.int32), device)
        self.block_table = to_device(np.full((num_rows, max_pages), empty, np.int32), device)

    def pages(self, row: int) -> list[int]:
        """The pages of a row, pending changes included."""
        if not 0 <= row < len(self._rows):
            raise ValueError(f"row = {row}: legal are 0 to {len(self._rows) - 1}")
        return list(self._rows[row])

    def append(self, row: int, pages: Sequence[int]) -> None:
        """Adds pages at a row's end."""
        start = len(self.pages(row))
        if start + len(pages) > self.max_pages:
            raise ValueError(
                f"row {row} holds {start} pages: {len(pages)} more are above {self.max_pages}"
            )
        if pages:
            self._pending.append(_Change(WRITE, row, start, len(pages), pages=tuple(pages)))
            self._rows[row] += pages

    def truncate(self, row: int, count: int) -> None:
        """Keeps the first `count` pages of a row; 0 frees it."""
        _check_count(count, len(self.pages(row)))
        if count < len(self._rows[row]):
            self._pending.append(_Change(CLEAR, row, count))
            del self._rows[row][count:]

    def assign(self, row: int, pages: Sequence[int]) -> None:
        """Makes a row hold exactly these pages; what it already has of their start is not sent."""
        kept = 0
        for old, new in zip(self.pages(row), pages, strict=False):
            if old != new:
                break
            kept += 1
        self.truncate(row, kept)
        self.append(row, pages[kept:])

    def fork(self, source: int, target: int, count: int) -> None:
        """Makes row `target` hold the first `count` pages of another row."""
        _check_count(count, len(self.pages(source)))
        if source == target:
            raise ValueError(f"target = {target}: a row cannot be forked to itself")
        self.truncate(target, 0)
        if count:
            self._pending.append(_Change(SHARE, target, count=count, source=source))
            self._rows[target] = self._rows[source][:count]

    def flush(self) -> int:
        """Sends the changes and applies them; returns the bytes that were sent."""
        sent = 0
        commands = self._message[:_HEADER].reshape(MAX_COMMANDS, COMMAND_WIDTH)
        while self._pending:
            message = self._next_message()
            target = self._message[: len(message)]
            if array_namespace(target) is np:
                target[...] = message
            else:
                target.set(message, cupy().cuda.get_current_stream())
            apply_page_commands(self.block_table, commands, self._message[_HEADER:], self._empty)
            sent += message.nbytes
        return sent

    def _next_message(self) -> np.ndarray:
        """As many pending changes as fit: commands up to END, then the page ids they name."""
        commands = np.full((MAX_COMMANDS, COMMAND_WIDTH), END, np.int32)
        page_ids: list[int] = []
        taken = 0
        for c in self._pending[:MAX_COMMANDS]:
            if len(page_ids) + len(c.pages) > self._num_page_ids:
                break
            argument = c.source if c.kind == SHARE else len(page_ids)
            commands[taken] = c.kind, c.row, c.start, c.count, argument
            page_ids += c.pages
            taken += 1
        del self._pending[:taken]
        return np.concatenate([commands.reshape(-1), np.array(page_ids, np.int32)])


def _check_count(count: int, known: int) -> None:
    if not 0 <= count <= known:
        raise ValueError(f"count = {count}: legal are 0 to {known} pages, those of the row")
