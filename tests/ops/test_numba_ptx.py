"""What numba-cuda makes of the kernels, without a GPU: they compile, and nothing is float64."""

from types import SimpleNamespace
from typing import Any

import numba
import pytest

from npmoe.ops import group, paging, top_k_kernel
from npmoe.runtime.device import CudaKernel, numba_cuda

CAPABILITY = (9, 0)


@pytest.fixture(scope="module")
def cuda() -> Any:
    """numba.cuda, where it can compile."""
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    if numba.config.ENABLE_CUDASIM:
        pytest.skip("Numba simulates CUDA in this process")
    return numba_cuda()


def arguments(cuda: Any, kinds: str) -> tuple[Any, ...]:
    """Types of "b" (bool), "i" (int32), "f" (float32), and C arrays such as "f2" (two axes)."""
    names = {"b": "boolean", "i": "int32", "f": "float32", "l": "uint64"}
    types = []
    for kind in kinds.split():
        scalar = getattr(cuda.types, names[kind[0]])
        axes = (slice(None),) * (int(kind[1:] or 0) - 1) + (slice(None, None, 1),)
        types.append(scalar[axes] if len(kind) > 1 else scalar)
    return tuple(types)


@pytest.mark.parametrize(
    ("kernel", "kinds"),
    [
        pytest.param(top_k_kernel.top_k_kernel, "f2 i2 f2 f1 b f1 b b i i b b f", id="top_k"),
        pytest.param(group._group_kernel, "i1 i1 i1 i1", id="group"),
        pytest.param(group._count_kernel, "i2 i1", id="count"),
        pytest.param(group._place_kernel, "i1 i1 i1 i1 i2", id="place"),
        pytest.param(paging._page_commands_kernel, "i2 i2 i1 i", id="page_commands"),
        pytest.param(paging._map_slots_kernel, "i1 i2 i1 i1 i", id="map_slots"),
        pytest.param(paging._copy_pages_kernel, "l3 i2", id="copy_pages"),
    ],
)
def test_kernels_compile_to_ptx_without_float64(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, kernel: CudaKernel, kinds: str
) -> None:
    device = SimpleNamespace(compute_capability=CAPABILITY)
    monkeypatch.setattr("numba.cuda.dispatcher.get_current_device", lambda: device)
    kernel.compile()
    ptx, _ = cuda.compile_ptx(kernel.py_func, arguments(cuda, kinds), cc=CAPABILITY)
    assert ".visible .entry" in ptx
    assert ".f64" not in ptx
