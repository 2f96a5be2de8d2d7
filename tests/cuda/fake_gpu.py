"""A GPU that is none: what npmoe takes from CuPy and from the driver, over NumPy arrays, with the
kernels of cuda_src/ built by g++, and NumPy in place of Numba's. It has no clock: elapsed time
counts launches."""

import ctypes
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np

from npmoe.ops import group, route
from npmoe.runtime import device, launch, nvrtc
from npmoe.runtime.device import CudaKernel, CudaLaunch
from npmoe.runtime.recording import note
from tests.cuda.build import kernel

KINDS = {ctypes.c_void_p: "P", ctypes.c_int: "i", ctypes.c_float: "f"}
NAME, DRIVER = "NVIDIA Imagined 1", 13000


class Memory:
    """cupy.cuda.MemoryPointer."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def copy_from_host_async(self, source: int, num_bytes: int, stream: Any) -> None:
        ctypes.memmove(self.ptr, source, num_bytes)


class Array(np.ndarray):
    """A NumPy array with the methods that CuPy's have beside NumPy's."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return Memory(self.ctypes.data)

    def get(self) -> np.ndarray:
        return np.array(self)

    def set(self, values: np.ndarray) -> None:
        self[...] = values


Array.__module__ = "cupy"  # array_namespace asks


def _as_device(result: Any) -> Any:
    return result.view(Array) if isinstance(result, np.ndarray) else result


class Generator:
    """numpy.random.Generator, for the device."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def standard_normal(self, shape: tuple[int, ...], dtype: type) -> Array:
        return self._generator.standard_normal(shape, dtype).view(Array)


class Stream:
    """Runs at once; while it captures, it notes instead."""

    current: ClassVar[list["Stream"]] = []
    ptr = 0

    def __init__(self, non_blocking: bool = False) -> None:
        self.captured: list[Callable[[], None]] | None = None

    def __enter__(self) -> "Stream":
        Stream.current.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        Stream.current.pop()

    def synchronize(self) -> None:
        pass

    def begin_capture(self) -> None:
        self.captured = []

    def end_capture(self) -> Any:
        calls, self.captured = self.captured, None
        assert calls is not None
        return SimpleNamespace(launch=lambda stream: [call() for call in calls])


class Event:
    """The number of launches so far."""

    def __init__(self, disable_timing: bool = False) -> None:
        self.at = 0

    def synchronize(self) -> None:
        pass

    def record(self, stream: Stream) -> None:
        self.at = FakeGPU.running.count


def _choose(*arguments: Any) -> None:
    """As `top_k_kernel`, for a router without biases."""
    (
        weights,
        ids,
        logits,
        _,
        biased,
        _,
        selects,
        sigmoid,
        groups,
        best,
        sums,
        renormalize,
        scaling,
    ) = arguments
    assert not biased
    assert not selects
    scoring, score = "sigmoid" if sigmoid else "softmax", "sum_of_two" if sums else "best"
    rule = route.TopKRule(scoring, int(groups), int(best), score, float(scaling))
    weights[...], ids[...] = route.top_k_ref(logits, ids.shape[1], renormalize, rule)


def _group(counts: Array, offsets: Array, pairs: Array, ids: Array) -> None:
    """As `_group_kernel`."""
    groups = group.group_by_expert_ref(ids, len(counts))
    for target, value in zip((counts, offsets, pairs), groups, strict=True):
        target[...] = value


NUMBA = {route.top_k_kernel: _choose, group._group_kernel: _group}


class FakeGPU:
    """What ran: `launched` has kernel names, `ranges` the NVTX ranges around each."""

    running: "FakeGPU"

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.ranges: list[tuple[str, ...]] = []
        self.open_ranges: list[str] = []
        self.functions: dict[int, Any] = {}
        self.handles = itertools.count(1)  # kernels are compiled in several threads

    @property
    def count(self) -> int:
        return len(self.launched)

    def raw_module(self, code: str, options: tuple[str, ...]) -> Any:
        """cupy.RawModule: `#line` names the file, -D the macros and the kernel's new name."""
        found = re.match(r'#line 1 "(\w+)\.cu"', code)
        assert found is not None
        defined = dict(o[2:].split("=") for o in options if o.startswith("-D"))
        macros = {k: int(v) for k, v in defined.items() if v.isdigit()}
        original = {v: k for k, v in defined.items() if v.isidentifier()}

        def get_function(symbol: str) -> Any:
            built = kernel(found[1], original.get(symbol, symbol), **macros)
            handle = SimpleNamespace(ptr=next(self.handles))
            self.functions[handle.ptr] = symbol, built
            sizes = {"max_dynamic_shared_size_bytes": 0, "shared_size_bytes": 0}
            return SimpleNamespace(name=symbol, kernel=handle, **sizes)

        return SimpleNamespace(get_function=get_function)

    def launch(self, config: Any, handle: int, arguments: tuple, extra: int) -> tuple[int]:
        """cuLaunchKernelEx."""
        symbol, built = self.functions[handle]
        boxes = [kind(value) for value, kind in zip(*arguments, strict=True)]
        kinds = "".join(KINDS[kind] for kind in arguments[1]).encode()
        sizes = (ctypes.c_uint * 6)(
            *(config.gridDimX, config.gridDimY, config.gridDimZ),
            *(config.blockDimX, config.blockDimY, config.blockDimZ),
        )

        def call() -> None:
            pointers = (ctypes.c_void_p * len(boxes))(*map(ctypes.addressof, boxes))
            shared = ctypes.c_size_t(config.sharedMemBytes)
            error = built.function(sizes, shared, pointers, kinds, ctypes.c_uint(0))
            assert not error, error

        self._put(symbol, call)
        return (0,)

    def launch_numba(
        self, kernel: CudaKernel, grid: int | tuple[int, ...], threads: int, *arguments: Any
    ) -> None:
        """CudaKernel.launch."""
        if not note(CudaLaunch(kernel, grid, threads, arguments)):
            self._put(kernel.name, lambda: NUMBA[kernel](*arguments))

    def _put(self, name: str, run: Callable[[], None]) -> None:
        ranges = tuple(self.open_ranges)

        def call() -> None:
            run()
            self.launched.append(name)
            self.ranges.append(ranges)

        captured = Stream.current[-1].captured
        call() if captured is None else captured.append(call)


