"""All GPU tests: first those that can share the GPU, several at once, then those that measure.

    python -m tests.gpu [--workers 6] [arguments of pytest]

Tests take a few gigabytes each, those marked `alone` up to 25.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PASSED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def run(marks: str, *arguments: str) -> bool:
    """Whether the tests with these marks pass; output goes where this program's goes."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, *arguments]
    return subprocess.run(command, cwd=HERE.parents[1], check=False).returncode in PASSED


def main() -> None:
    """Exits with 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="all GPU tests")
    parser.add_argument("--workers", type=int, default=6, help="tests at once")
    options, rest = parser.parse_known_args()
    where = rest if any(Path(a.partition("::")[0]).exists() for a in rest) else [*rest, str(HERE)]
    together = run("gpu and not alone", "-n", str(options.workers), *where)
    alone = run("gpu and alone", *where)
    raise SystemExit(not (together and alone))


if __name__ == "__main__":
    main()
