"""Bytes from files to the GPU: read in threads into pinned memory, copied on a stream of its own.

Two things go on at once, reading the next buffers and copying the last; pinned memory is what the
GPU can fetch at full speed and without waiting.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np

from npmoe.dtypes import Array
from npmoe.runtime.device import cupy

K = TypeVar("K")

BUFFER_BYTES, BUFFERS = 32 << 20, 4
READ_BYTES = 4 << 20
"""The most that one thread reads at a time."""
MOST_THREADS = 16
ALIGNMENT = 256


@dataclass(frozen=True)
class Piece:
    """Bytes to be read. `read(target, start)` fills target, uint8 `[n]`, with the bytes start to
    start + n; it is called in threads."""

    nbytes: int
    read: Callable[[np.ndarray, int], None]


def array_piece(a: np.ndarray) -> Piece:
    """The bytes of an array in memory."""
    flat = np.ascontiguousarray(a).reshape(-1).view(np.uint8)

    def read(target: np.ndarray, start: int) -> None:
        target[:] = flat[start : start + len(target)]

    return Piece(flat.nbytes, read)


class _Read(NamedTuple):
    """Bytes `start` to `start + size` of a piece, which go to `at` on the device."""

    piece: Piece
    start: int
    at: int
    size: int


def aligned(num_bytes: int) -> int:
    """Bytes that an array takes in the device buffer: the next one begins at its alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Uploader:
    """Owns the pinned buffers, the device buffer and the stream."""

    def __init__(
        self, largest: int, buffer_bytes: int = BUFFER_BYTES, buffers: int = BUFFERS
    ) -> None:
        """largest: bytes of the largest upload, each of its arrays `aligned`."""
        xp = cupy()
        self.stream: Any = xp.cuda.Stream(non_blocking=True)
        self.num_bytes = 0
        self._size = buffer_bytes
        memory = [xp.cuda.alloc_pinned_memory(buffer_bytes) for _ in range(buffers)]
        self._buffers = [np.frombuffer(m, np.uint8, buffer_bytes) for m in memory]
        self._copied = [xp.cuda.Event(disable_timing=True) for _ in range(buffers)]
        with self.stream:
            self._device = xp.empty(largest, np.uint8)

    def uploads(
        self, jobs: Iterable[tuple[K, list[list[Piece]]]]
    ) -> Iterator[tuple[K, list[Array]]]:
        """For each (key, arrays as lists of pieces), the key and uint8 arrays on the device.

        A piece's bytes follow those of the piece before it. The arrays hold their bytes for what
        is put on `stream` before the next pair is asked for. Jobs are asked for a few buffers
        ahead. An error of a `read` is raised here.
        """
        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads, "npmoe-load") as pool:
            waiting: deque[Callable[[], Iterator[tuple[K, list[Array]]]]] = deque()
            try:
                for number, chunk in enumerate(chunks(jobs, self._size)):
                    if len(waiting) == len(self._buffers):
                        yield from waiting.popleft()()
                    waiting.append(self._start(pool, number % len(self._buffers), *chunk))
                while waiting:
                    yield from waiting.popleft()()
            finally:
                pool.shutdown(cancel_futures=True)
                self.stream.synchronize()  # nothing is read from or written to the buffers any more

    def _start(
        self, pool: ThreadPoolExecutor, slot: int, reads: list[_Read], ends: tuple | None
    ) -> Callable[[], Iterator]:
        """Begins to read a buffer; calling the result waits for it and begins to copy it.

        ends: key and places of the arrays of the job that is complete with this buffer.
        """
        self._copied[slot].synchronize()
        buffer, first = self._buffers[slot], reads[0].at
        tasks: list[Future] = []
        for r in reads:
            place = r.at - first
            tasks.append(pool.submit(r.piece.read, buffer[place : place + r.size], r.start))

        def finish() -> Iterator:
            for task in tasks:
                task.result()
            count = reads[-1].at + reads[-1].size - first
            copy_to_device(self._device[first : first + count], buffer[:count], self.stream)
            self._copied[slot].record(self.stream)
            self.num_bytes += sum(r.size for r in reads)
            if ends is not None:
                key, places = ends
                yield key, [self._device[start:stop] for start, stop in places]

        return finish


def copy_to_device(target: Array, source: np.ndarray, stream: Any) -> None:
    """Puts a copy from pinned memory on the stream; both uint8 and contiguous."""
    target.data.copy_from_host_async(source.ctypes.data, source.nbytes, stream)


def chunks(
    jobs: Iterable[tuple[K, list[list[Piece]]]], size: int
) -> Iterator[tuple[list[_Read], tuple[K, list[tuple[int, int]]] | None]]:
    """The reads of one buffer after the other; with a job's last, its key and arrays' places."""
    for key, arrays in jobs:
        places = []
        start = 0
        for pieces in arrays:
            stop = start + sum(p.nbytes for p in pieces)
            places.append((start, stop))
            start = aligned(stop)
        for _, group in groupby(_reads(arrays, places, size), key=lambda r: r.at // size):
            reads = list(group)
            complete = reads[-1].at + reads[-1].size == places[-1][1]
            yield reads, (key, places) if complete else None


def _reads(arrays: list[list[Piece]], places: list[tuple[int, int]], size: int) -> Iterator[_Read]:
    """Every piece in parts that one thread reads and that lie in one buffer."""
    for pieces, (at, _) in zip(arrays, places, strict=True):
        for piece in pieces:
            start = 0
            while start < piece.nbytes:
                count = min(piece.nbytes - start, READ_BYTES, size - at % size)
                yield _Read(piece, start, at, count)
                start, at = start + count, at + count
