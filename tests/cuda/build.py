"""Kernels of cuda_src/ as functions on NumPy arrays: built by g++ behind cuda_cpu.h.

`kernel` and `launch` are called like those of npmoe.runtime, which they stand in for. Needs g++ and
NVIDIA's headers (extra `cuda-compile`). With NPMOE_TEST_ASAN=1 kernels are built with
AddressSanitizer and checks of alignment; Python must then run with libasan preloaded.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from npmoe.runtime.resources import folder

SANITIZE = os.environ.get("NPMOE_TEST_ASAN") == "1"
HERE = Path(__file__).parent
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-w"),
    "-ffp-contract=off",  # no fused multiply-adds: the same bits on every machine
    "-fno-strict-aliasing",  # nvcc does not assume it either
    "-ftrivial-auto-var-init=pattern",  # registers that nobody wrote hold garbage for certain
)
SANITIZERS = (
    *("-g1", "-fsanitize=address,alignment,bounds", "-fno-sanitize-recover=alignment,bounds"),
    "-fsanitize-sections=shared_memory",  # redzones around __shared__ arrays too
)


@functools.cache
def nvidia_include() -> Path | None:
    """The folder of NVIDIA's CUDA headers that pip installed, if it is there."""
    spec = find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for include in sorted(Path(root).glob("cu*/include")):
            if all((include / name).exists() for name in ("cuda_fp16.h", "crt", "nv/target")):
                return include
    return None


def missing() -> str | None:
    """Why no kernel can be built here, or None."""
    if platform.machine() != "x86_64":
        return f"cuda_cpu.h switches fibers on x86-64 only, this is {platform.machine()}"
    if shutil.which("g++") is None:
        return "g++ is not installed"
    if nvidia_include() is None:
        return "NVIDIA's CUDA headers are missing: pip install 'npmoe[cuda-compile]'"
    return None


@dataclass(frozen=True)
class Kernel:
    """One function of a built file. `function` takes what cpu::launch takes."""

    name: str
    function: Any
    library: ctypes.CDLL

    @property
    def was_hasty(self) -> bool:
        """Whether its last launch let the next kernel begin before it had waited itself."""
        return bool(self.library.cpu_was_hasty())

    @contextmanager
    def begins_early(self, written: list[Any], in_flight: list[bool]) -> Iterator[None]:
        """Inside, launches begin while kernels before them still write the arrays of `written` that
        are in_flight; a RuntimeError tells of writes to any of them before grid_wait."""
        count = len(written)
        starts = (ctypes.c_void_p * count)(*(a.ctypes.data for a in written))
        sizes = (ctypes.c_size_t * count)(*(a.nbytes for a in written))
        self.library.cpu_watch(starts, sizes, (ctypes.c_ubyte * count)(*in_flight), count)
        try:
            yield
        finally:
            self.library.cpu_watch(None, None, None, 0)


@functools.cache
def _build_folder() -> Path:
    """Where builds are kept, by what they may include and how they are built."""
    digest = hashlib.blake2b(digest_size=8)
    for source in (HERE, folder("cuda_src")):
        for path in sorted([*source.glob("*.cu*"), *source.glob("*.h")]):
            digest.update(path.read_bytes())
    digest.update(repr((FLAGS, SANITIZERS, SANITIZE, str(nvidia_include()))).encode())
    owned = Path(tempfile.gettempdir()) / f"npmoe-cuda-cpu-{os.getuid()}"
    owned.mkdir(mode=0o700, exist_ok=True)
    place = owned / digest.hexdigest()
    place.mkdir(exist_ok=True)
    return place


@functools.cache
def _compile_header() -> None:
    """Compiles cuda_cpu.h once for all: g++ takes the .gch where it finds one."""
    built = _build_folder() / "cuda_cpu.h.gch"
    if not built.exists():
        _compile((HERE / "cuda_cpu.h").read_text(), "c++-header", built)


def _compile(code: str, language: str, built: Path) -> None:
    with tempfile.TemporaryDirectory(dir=built.parent) as work:
        source, target = Path(work) / f"{built.stem}.cpp", Path(work) / built.name
        source.write_text(code)
        flags = [*FLAGS, *(SANITIZERS if SANITIZE else ()), f"-isystem{nvidia_include()}"]
        flags += [f"-I{f}" for f in (built.parent, HERE, folder("cuda_src"))]
        run = subprocess.run(
            ["g++", *flags, "-x", language, str(source), "-o", str(target)],
            capture_output=True,
            text=True,
            env={k: v for k, v in os.environ.items() if k != "LD_PRELOAD"},
        )
        assert run.returncode == 0, f"{code[:1000]}\n{run.stderr[:4000]}"
        target.replace(built)  # whole or not at all, whoever else builds the same


@functools.cache
def _library(stem: str, macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    code = '#include "cuda_cpu.h"\n'  # before the macros: K and the like are names in its headers
    code += "".join(f"#define {name} {value}\n" for name, value in macros)
    code += f'#include "{stem}.cu"\n'
    built = _build_folder() / f"{stem}-{hashlib.blake2b(code.encode()).hexdigest()[:16]}.so"
    if not built.exists():
        _compile_header()
        _compile(code, "c++", built)
    return ctypes.CDLL(str(built))


def kernel(stem: str, name: str, **macros: int) -> Kernel:
    """The function `name` of cuda_src/<stem>.cu, specialised by `macros`, for the CPU."""
    library = _library(stem, tuple(sorted((k, int(v)) for k, v in macros.items())))
    function = getattr(library, f"cpu_{name}")
    function.restype = ctypes.c_char_p
    return Kernel(name, function, library)


def _argument(value: Any) -> tuple[str, Any]:
    if value is None:
        return "P", ctypes.c_void_p(None)
    if isinstance(value, int | np.integer):
        return "i", ctypes.c_int(int(value))
    if isinstance(value, float | np.floating):
        return "f", ctypes.c_float(float(value))
    assert value.flags.c_contiguous
    return "P", ctypes.c_void_p(value.ctypes.data)


def launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    threads: int,
    *arguments: Any,
    shared: int = 0,
    seed: int = 0,
    **attributes: Any,
) -> None:
    """Runs the kernel to its end; arguments as for npmoe.runtime.launch.launch, arrays NumPy's.

    `seed` picks the order of blocks and threads (cuda_cpu.h). `attributes`, how the GPU would
    schedule the kernel, mean nothing here.
    """
    kinds, values = zip(*map(_argument, arguments), strict=True)
    sizes = (ctypes.c_uint * 6)(*(*grid, 1, 1)[:3], threads, 1, 1)
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    error = kernel.function(
        sizes, ctypes.c_size_t(shared), pointers, "".join(kinds).encode(), ctypes.c_uint(seed)
    )
    if error:
        raise RuntimeError(f"{kernel.name}: {error.decode()}")
