"""CUDA graphs: a sequence of launches captured once and replayed as one; and the same without."""

from collections.abc import Callable
from typing import Any

from npmoe.runtime import nvtx
from npmoe.runtime.device import cupy


class Graph:
    """What `enqueue` puts on a stream, replayable. Addresses are fixed: buffers must live on."""

    def __init__(self, enqueue: Callable[[], None], stream: Any = None) -> None:
        """Runs `enqueue` once for real, so that everything is compiled, then captures it.

        stream: where it runs; None makes one. Graphs that share buffers share a stream.
        """
        self.stream = _run_once(enqueue, stream)
        with self.stream:
            self.stream.begin_capture()
            try:
                enqueue()
            finally:
                self._graph = self.stream.end_capture()

    def replay(self) -> None:
        """Puts one run of the graph on its stream; does not wait."""
        self._graph.launch(self.stream)


class Eager:
    """Like Graph, but every replay enqueues anew, in NVTX ranges: for a profiler, and slower."""

    def __init__(self, enqueue: Callable[[], None], stream: Any = None) -> None:
        """Runs `enqueue` once for real, so that everything is compiled; stream as of Graph."""
        self.stream, self._enqueue = _run_once(enqueue, stream), enqueue

    def replay(self) -> None:
        """Puts one run on the stream, in a range "step"; does not wait."""
        with self.stream, nvtx.recording(), nvtx.annotate("step"):
            self._enqueue()


def _run_once(enqueue: Callable[[], None], stream: Any) -> Any:
    """The stream (None: a new one), on which `enqueue` has run, after all that fills its buffers on
    the null stream."""
    stream = stream or cupy().cuda.Stream(non_blocking=True)
    cupy().cuda.Stream.null.synchronize()
    with stream:
        enqueue()
        stream.synchronize()
    return stream
