"""Runs the kernel tests of this folder in a process whose Numba simulates CUDA on the CPU.

By hand: NUMBA_ENABLE_CUDASIM=1 python -m pytest tests/simulator
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator.conftest import SIMULATED

HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("test_*_kernels.py"))


def test_the_kernel_tests_are_here() -> None:
    assert FILES == ["test_group_kernels.py", "test_paging_kernels.py", "test_top_k_kernels.py"]


@pytest.mark.skipif(SIMULATED, reason="this is that run")
@pytest.mark.parametrize("name", FILES)
def test_in_the_simulator(name: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(HERE / name)],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
