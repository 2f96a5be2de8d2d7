"""What is missing on a machine with a GPU is named, with what to do, by a driver made up for it."""

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest

from npmoe.errors import DeviceError
from npmoe.runtime import requirements
from npmoe.runtime.requirements import check_capability, check_packages, load_driver


class Driver:
    """The functions of libcuda.so.1 that are called, for one machine."""

    def __init__(
        self,
        status: int = 0,
        count: int = 1,
        capability: tuple[int, int] = (9, 0),
        cuda: int = 13000,
    ) -> None:
        self.status, self.count, self.capability, self.cuda = status, count, capability, cuda

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuGetErrorName(self, status: int, name: Any) -> int:
        names = {803: b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", 999: b"CUDA_ERROR_UNKNOWN"}
        name._obj.value = names.get(status)
        return 0 if status in names else 1

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, gpu: int) -> int:
        value._obj.value = {75: self.capability[0], 76: self.capability[1]}[attribute]
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.cuda
        return 0


def machine(monkeypatch: pytest.MonkeyPatch, driver: Driver | None, device: bool = False) -> None:
    """driver: None where there is no libcuda.so.1. device: the kernel knows a GPU."""

    def load(name: str) -> Driver:
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(os.path, "isdir", lambda path: device)


@pytest.mark.parametrize("driver", [None, Driver(status=100), Driver(count=0)])
def test_no_gpu(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    machine(monkeypatch, driver)
    assert load_driver() is None


def test_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    machine(monkeypatch, driver)
    assert load_driver() is driver


def test_a_gpu_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, None, device=True)
    with pytest.raises(DeviceError, match=r"libcuda\.so\.1 is not: install the driver"):
        load_driver()


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (999, "cuInit says CUDA_ERROR_UNKNOWN.*reinstall"),
        (803, "DRIVER_MISMATCH.*different versions"),
        (12345, "cuInit says 12345.*restart"),
    ],
)
def test_a_driver_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, status: int, message: str
) -> None:
    machine(monkeypatch, Driver(status))
    with pytest.raises(DeviceError, match=message + ".*device='cpu'"):
        load_driver()


def test_old_gpus_are_refused() -> None:
    for capability in ((8, 0), (8, 9), (9, 0), (12, 0)):
        check_capability(Driver(capability=capability))
    for capability in ((7, 5), (7, 0), (6, 1)):
        words = f"compute capability {capability[0]}.{capability[1]}, .* need 8.0"
        with pytest.raises(DeviceError, match=words):
            check_capability(Driver(capability=capability))


def fake_cupy(runtime: int = 13020, nvrtc_error: Exception | None = None) -> Any:
    def nvrtc_version() -> tuple[int, int]:
        if nvrtc_error is not None:
            raise nvrtc_error
        return 13, 0

    runtime_functions = SimpleNamespace(runtimeGetVersion=lambda: runtime)
    nvrtc = SimpleNamespace(getVersion=nvrtc_version)
    return lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime_functions, nvrtc=nvrtc))


def packages(
    monkeypatch: pytest.MonkeyPatch, cupy: bool = True, bindings: Exception | None = None
) -> None:
    def load(name: str) -> object:
        assert name == "cuda.bindings.driver"
        if bindings is not None:
            raise bindings
        return object()

    monkeypatch.setattr(requirements, "find_spec", lambda name: object() if cupy else None)
    monkeypatch.setattr(requirements, "import_module", load)


def broken_cupy() -> Any:
    raise ImportError("=====\nCuPy is not correctly installed.\n=====\nlibfoo.so: not found\n")


class DynamicLibNotFoundError(RuntimeError):
    """As cuda-pathfinder raises it."""


def test_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch)
    check_packages(Driver(), fake_cupy())  # a driver may be of an older minor version
    check_packages(Driver(cuda=13010), fake_cupy(12090))


@pytest.mark.parametrize(
    ("found", "driver", "cupy", "message"),
    [
        ({"cupy": False}, 13000, fake_cupy(), r"CuPy is not installed: pip install .*cuda13"),
        ({}, 13000, broken_cupy, r"cannot be imported \(libfoo.so: not found\): reinstall"),
        (
            {},
            12040,
            fake_cupy(),
            r"driver is for CUDA 12\.4, this CuPy needs CUDA 13: .*\[cuda12\]",
        ),
        (
            *({}, 13000),
            fake_cupy(nvrtc_error=DynamicLibNotFoundError("no libnvrtc.so.13")),
            r"NVRTC\) cannot be used \(no libnvrtc.so.13\): pip install",
        ),
        (
            {"bindings": ModuleNotFoundError("No module named 'cuda'")},
            *(13000, fake_cupy()),
            "cuda-bindings cannot be used .No module named 'cuda'.: pip install",
        ),
    ],
)
def test_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, found: dict, driver: int, cupy: Any, message: str
) -> None:
    packages(monkeypatch, **found)
    with pytest.raises(DeviceError, match=message + ".*device='cpu'"):
        check_packages(Driver(cuda=driver), cupy)
