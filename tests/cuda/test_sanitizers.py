"""The cases marked `sanitize` once more, with AddressSanitizer and checks of alignment.

They find reads and writes outside an array, static shared memory included, and misaligned vectors.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.build import SANITIZE

HERE = Path(__file__).parent


def libasan() -> str:
    """The library that must be loaded before Python, by g++'s own word; its bare name if absent."""
    run = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True)
    return run.stdout.strip()


@pytest.mark.skipif(SANITIZE, reason="this is that run")
def test_under_sanitizers() -> None:
    library = libasan()
    if not Path(library).is_absolute():
        pytest.skip("g++ has no AddressSanitizer (libasan)")
    environment = os.environ | {
        "NPMOE_TEST_ASAN": "1",
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0",
        "PYTHONMALLOC": "malloc",
    }
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-s", "-m", "sanitize"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, str(HERE)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
    )
    report = run.stdout[-2000:] + run.stderr[:5000]
    assert run.returncode == 0, report
