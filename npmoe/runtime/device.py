"""The only import of cupy and numba; each is loaded at first use.

`jit` marks a function for Numba without importing Numba: the import and the compilation (or the
read of its compile cache) happen at the first call. `cuda_jit` does the same for a CUDA kernel.
"""

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from npmoe.errors import DeviceError
from npmoe.runtime.recording import note
from npmoe.runtime.requirements import (
    WITHOUT,
    check_capability,
    check_packages,
    load_driver,
)


def resolve_device(device: str) -> str:
    """`"auto"`, `"cpu"` or `"cuda"` -> `"cpu"` or `"cuda"`.

    auto takes the GPU where there is one and the CPU only where there is no NVIDIA device.
    Raises DeviceError when a GPU is asked for or present and cannot be used.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device = {device!r}: legal values are 'auto', 'cpu' and 'cuda'")
    if device == "cpu":
        return "cpu"
    driver = load_driver()
    if driver is None and device == "auto":
        return "cpu"
    if driver is None:
        raise DeviceError(
            f"device = {device!r}: no NVIDIA GPU was found; it needs one of compute capability 8.0 "
            f"(Ampere) or newer, and its driver (libcuda.so.1). {WITHOUT}"
        )
    check_capability(driver)
    check_packages(driver, cupy)
    return "cuda"


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
    """Bytes that can be allocated: MemAvailable on the CPU, the driver's figure on the GPU once
    CuPy has given back what earlier arrays left."""
    if device == "cuda":
        free_cached_memory()
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


def free_cached_memory() -> None:
    """Gives the memory that CuPy keeps for later arrays back, so that it counts as free."""
    cupy().get_default_memory_pool().free_all_blocks()
    cupy().get_default_pinned_memory_pool().free_all_blocks()


@cache
def numba_cuda() -> ModuleType:
    """The module numba.cuda. Raises DeviceError where numba-cuda is missing."""
    config = import_module("numba").config
    if not config.ENABLE_CUDASIM and find_spec("numba_cuda") is None:
        raise DeviceError(
            "numba-cuda is not installed: pip install 'npmoe[cuda13]' (or [cuda12]); "
            "device='cpu' runs without it"
        )
    config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # a grid is small where there is little to do
    return import_module("numba.cuda")


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
            self._dispatcher = self._make()
        return self._dispatcher

    def _make(self) -> Any:
        with _cache_outside_the_package() as numba:
            return numba.njit(**self._options)(self.py_func)


class CudaKernel(_LazyJit):
    """A CUDA kernel in Python; its source calls numba.cuda `cuda`."""

    @property
    def name(self) -> str:
        """Of the function."""
        return self.py_func.__name__

    def _make(self) -> Any:
        cuda = self.py_func.__globals__["cuda"] = numba_cuda()
        with _cache_outside_the_package():
            return cuda.jit(**self._options)(self.py_func)

    def launch(self, grid: int | tuple[int, ...], threads: int, *arguments: Any) -> None:
        """Puts the kernel on CuPy's current stream, where a graph may be capturing, once it has
        been compiled by a first launch with arguments of the same types.

        arguments: CuPy arrays and scalars of NumPy; NumPy arrays where Numba simulates CUDA
        (NUMBA_ENABLE_CUDASIM=1), which then runs the kernel on the CPU.
        """
        if note(CudaLaunch(self, grid, threads, arguments)):
            return
        kernel = self.compile()
        if import_module("numba").config.ENABLE_CUDASIM:
            kernel[grid, threads](*arguments)
            return
        stream = cupy().cuda.get_current_stream().ptr
        stream = numba_cuda().external_stream(stream) if stream else 0
        kernel[grid, threads, stream](*map(_numba_argument, arguments))


@dataclass(frozen=True)
class CudaLaunch:
    """One call of `CudaKernel.launch`, to be made again; its arrays must live on."""

    kernel: CudaKernel
    grid: int | tuple[int, ...]
    threads: int
    arguments: tuple[Any, ...]

    def again(self) -> None:
        """Puts it on the current stream."""
        self.kernel.launch(self.grid, self.threads, *self.arguments)


def _numba_argument(value: Any) -> Any:
    """A CuPy array as Numba's view of it, made without waiting for its stream; others as is."""
    if hasattr(value, "__cuda_array_interface__"):
        return numba_cuda().as_cuda_array(value, sync=False)
    return value


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


def cuda_jit(function: Callable) -> CudaKernel:
    """A Numba CUDA kernel, compiled at its first launch and cached on disk."""
    return CudaKernel(function, {"cache": True})


def cuda_device_jit(function: Callable) -> CudaKernel:
    """A function for the kernels of its module to call."""
    return CudaKernel(function, {"device": True})


cuda: Any = None
"""To be imported by modules with kernels, where numba.cuda takes its place at the first launch."""

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
