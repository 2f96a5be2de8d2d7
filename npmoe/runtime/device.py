"""The only import of cupy and numba; each is loaded at first use.

`jit` marks a function for Numba without importing Numba: the import and the compilation (or the
read of its compile cache) happen at the first call.
"""

import ctypes
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from npmoe.errors import DeviceError

CUDA_SUCCESS = 0
CUDA_ERROR_NO_DEVICE = 100


def resolve_device(device: str) -> str:
    """`"auto"`, `"cpu"` or `"cuda"` -> `"cpu"` or `"cuda"`.

    auto takes the GPU where there is one and the CPU only where there is no NVIDIA device.
    Raises DeviceError when a GPU is asked for or present and cannot be used.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device = {device!r}: legal values are 'auto', 'cpu' and 'cuda'")
    if device == "cpu":
        return "cpu"
    count, problem = _count_gpus()
    if count == 0 and device == "auto" and problem is None:
        return "cpu"
    if count == 0:
        raise DeviceError(
            f"device = {device!r}: {problem or 'no NVIDIA GPU was found'}. "
            "Use device='cpu' to run on this machine without a GPU."
        )
    if find_spec("cupy") is None:
        raise DeviceError(
            f"{count} NVIDIA GPU(s) found, but CuPy is not installed: "
            "pip install 'npmoe[cuda13]' (or [cuda12]); device='cpu' runs without it."
        )
    return "cuda"


def _count_gpus() -> tuple[int, str | None]:
    """GPUs that the driver shows, and what is wrong if it cannot be asked."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        if os.path.isdir("/proc/driver/nvidia/gpus"):
            return 0, "an NVIDIA GPU is present but the driver's library libcuda.so.1 is not"
        return 0, None
    status = driver.cuInit(0)
    if status == CUDA_ERROR_NO_DEVICE:
        return 0, None
    if status != CUDA_SUCCESS:
        return 0, f"the NVIDIA driver does not start (cuInit returned {status})"
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value, None


def cupy() -> ModuleType:
    """The cupy module."""
    return import_module("cupy")


@cache
def compute_capability() -> int:
    """Of the current GPU: 90 for 9.0."""
    return int(cupy().cuda.Device().compute_capability)


def to_device(x: np.ndarray, device: str) -> Any:
    """A NumPy array as it is on the CPU, or copied to the GPU."""
    return x if device == "cpu" else cupy().asarray(x)


def to_host(x: Any) -> np.ndarray:
    """Any array as a NumPy array."""
    return x if isinstance(x, np.ndarray) else x.get()


def pinned_zeros(*shape: int, dtype: type) -> np.ndarray:
    """An array in page-locked host memory, to which the GPU copies while the host goes on."""
    count = math.prod(shape)
    memory = cupy().cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
    array: np.ndarray = np.frombuffer(memory, dtype, count).reshape(shape)
    array[...] = 0
    return array


def copy_to_pinned(target: np.ndarray, source: Any, stream: Any) -> None:
    """Enqueues a copy of a contiguous device array to the first rows of one of `pinned_zeros`."""
    runtime = cupy().cuda.runtime
    pointers = target.ctypes.data, source.data.ptr
    runtime.memcpyAsync(*pointers, source.nbytes, runtime.memcpyDeviceToHost, stream.ptr)


def free_memory(device: str) -> int:
    """Bytes that can be allocated: MemAvailable on the CPU, the driver's figure on the GPU."""
    if device == "cuda":
        return int(cupy().cuda.runtime.memGetInfo()[0])
    limits = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        with open("/proc/meminfo") as lines:
            found = [int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line]
        limits = found or limits
        with open("/sys/fs/cgroup/memory.max") as top, open("/sys/fs/cgroup/memory.current") as now:
            limits.append(int(top.read()) - int(now.read()))
    except (OSError, ValueError):  # no cgroup limit, or not Linux
        pass
    return min(limits)


class _LazyJit:
    """A function that turns into a Numba dispatcher at its first call."""

    def __init__(self, function: Callable, options: dict[str, Any]) -> None:
        self.py_func = function
        self._options = options
        self._dispatcher: Any = None
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any) -> Any:
        return (self._dispatcher or self.compile())(*args)

    def compile(self) -> Any:
        """Imports Numba and makes the dispatcher; lazy functions that this one calls come first,
        since compiled code must find dispatchers under their global names."""
        if self._dispatcher is None:
            namespace = self.py_func.__globals__
            for name in self.py_func.__code__.co_names:
                if isinstance(namespace.get(name), _LazyJit):
                    namespace[name] = namespace[name].compile()
            with _cache_outside_the_package() as numba:
                self._dispatcher = numba.njit(**self._options)(self.py_func)
        return self._dispatcher


_cache_lock = threading.Lock()


@contextmanager
def _cache_outside_the_package() -> Iterator[ModuleType]:
    """Numba, whose functions made inside keep their compile cache in the user's cache folder.

    Beside the source, where Numba puts it by itself, it would outlive an uninstalled package as a
    folder `npmoe` that hides an editable install. NUMBA_CACHE_DIR wins.
    """
    numba = import_module("numba")
    with _cache_lock:
        chosen = numba.config.CACHE_DIR
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        numba.config.CACHE_DIR = chosen or os.path.join(home, "npmoe")
        try:
            yield numba
        finally:
            numba.config.CACHE_DIR = chosen


def jit(function: Callable) -> Callable:
    """Compiles `function` for the CPU at its first call: cached on disk, without the GIL.

    Products and sums may be contracted into fused multiply-adds; nothing is reassociated.
    """
    return _LazyJit(function, {"cache": True, "nogil": True, "fastmath": {"contract"}})


PARALLEL_WORK = 1 << 20


def cpu_threads() -> int:
    """Threads that one op may use: NPMOE_NUM_THREADS, else the cores this process may run on."""
    return int(os.environ.get("NPMOE_NUM_THREADS", 0)) or len(os.sched_getaffinity(0))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cpu_threads(), thread_name_prefix="npmoe")


def parallel_ranges(count: int, work: int, run: Callable[[int, int], None]) -> None:
    """Calls `run(start, stop)` over a split of range(count), in threads if `work` is large.

    `work` is the number of multiply-adds, roughly; below PARALLEL_WORK a thread costs more than it
    saves. `run` must release the GIL and write disjoint results.
    """
    threads = min(cpu_threads(), count)
    if work < PARALLEL_WORK or threads < 2:
        run(0, count)
        return
    edges = [count * i // threads for i in range(threads + 1)]
    tasks = [_pool().submit(run, a, b) for a, b in zip(edges[1:-1], edges[2:], strict=True)]
    try:
        run(edges[0], edges[1])
    finally:
        wait(tasks)
    for task in tasks:
        task.result()
