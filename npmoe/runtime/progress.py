"""Progress bars and one-line messages, on standard error, and the switch that turns both off."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def say(message: str, quiet: bool = False) -> None:
    """Prints one line for the person who waits."""
    if not quiet:
        print(f"npmoe: {message}", file=sys.stderr, flush=True)


def progress(items: Iterable[T], what: str, quiet: bool = False) -> Iterator[T]:
    """Iterates over `items` behind a bar labelled `what`; no bar when quiet or not a terminal."""
    yield from tqdm(items, desc=what, disable=True if quiet else None, leave=False)
