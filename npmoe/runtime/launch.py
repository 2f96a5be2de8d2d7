"""Launches a kernel so that the next one may begin before it has ended (programmatic dependent
launch): its blocks move in as soon as there is room, and wait at `grid_wait` for its results.

Kernels of compute capability below 9.0 are launched plainly.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from npmoe.errors import DeviceError
from npmoe.runtime import nvtx
from npmoe.runtime.device import compute_capability, cupy
from npmoe.runtime.failures import status_error
from npmoe.runtime.recording import note

PLAIN_SHARED_BYTES = 48 * 1024
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


@cache
def _driver() -> Any:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceError(
            f"cuda-bindings is missing ({error}): pip install 'npmoe[cuda13]' (or [cuda12])"
        ) from None


def _argument(value: Any) -> tuple[Any, Any]:
    """The value as the driver takes it and its C type: arrays, None, int32 and float32 only."""
    if value is None:
        return 0, _POINTER
    if isinstance(value, int | np.integer):
        return int(value), _INT
    if isinstance(value, float | np.floating):
        return float(value), _FLOAT
    return value.data.ptr, _POINTER


@dataclass(frozen=True)
class Launch:
    """One call of `launch`, to be made again; its arrays must live on."""

    kernel: Any
    grid: tuple[int, ...]
    threads: int
    arguments: tuple[Any, ...]
    shared: int

    def again(self) -> None:
        """Puts it on the current stream."""
        launch(self.kernel, self.grid, self.threads, *self.arguments, shared=self.shared)


def launch(
    kernel: Any, grid: tuple[int, ...], threads: int, *arguments: Any, shared: int = 0
) -> None:
    """Puts a kernel on the current stream; `shared` is dynamic shared memory in bytes.

    Python ints become int32, floats float32, arrays pointers, None a null pointer.
    """
    if note(Launch(kernel, grid, threads, arguments, shared)):
        return
    driver = _driver()
    # All kernels with the same carve-out: a multiprocessor must be empty before it can change it.
    kernel.preferred_shared_memory_carveout = 100
    fixed = kernel.shared_size_bytes
    if fixed + shared > PLAIN_SHARED_BYTES and kernel.max_dynamic_shared_size_bytes < shared:
        kernel.max_dynamic_shared_size_bytes = shared
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.hStream = driver.CUstream(cupy().cuda.get_current_stream().ptr)
    if compute_capability() >= 90:
        attribute = driver.CUlaunchAttribute()
        kinds = driver.CUlaunchAttributeID
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.value = value
        config.attrs, config.numAttrs = [attribute], 1
    values, types = zip(*map(_argument, arguments), strict=True)
    with nvtx.annotate(kernel.name):
        (status,) = driver.cuLaunchKernelEx(
            config, driver.CUfunction(kernel.kernel.ptr), (values, types), 0
        )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise status_error(status.name, f"launching {kernel.name}")