def _cupy(gpu: FakeGPU) -> ModuleType:
    module = ModuleType("cupy")
    attributes = {"MultiProcessorCount": 3, "MaxSharedMemoryPerBlockOptin": 227 << 10}
    the_device = SimpleNamespace(
        attributes=attributes,
        compute_capability="90",
        id=0,
        synchronize=lambda: None,
        use=lambda: None,
    )
    Stream.null = SimpleNamespace(synchronize=lambda: None)  # type: ignore[attr-defined]
    cuda = SimpleNamespace(
        Device=lambda device=0: the_device,
        Stream=Stream,
        Event=Event,
        alloc_pinned_memory=bytearray,
        get_current_stream=lambda: Stream.current[-1],
        get_elapsed_time=lambda a, b: float(b.at - a.at),
        nvtx=SimpleNamespace(RangePush=gpu.open_ranges.append, RangePop=gpu.open_ranges.pop),
        runtime=SimpleNamespace(
            memGetInfo=lambda: (1 << 30, 1 << 31),
            memcpyDeviceToHost=2,
            memcpyAsync=lambda to, source, size, kind, stream: ctypes.memmove(to, source, size),
            getDeviceProperties=lambda i: {"name": NAME.encode()},
            driverGetVersion=lambda: DRIVER,
            runtimeGetVersion=lambda: DRIVER,
        ),
    )
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    own = {
        "__spec__": ModuleSpec("cupy", None),
        "__version__": "0",
        "cuda": cuda,
        "RawModule": gpu.raw_module,
        "random": SimpleNamespace(default_rng=Generator),
        "get_default_memory_pool": lambda: pool,
        "get_default_pinned_memory_pool": lambda: pool,
        "asarray": lambda a, dtype=None: np.array(a, dtype).view(Array),
    }

    def from_numpy(name: str) -> Any:
        found = getattr(np, name)
        if isinstance(found, type) or not callable(found):
            return found
        return lambda *args, **options: _as_device(found(*args, **options))

    module.__dict__.update(own)
    module.__dict__["__getattr__"] = from_numpy
    return module


def _driver(gpu: FakeGPU) -> ModuleType:
    module = ModuleType("cuda.bindings.driver")
    ids = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=1)
    module.__dict__.update(
        CUlaunchConfig=SimpleNamespace,
        CUlaunchAttribute=SimpleNamespace,
        CUlaunchAttributeValue=SimpleNamespace,
        CUlaunchAttributeID=ids,
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        CUstream=int,
        CUfunction=int,
        cuLaunchKernelEx=gpu.launch,
    )
    return module


@contextmanager
def _module(name: str, module: ModuleType) -> Iterator[None]:
    """Inside, `import name` finds this one; modules that are imported meanwhile stay."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


@contextmanager
def fake_gpu() -> Iterator[FakeGPU]:
    """Inside, npmoe finds this GPU."""
    gpu = FakeGPU.running = FakeGPU()
    cached = (
        *(device.compute_capability, launch._driver),
        *(nvrtc._kernel, nvrtc._module, nvrtc._architecture),
    )
    for function in cached:
        function.cache_clear()
    try:
        with (
            _module("cupy", _cupy(gpu)),
            _module("cuda.bindings.driver", _driver(gpu)),
            patch.object(
                *(CudaKernel, "launch"), lambda kernel, *args: gpu.launch_numba(kernel, *args)
            ),
            patch.object(device, "load_driver", object),
            patch.object(device, "check_capability", lambda driver: None),
            patch.object(device, "check_packages", lambda driver, cupy: None),
        ):
            yield gpu
    finally:
        for function in cached:
            function.cache_clear()
