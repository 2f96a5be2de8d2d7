"""compute-sanitizer over the GPU tests of the kernels: memcheck and racecheck.

    python bench/sanitize.py [--tests tests/gpu/test_step.py] [--tool memcheck]

Tests run with CuPy's memory pool off. Appends a record to bench/results/sanitizer-<GPU>.json: for
each tool the number of errors, what it says of them, and whether the tests passed. Exits with 1 if
there is an error or a failure.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from npmoe.bench.record import append, environment, results_file

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck")
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
REPORT = re.compile(
    r"^=+ ((?:Error|Warning|Invalid|Misaligned)\b.*)\n=+ +((?:and|at)\b.*)$", re.M | re.I
)
MOST_REPORTS = 20
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards?)")


def find_sanitizer() -> str:
    """The program's path. Raises SystemExit with what to do where there is none."""
    path = os.pathsep.join((os.environ.get("PATH", ""), *PLACES))
    found = shutil.which("compute-sanitizer", path=path)
    if found is None:
        raise SystemExit(
            f"compute-sanitizer is neither on the PATH nor in {' or '.join(PLACES)}; "
            "it comes with the CUDA toolkit"
        )
    return found


def run_tool(sanitizer: str, tool: str, tests: list[str]) -> dict[str, Any]:
    """One tool over the tests: its summary, with its log on standard output."""
    command = [sanitizer, "--tool", tool, sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu"]
    command += ["-p", "tests.gpu.no_pool", "-p", "no:cacheprovider", *tests]
    if tool == "memcheck":  # the bindings ask the driver for functions that an older one lacks
        command[3:3] = ["--report-api-errors", "no"]
    paths = str(ROOT), os.environ.get("PYTHONPATH")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)
    return {"tool": tool, **summary(done.stdout), "passed": done.returncode == 0}


def summary(log: str) -> dict[str, Any]:
    """errors: as the tool counts them, None where it did not come to its end. reports: what it says
    most often, and how often. tests: pytest's last line."""
    counts = [int(a or b) for a, b in SUMMARY.findall(log)]
    ends = [
        line.strip("= ") for line in log.splitlines() if re.search(r"\d+ (passed|failed)", line)
    ]
    said = Counter(
        re.sub(r" \[\d+ hazards?\]", "", "; ".join(found)) for found in REPORT.findall(log)
    )
    return {
        "errors": sum(counts) if counts else None,
        "reports": dict(said.most_common(MOST_REPORTS)),
        "tests": ends[-1] if ends else None,
    }


def main() -> None:
    """Runs the tools one after another."""
    parser = argparse.ArgumentParser(description="compute-sanitizer over the kernel tests")
    parser.add_argument("--tests", nargs="+", default=["tests/gpu/test_step.py"], metavar="T")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all")
    parser.add_argument("--commit", help="what is checked, where git does not say")
    parser.add_argument("--out", type=Path, help="default: bench/results/sanitizer-<GPU>.json")
    args = parser.parse_args()
    sanitizer = find_sanitizer()
    runs = [run_tool(sanitizer, tool, args.tests) for tool in args.tool or TOOLS]
    record: dict[str, Any] = {"tests": args.tests, "pool": False, "runs": runs}
    record |= environment("cuda", ROOT)
    record["commit"] = args.commit or record["commit"]
    append(args.out or results_file(ROOT / "bench" / "results", "sanitizer", record), record)
    print(json.dumps(record))
    raise SystemExit(any(not run["passed"] or run["errors"] != 0 for run in runs))


if __name__ == "__main__":
    main()
