"""Errors of CuPy, by classes of the same names, become npmoe's."""

from types import SimpleNamespace
from typing import Any

import pytest

import npmoe
from npmoe.errors import DeviceError, NpmoeError, OutOfMemory
from npmoe.runtime import nvrtc
from npmoe.runtime.failures import named_error, named_errors, status_error
from tests.llm_fixtures import MOE, load

HOMES = {
    "OutOfMemoryError": "cupy.cuda.memory",
    "CompileException": "cupy.cuda.compiler",
    "CUDARuntimeError": "cupy_backends.cuda.api.runtime",
    "CUDADriverError": "cupy_backends.cuda.api.driver",
    "NVRTCError": "cupy_backends.cuda.libs.nvrtc",
    "DynamicLibNotFoundError": "cuda.pathfinder._dynamic_libs.load_dl_common",
}
BASES = {"OutOfMemoryError": MemoryError, "CompileException": Exception}


def raised(name: str, text: str, home: str | None = None) -> Exception:
    """An error of the class that CuPy or cuda-pathfinder calls so."""
    kind = type(name, (BASES.get(name, RuntimeError),), {"__module__": home or HOMES[name]})
    return kind(text)


OUT = raised("OutOfMemoryError", "Out of memory allocating 512 bytes (allocated so far: 1 bytes).")
INSUFFICIENT = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime"
LOG = "/tmp/x.cu(3): warning #1: dull\nqkv.cu(7): error: identifier 'K' is undefined\n1 error found"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OUT, OutOfMemory, r"used up: Out of memory allocating 512 bytes .*max_seq_len.*kv_cache"),
        (
            raised("CUDARuntimeError", "cudaErrorMemoryAllocation: out of memory"),
            *(OutOfMemory, "max_seq_len"),
        ),
        (raised("CUDADriverError", "CUDA_ERROR_OUT_OF_MEMORY: out"), OutOfMemory, "max_seq_len"),
        (raised("CUDARuntimeError", INSUFFICIENT), DeviceError, "update the driver"),
        (
            raised("CUDADriverError", "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"),
            *(DeviceError, "start a new one"),
        ),
        (raised("CUDARuntimeError", "cudaErrorWeird: odd"), DeviceError, "cudaErrorWeird.*report"),
        (raised("CompileException", LOG), DeviceError, r"refuses a kernel: qkv\.cu\(7\).*report"),
        (
            raised(
                "CompileException", 'a.cu(1): catastrophic error: cannot open source file "f.h"'
            ),
            *(DeviceError, "header files are missing: pip install"),
        ),
        (
            raised(
                "CompileException", "nvrtc: error: invalid value for --gpu-architecture (-arch)"
            ),
            *(DeviceError, "older than the GPU: pip install -U"),
        ),
        (
            raised("DynamicLibNotFoundError", "No such file: libnvrtc.so.13"),
            *(DeviceError, "libnvrtc.so.13. Install"),
        ),
        (raised("NVRTCError", "NVRTC_ERROR_INTERNAL_ERROR (11)"), DeviceError, "Install"),
    ],
)
def test_each_kind(error: Exception, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message) as caught, named_errors():
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("ours"),
        MemoryError(),
        KeyError("k"),
        OutOfMemory("named already"),
        raised("OutOfMemoryError", "of another library", home="torch.cuda"),
    ],
)
def test_other_errors_pass(error: Exception) -> None:
    assert named_error(error) is None
    with pytest.raises(type(error)) as caught, named_errors():
        raise error
    assert caught.value is error


def test_a_launch_that_fails_names_kernel_and_advice() -> None:
    error = status_error("CUDA_ERROR_NO_BINARY_FOR_GPU", "launching qkv")
    assert isinstance(error, DeviceError)
    assert str(error).startswith("launching qkv failed with CUDA_ERROR_NO_BINARY_FOR_GPU: ")
    assert isinstance(status_error("CUDA_ERROR_OUT_OF_MEMORY", "launching qkv"), OutOfMemory)


def fake_compiler(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A CuPy whose modules compile when a function is asked for, and fail so."""

    class Module:
        def __init__(self, **_: Any) -> None:
            pass

        def get_function(self, name: str) -> None:
            raise error

    monkeypatch.setattr(nvrtc, "cupy", lambda: SimpleNamespace(RawModule=Module))
    monkeypatch.setattr(nvrtc, "compute_capability", lambda: 90)
    for cached in (nvrtc._architecture, nvrtc._module, nvrtc._kernel):
        monkeypatch.setattr(nvrtc, cached.__name__, cached.__wrapped__)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (raised("CompileException", LOG), r"refuses embed\.cu: qkv\.cu\(7\)"),
        (ImportError("libnvrtc.so.12: cannot open"), r"NVRTC\) cannot be used: libnvrtc.so.12"),
        (OSError("libnvrtc.so.13: invalid ELF header"), "NVRTC"),
        (raised("CUDARuntimeError", INSUFFICIENT), "update the driver"),
    ],
)
def test_a_kernel_that_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    fake_compiler(monkeypatch, error)
    with pytest.raises(DeviceError, match=message):
        nvrtc.kernel("embed", "embed", K=2)


@pytest.mark.parametrize("method", ["generate", "stream", "forward"])
def test_memory_that_runs_out_at_work(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def fail(*_: object) -> None:
        raise OUT

    with load(MOE) as llm:
        monkeypatch.setattr(llm.engine.runner, "run", fail)
        calls = {
            "generate": lambda: llm.generate([1, 2, 3]),
            "stream": lambda: list(llm.stream([1, 2, 3])),
            "forward": lambda: llm.forward([1, 2, 3]),
        }
        with pytest.raises(OutOfMemory, match="max_seq_len"):
            calls[method]()
        monkeypatch.undo()
        params = npmoe.SamplingParams(max_tokens=2)
        assert llm.generate([1, 2, 3], params).token_ids, "it goes on afterwards"


def test_memory_that_runs_out_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OUT

    monkeypatch.setattr("npmoe.llm.load_model", fail)
    with pytest.raises(NpmoeError, match="max_seq_len"):
        load(MOE)
