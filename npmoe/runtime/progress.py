"""Progress bars and one-line messages, on standard error, and the switch that turns both off."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def say(message: str, quiet: bool = False) -> None:
    """Prints one line for the person who waits, if there is anyone: standard error may be closed
    or full, which is no reason to stop."""
    if not quiet and sys.stderr is not None:
        with suppress(OSError):
            print(f"npmoe: {message}", file=sys.stderr, flush=True)


def say_end_of_line() -> None:
    """Ends the line in which a terminal shows ^C."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(file=sys.stderr)


def progress(items: Iterable[T], what: str, quiet: bool = False) -> Iterator[T]:
    """Iterates over `items` behind a bar labelled `what`; no bar when quiet or not a terminal."""
    off = True if quiet or sys.stderr is None else None
    yield from tqdm(items, desc=what, disable=off, leave=False)
