"""What a machine needs for the GPU, looked at before anything is loaded; each lack says what to do.

In order: a device and a driver that starts, a GPU of compute capability 8.0, CuPy, a driver as new
as CuPy's CUDA, NVRTC, cuda-bindings.
"""

import ctypes
import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from npmoe.errors import DeviceError

CUDA_SUCCESS, CUDA_ERROR_NO_DEVICE, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 0, 100, 803
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
OLDEST_CAPABILITY = 80
"""Statuses and attributes of the driver's interface; 80 is 8.0, Ampere."""
EXTRAS = "pip install 'npmoe[cuda13]' (or [cuda12])"
WITHOUT = "device='cpu' runs without a GPU"


def load_driver() -> Any:
    """The driver's library, initialised; None where there is no NVIDIA device.

    Raises DeviceError where there is one that the driver does not show.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        if os.path.isdir("/proc/driver/nvidia/gpus"):
            raise DeviceError(
                "an NVIDIA GPU is present but the driver's library libcuda.so.1 is not: install "
                f"the driver (in a container, start it with the GPU). {WITHOUT}"
            ) from None
        return None
    status = driver.cuInit(0)
    if status == CUDA_ERROR_NO_DEVICE:
        return None
    if status != CUDA_SUCCESS:
        hint = "restart the machine or reinstall the driver"
        if status == CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
            hint = "its library and kernel module are of different versions; restart the machine"
        raise DeviceError(
            f"the NVIDIA driver does not start (cuInit says {_status_name(driver, status)}): "
            f"{hint}. {WITHOUT}"
        )
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return driver if count.value else None


def _status_name(driver: Any, status: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else str(status)


def check_capability(driver: Any) -> None:
    """Raises DeviceError for a first GPU that is older than npmoe's kernels."""
    parts = []
    for attribute in (CAPABILITY_MAJOR, CAPABILITY_MINOR):
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0)
        parts.append(value.value)
    if 10 * parts[0] + parts[1] < OLDEST_CAPABILITY:
        raise DeviceError(
            f"this GPU has compute capability {parts[0]}.{parts[1]}, npmoe's kernels need 8.0 "
            f"(Ampere) or newer. Choose another GPU with CUDA_VISIBLE_DEVICES; {WITHOUT}"
        )


def check_packages(driver: Any, cupy: Callable[[], ModuleType]) -> None:
    """Raises DeviceError where CuPy (`cupy` imports it), NVRTC or cuda-bindings is missing, or
    the driver is too old for them."""
    if find_spec("cupy") is None:
        raise DeviceError(f"a GPU was found, but CuPy is not installed: {EXTRAS}. {WITHOUT}")
    try:
        xp = cupy()
    except ImportError as error:
        raise DeviceError(
            f"CuPy is installed and cannot be imported ({_last_line(error)}): reinstall it, "
            f"{EXTRAS}. {WITHOUT}"
        ) from error
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    needed = xp.cuda.runtime.runtimeGetVersion()
    if version.value // 1000 < needed // 1000:
        raise DeviceError(
            f"the NVIDIA driver is for CUDA {_dotted(version.value)}, this CuPy needs CUDA "
            f"{needed // 1000}: update the driver, or install the CuPy that fits it, "
            f"pip install 'npmoe[cuda{version.value // 1000}]'. {WITHOUT}"
        )
    try:
        xp.cuda.nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise DeviceError(
            f"the CUDA compiler (NVRTC) cannot be used ({_last_line(error)}): {EXTRAS}. {WITHOUT}"
        ) from error
    try:
        import_module("cuda.bindings.driver")
    except (ImportError, RuntimeError, OSError) as error:
        raise DeviceError(
            f"cuda-bindings cannot be used ({_last_line(error)}): {EXTRAS}. {WITHOUT}"
        ) from error


def _dotted(version: int) -> str:
    """CUDA's 12040 as 12.4."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" =")]
    return lines[-1] if lines else type(error).__name__
