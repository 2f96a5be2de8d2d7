"""The person at the terminal, or the pipe in its place: lines in, text out as it comes."""

import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from importlib import import_module
from typing import TypeVar

from npmoe.runtime.progress import say

T = TypeVar("T")


def read_lines(hint: str) -> Iterator[str]:
    """Lines of standard input, without their ends.

    At a terminal with a prompt and line editing; Ctrl-C there drops the line and says `hint`.
    """
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):
        import_module("readline")
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            say(hint)


def print_pieces(pieces: Generator[str, None, T], show: bool = True) -> T:
    """Prints each piece as it comes, or only waits; what the generator returns."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            return end.value
        if show:
            print(piece, end="", flush=True)
