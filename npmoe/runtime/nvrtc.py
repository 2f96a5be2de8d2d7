"""Kernels by source file, name and macros: compiled by NVRTC through CuPy, once each.

The only file that names RawModule.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from npmoe.errors import DeviceError
from npmoe.runtime.device import compute_capability, cpu_threads, cupy
from npmoe.runtime.failures import named_error
from npmoe.runtime.resources import folder

OLDEST_ARCH = 80
ARCH_WITH_SUFFIX = (90, 100, 120)  # their own instructions need the "a" in the name


@cache
def _headers_digest() -> str:
    """A digest of all headers: CuPy's disk cache sees the main source only."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(folder("cuda_src").glob("*.cuh")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _architecture() -> str:
    cc = compute_capability()
    if cc < OLDEST_ARCH:
        raise DeviceError(
            f"this GPU has compute capability {cc // 10}.{cc % 10}, npmoe's kernels need 8.0 "
            "(Ampere) or newer; device='cpu' runs without a GPU"
        )
    return f"sm_{cc}a" if cc in ARCH_WITH_SUFFIX else f"sm_{cc}"


def bulk() -> bool:
    """Whether this GPU has bulk copies into shared memory (compute capability 9.0 or later)."""
    return compute_capability() >= 90


class FormatCode(int):
    """The value of a macro that stands for a format; kernels that get it say `name` in theirs."""

    name: str

    def __new__(cls, name: str, value: int) -> "FormatCode":
        code = super().__new__(cls, value)
        code.name = name
        return code


def named_codes(codes: Mapping[str, int]) -> dict[str, int]:
    """Format -> value of a macro, as FormatCode."""
    return {name: FormatCode(name, value) for name, value in codes.items()}


def symbol(name: str, macros: Mapping[str, int]) -> str:
    """What a profiler calls the kernel: `name` and the formats among its macros, by macro name, one
    if they are all the same: gate_up_fp4, attention_bf16_fp4 (K and V)."""
    values = [macros[key] for key in sorted(macros)]
    formats = [value.name for value in values if isinstance(value, FormatCode)]
    if len(set(formats)) == 1:
        formats = formats[:1]
    return "_".join((name, *formats))


Wanted = tuple[str, str, tuple[tuple[str, int], ...]]
"""Arguments of `kernel`: stem, name, macros."""

_collector: ContextVar[set[Wanted] | None] = ContextVar("kernel_collector", default=None)


@contextmanager
def collected() -> Iterator[set[Wanted]]:
    """Inside, in this thread, `kernel` compiles nothing, returns None, and notes what was asked."""
    wanted: set[Wanted] = set()
    token = _collector.set(wanted)
    try:
        yield wanted
    finally:
        _collector.reset(token)


def compile_all(wanted: Iterable[Wanted]) -> None:
    """Makes kernels ready, several at a time. Raises what `kernel` raises."""
    everything = list(wanted)
    if not everything:
        return
    device = cupy().cuda.Device().id

    def compile_one(arguments: Wanted) -> None:
        cupy().cuda.Device(device).use()  # a new thread has no context yet
        _kernel(*arguments)

    with ThreadPoolExecutor(cpu_threads()) as pool:
        list(pool.map(compile_one, everything))


def kernel(stem: str, name: str, **macros: int) -> Any:
    """The function `name` of cuda_src/<stem>.cu, specialised by `macros` and named by `symbol`.

    Raises DeviceError if the compiler is missing or refuses it, or the GPU is too old.
    """
    wanted = stem, name, tuple(sorted(macros.items()))
    collector = _collector.get()
    if collector is None:
        return _kernel(*wanted)
    collector.add(wanted)
    return None


@cache
def _kernel(stem: str, name: str, macros: tuple[tuple[str, int], ...]) -> Any:
    try:
        return _module(stem, name, macros).get_function(symbol(name, dict(macros)))  # compiles
    except Exception as error:
        named = named_error(error, f"{stem}.cu")
        if named is None and isinstance(error, ImportError | RuntimeError | OSError):
            named = DeviceError(f"the CUDA compiler (NVRTC) cannot be used: {error}")
        if named is None:
            raise
        raise named from error


@cache
def _module(stem: str, name: str, macros: tuple[tuple[str, int], ...]) -> Any:
    """cuda_src/<stem>.cu in which `name` has become its symbol."""
    source = folder("cuda_src") / f"{stem}.cu"
    renamed = symbol(name, dict(macros))
    options = (
        "-std=c++17",
        f"-arch={_architecture()}",
        f"-I{folder('cuda_src')}",
        f"-DHEADERS_DIGEST=0x{_headers_digest()}ull",
        *(f"-D{key}={int(value)}" for key, value in macros),
        *([f"-D{name}={renamed}"] if renamed != name else []),
    )
    code = f'#line 1 "{source.name}"\n{source.read_text()}'
    return cupy().RawModule(code=code, options=options)
