"""Choosing a device, splitting work, compiling at first use."""

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from npmoe.errors import DeviceError
from npmoe.runtime import device
from npmoe.runtime.device import (
    PARALLEL_WORK,
    CudaKernel,
    cpu_threads,
    free_memory,
    jit,
    numba_cuda,
    parallel_ranges,
    resolve_device,
    to_device,
    to_host,
)


@pytest.mark.parametrize(
    ("wanted", "has_gpu", "expected"),
    [
        ("cpu", False, "cpu"),
        ("cpu", True, "cpu"),
        ("auto", False, "cpu"),
        ("auto", True, "cuda"),
        ("cuda", True, "cuda"),
    ],
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch, wanted: str, has_gpu: bool, expected: str
) -> None:
    monkeypatch.setattr(device, "load_driver", lambda: object() if has_gpu else None)
    monkeypatch.setattr(device, "check_capability", lambda driver: None)
    monkeypatch.setattr(device, "check_packages", lambda driver, cupy: None)
    assert resolve_device(wanted) == expected


def test_no_gpu_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "load_driver", lambda: None)
    with pytest.raises(DeviceError, match=r"'cuda': no NVIDIA GPU.*8\.0.*libcuda.*device='cpu'"):
        resolve_device("cuda")


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
@pytest.mark.parametrize("check", ["load_driver", "check_capability", "check_packages"])
def test_a_gpu_that_cannot_be_used_is_never_passed_over(
    monkeypatch: pytest.MonkeyPatch, wanted: str, check: str
) -> None:
    def refuse(*_: object) -> None:
        raise DeviceError("why")

    monkeypatch.setattr(device, "load_driver", lambda: object())
    monkeypatch.setattr(device, "check_capability", lambda driver: None)
    monkeypatch.setattr(device, "check_packages", lambda driver, cupy: None)
    monkeypatch.setattr(device, check, refuse)
    with pytest.raises(DeviceError, match="why"):
        resolve_device(wanted)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(
        ValueError, match="device = 'tpu': legal values are 'auto', 'cpu' and 'cuda'"
    ):
        resolve_device("tpu")


def test_arrays_stay_where_they_are_on_the_cpu() -> None:
    x = np.arange(3)
    assert to_device(x, "cpu") is x
    assert to_host(x) is x


def test_free_memory_is_a_number_of_bytes() -> None:
    assert 1e6 < free_memory("cpu") < 1e15


@pytest.mark.parametrize("threads", ["1", "3"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 101])
@pytest.mark.parametrize("work", [1, PARALLEL_WORK])
def test_ranges_cover_everything_once(
    monkeypatch: pytest.MonkeyPatch, threads: str, count: int, work: int
) -> None:
    monkeypatch.setenv("NPMOE_NUM_THREADS", threads)
    seen, lock = np.zeros(count, int), threading.Lock()

    def run(start: int, stop: int) -> None:
        with lock:
            seen[start:stop] += 1

    parallel_ranges(count, work, run)
    assert (seen == 1).all()


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPMOE_NUM_THREADS", "2")

    def run(start: int, stop: int) -> None:
        if start > 0:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        parallel_ranges(2, PARALLEL_WORK, run)


def test_no_range_runs_on_after_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPMOE_NUM_THREADS", "2")
    done = threading.Event()

    def run(start: int, stop: int) -> None:
        if start == 0:
            raise ZeroDivisionError
        time.sleep(0.1)
        done.set()

    with pytest.raises(ZeroDivisionError):
        parallel_ranges(2, PARALLEL_WORK, run)
    assert done.is_set(), "a thread still writes into arrays that the caller may reuse"


def test_threads_are_those_of_the_process_or_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NPMOE_NUM_THREADS", raising=False)
    assert cpu_threads() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("NPMOE_NUM_THREADS", "5")
    assert cpu_threads() == 5


@jit
def _double(x):
    return 2 * x


@jit
def _double_twice(x):
    return _double(_double(x))


def test_compiled_functions_call_each_other() -> None:
    assert _double_twice(np.float32(3)) == 12
    assert _double(np.float32(3)) == 6


def test_without_numba_cuda_its_kernels_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    monkeypatch.setattr("numba.config.ENABLE_CUDASIM", 0)
    numba_cuda.cache_clear()
    with pytest.raises(DeviceError, match=r"numba-cuda is not installed.*cuda13"):
        numba_cuda()


def test_a_kernel_runs_on_cupys_stream_and_waits_for_no_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnDevice:
        __cuda_array_interface__ = "an address"

    launched = []

    class Compiled:
        def __getitem__(self, configuration: tuple) -> Any:
            return lambda *arguments: launched.append((configuration, arguments))

    stream = SimpleNamespace(ptr=7)
    fake_cuda = SimpleNamespace(
        external_stream=lambda ptr: f"stream {ptr}",
        as_cuda_array=lambda array, sync: (array, sync),
    )
    monkeypatch.setattr("numba.config.ENABLE_CUDASIM", 0)
    monkeypatch.setattr(device, "numba_cuda", lambda: fake_cuda)
    current = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream))
    monkeypatch.setattr(device, "cupy", lambda: current)
    kernel = CudaKernel(lambda x: x, {})
    monkeypatch.setattr(kernel, "_dispatcher", Compiled())
    array, scalar = OnDevice(), np.float32(3)
    kernel.launch((2, 3), 64, array, scalar)
    stream.ptr = 0
    kernel.launch(1, 32, scalar)
    assert launched == [
        (((2, 3), 64, "stream 7"), ((array, False), scalar)),
        ((1, 32, 0), (scalar,)),
    ]


def test_importing_npmoe_loads_neither_numba_nor_cupy_and_is_quick() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import npmoe; "
        "import npmoe.ops.linear, npmoe.ops.route, npmoe.ops.group, npmoe.kv.tables; "
        "assert not {'numba', 'cupy', 'torch'} & set(sys.modules); "
        "print(time.perf_counter() - start)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 5, "far more than it should take, even on a busy machine"
