"""NVRTC, the CUDA compiler, through ctypes: it compiles for any GPU and needs none."""

import ctypes
import functools
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from npmoe.runtime.resources import folder


@functools.cache
def _folders() -> tuple[Path, Path] | None:
    """libnvrtc and the CUDA headers that pip installed."""
    spec = find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for library in sorted(Path(root).glob("cu*/lib/libnvrtc.so.*")):
            include = library.parents[1] / "include"
            if (include / "cuda_fp16.h").exists():
                return library, include
    return None


def missing() -> str | None:
    """Why nothing can be compiled here, or None."""
    if _folders() is None:
        return "the CUDA compiler (NVRTC) is missing: pip install 'npmoe[cuda-compile]'"
    return None


@functools.cache
def _library() -> Any:
    found = _folders()
    assert found is not None
    for builtins in found[0].parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)  # NVRTC looks for it by bare name
    return ctypes.CDLL(str(found[0]))


@dataclass(frozen=True)
class Usage:
    """What ptxas says of a kernel. spilled: bytes of stores and loads; shared: static, in bytes."""

    registers: int
    spilled: int
    shared: int


class CompileError(Exception):
    """The compiler's log."""


def compile_kernels(stem: str, architecture: str, macros: dict[str, int]) -> dict[str, Usage]:
    """Compiles cuda_src/<stem>.cu as npmoe.runtime.nvrtc does; usage of each kernel by name."""
    found = _folders()
    assert found is not None
    library, program = _library(), ctypes.c_void_p()
    source = (folder("cuda_src") / f"{stem}.cu").read_bytes()
    options = ["-std=c++17", f"-arch={architecture}", f"-I{folder('cuda_src')}", f"-I{found[1]}"]
    options += ["-ftz=true", "--ptxas-options=-v"]  # the first since CuPy passes it
    options += [f"-D{k}={v}" for k, v in macros.items()]
    name = f"{stem}.cu".encode()
    status = library.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None)
    assert status == 0
    encoded = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    status = library.nvrtcCompileProgram(program, len(options), encoded)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    text = log.value.decode()
    if status:
        raise CompileError(f"{stem}.cu for {architecture} with {macros}:\n{text[:4000]}")
    return _read_log(text)


def _read_log(log: str) -> dict[str, Usage]:
    kernels = {}
    for part in log.split("Compiling entry function '")[1:]:
        name = part[: part.index("'")]
        spills = re.findall(r"(\d+) bytes spill", part)
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        assert registers is not None, part
        assert spills, part
        kernels[name] = Usage(
            int(registers[1]), sum(map(int, spills)), int(shared[1]) if shared else 0
        )
    return kernels
