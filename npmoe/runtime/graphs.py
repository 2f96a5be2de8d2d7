"""CUDA graphs: a sequence of launches captured once and replayed as one."""

from collections.abc import Callable
from typing import Any

from npmoe.runtime.device import cupy


class Graph:
    """What `enqueue` puts on a stream, replayable. Addresses are fixed: buffers must live on."""

    def __init__(self, enqueue: Callable[[], None], stream: Any = None) -> None:
        """Runs `enqueue` once for real, so that everything is compiled, then captures it.

        stream: where it runs; None makes one. Graphs that share buffers share a stream.
        """
        self.stream: Any = stream or cupy().cuda.Stream(non_blocking=True)
        with self.stream:
            enqueue()
            self.stream.synchronize()
            self.stream.begin_capture()
            try:
                enqueue()
            finally:
                self._graph = self.stream.end_capture()

    def replay(self) -> None:
        """Puts one run of the graph on its stream; does not wait."""
        self._graph.launch(self.stream)
