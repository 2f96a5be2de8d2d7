"""NVTX ranges, the bars that a profiler draws over the kernels: step, layer and op.

The code that marks them runs when work is put on a stream, and a replayed CUDA graph does not pass
there. So they are drawn where steps are enqueued call by call (`graphs.Eager`), inside `recording`;
everywhere else `annotate` does nothing.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from npmoe.runtime.device import cupy

_recording: ContextVar[bool] = ContextVar("nvtx_recording", default=False)
_NOTHING = nullcontext()


@contextmanager
def recording() -> Iterator[None]:
    """Inside, in this thread, `annotate` draws ranges."""
    token = _recording.set(True)
    try:
        yield
    finally:
        _recording.reset(token)


def annotate(name: str) -> AbstractContextManager[None]:
    """A range around what the block enqueues, nested in those around it."""
    return _range(name) if _recording.get() else _NOTHING


@contextmanager
def _range(name: str) -> Iterator[None]:
    nvtx = cupy().cuda.nvtx
    nvtx.RangePush(name)
    try:
        yield
    finally:
        nvtx.RangePop()
