"""A pytest plugin for compute-sanitizer: every CuPy array gets memory of its own, since overruns
inside CuPy's memory pool stay unseen. `python -m pytest -p tests.gpu.no_pool -m gpu ...`"""

from npmoe.runtime.device import cupy


def pytest_configure() -> None:
    """Before any test allocates."""
    cupy().cuda.set_allocator(None)
    cupy().cuda.set_pinned_memory_allocator(None)
