"""Errors of CuPy and CUDA as errors of npmoe: what happened and what to do, never a code alone.

CuPy's classes are told by their names, so that nothing is imported to look at an error.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from npmoe.errors import DeviceError, NpmoeError, OutOfMemory

LESS_MEMORY = (
    "Lower max_seq_len or memory_fraction, choose a smaller kv_cache (such as 'fp4') or smaller "
    "weights, or close what else uses the GPU"
)
NEWER_DRIVER = (
    "update the driver, or install the CuPy for an older CUDA: pip install 'npmoe[cuda12]'"
)
_ADVICE = (
    (("OutOfMemory", "MemoryAllocation", "OUT_OF_MEMORY"), ""),
    (("InsufficientDriver", "SystemDriverMismatch", "CompatNotSupported"), NEWER_DRIVER),
    (("UnsupportedPtxVersion", "UNSUPPORTED_PTX_VERSION"), NEWER_DRIVER),
    (
        ("NoKernelImageForDevice", "NO_BINARY_FOR_GPU"),
        "its code was compiled for another GPU: remove ~/.cupy/kernel_cache and start again",
    ),
    (
        ("DevicesUnavailable", "DEVICE_UNAVAILABLE"),
        "another program holds the GPU for itself: wait for it, or choose another GPU with "
        "CUDA_VISIBLE_DEVICES",
    ),
    (("ECCUncorrectable", "ECC_UNCORRECTABLE"), "the GPU's memory is faulty; restart the machine"),
    (
        ("IllegalAddress", "ILLEGAL_ADDRESS", "Misaligned", "MISALIGNED", "LaunchFailure"),
        "a kernel of npmoe went wrong, please report it; this process cannot use the GPU any more, "
        "start a new one",
    ),
)
"""Parts of a status's name, and what to do."""
_OTHER = "this process may not be able to use the GPU any more; start a new one, and report it"


@contextmanager
def named_errors() -> Iterator[None]:
    """Inside, what CuPy raises becomes OutOfMemory or DeviceError; other errors pass."""
    try:
        yield
    except Exception as error:
        named = named_error(error)
        if named is None:
            raise
        raise named from error


def named_error(error: Exception, compiled: str = "a kernel") -> NpmoeError | None:
    """The error of npmoe that says what an error of CuPy means; None for any other error.

    compiled: what the compiler refused, if it did.
    """
    kinds = {c.__name__ for c in type(error).__mro__ if c.__module__.startswith(("cupy", "cuda."))}
    if "OutOfMemoryError" in kinds:
        return OutOfMemory(f"the GPU's memory is used up: {_first_line(error)}. {LESS_MEMORY}")
    if "CompileException" in kinds:
        return _compile_error(compiled, error)
    if kinds & {"CUDARuntimeError", "CUDADriverError"}:
        return status_error(_first_line(error))
    if kinds & {"NVRTCError", "DynamicLibNotFoundError"}:
        return DeviceError(
            f"a library of CUDA cannot be used: {_first_line(error)}. Install the libraries: "
            "pip install 'npmoe[cuda13]' 'cupy-cuda13x[ctk]' (or cuda12)"
        )
    return None


def status_error(status: str, doing: str = "the GPU") -> NpmoeError:
    """From a status of the CUDA driver or runtime: its name, perhaps with words behind it."""
    name = re.sub(r"[_ ]", "", status).lower()
    for parts, advice in _ADVICE:
        if any(part.replace("_", "").lower() in name for part in parts):
            if not advice:
                return OutOfMemory(f"the GPU's memory is used up ({status}). {LESS_MEMORY}")
            return DeviceError(f"{doing} failed with {status}: {advice}")
    return DeviceError(f"{doing} failed with {status}: {_OTHER}")


def _compile_error(what: str, error: Exception) -> DeviceError:
    """From the compiler's log: its first error, and what is missing if that is plain."""
    log = str(error)
    lines = [line.strip() for line in log.splitlines() if "error" in line]
    first = lines[0] if lines else _first_line(error)
    if "cannot open source file" in log:
        hint = "CUDA's header files are missing: pip install 'npmoe[cuda13]' (or [cuda12])"
    elif "gpu-architecture" in log:
        hint = "this NVRTC is older than the GPU: pip install -U 'npmoe[cuda13]'"
    else:
        hint = "please report it with this line and the versions of CuPy and NVRTC"
    return DeviceError(f"the CUDA compiler (NVRTC) refuses {what}: {first}. {hint}")


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(". ")
