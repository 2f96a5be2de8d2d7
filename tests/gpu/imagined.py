"""A pytest plugin for machines without a GPU: the GPU tests run on tests/cuda/fake_gpu.py, slowly,
all but those that need a driver. `python -m pytest -p tests.gpu.imagined -m gpu tests/gpu/...`"""

from contextlib import ExitStack

import pytest

from tests.cuda.fake_gpu import Stream, fake_gpu

_open = ExitStack()


def pytest_configure() -> None:
    """From here to the end of the run."""
    _open.enter_context(fake_gpu())
    Stream.current.append(Stream())


def pytest_unconfigure() -> None:
    """Before modules go."""
    _open.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what no imagination replaces."""
    for item in items:
        if item.get_closest_marker("driver"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA's driver, compiler or Numba's"))
