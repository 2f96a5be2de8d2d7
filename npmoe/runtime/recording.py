"""Launches noted instead of made: those of CUDA C and those of Numba."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol


class Launch(Protocol):
    """A launch that can be made again; its arrays must live on."""

    @property
    def kernel(self) -> Any:
        """What is launched, by `name`; None where kernels are collected."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What it is given."""

    def again(self) -> None:
        """Puts it on the current stream."""


_recorder: ContextVar[list[Launch] | None] = ContextVar("launch_recorder", default=None)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, in this thread, kernels are not run: their launches are noted in the list."""
    launches: list[Launch] = []
    token = _recorder.set(launches)
    try:
        yield launches
    finally:
        _recorder.reset(token)


def note(launch: Launch) -> bool:
    """Whether launches are noted here: then this one was."""
    recorder = _recorder.get()
    if recorder is not None:
        recorder.append(launch)
    return recorder is not None
