"""A measurement as a record of a results file: what was measured where, with which versions."""

import datetime
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from npmoe import __version__
from npmoe.runtime.device import cupy

PROC_DRIVER = Path("/proc/driver/nvidia/version")


def environment(device: str, repository: Path) -> dict[str, Any]:
    """gpu, driver and versions; commit of `repository` and date.

    driver is the display driver's version, None where neither nvidia-smi nor the kernel module
    says it. commit ends in -dirty if files differ from it, and is empty outside a git checkout.
    """
    versions = {"npmoe": __version__, "python": platform.python_version(), "numpy": np.__version__}
    found: dict[str, Any] = {}
    if device == "cuda":
        runtime = cupy().cuda.runtime
        found["gpu"] = gpu_name()
        found["driver"] = driver_version()
        versions["cupy"] = cupy().__version__
        versions["cuda_runtime"] = runtime.runtimeGetVersion()
        versions["cuda_driver"] = runtime.driverGetVersion()
    else:
        found["machine"] = platform.machine()
    found["versions"] = versions
    found["commit"] = _output("git", "-C", str(repository), "describe", "--always", "--dirty")
    found["date"] = datetime.date.today().isoformat()
    return found


def gpu_name() -> str:
    """The current GPU, such as NVIDIA H200."""
    properties = cupy().cuda.runtime.getDeviceProperties(cupy().cuda.Device().id)
    return properties["name"].decode()


def driver_version(proc: Path = PROC_DRIVER) -> str | None:
    """The NVIDIA driver's version, such as 580.159.04; None where nothing on this machine says."""
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()
    if lines and lines[0][0].isdigit():
        return lines[0]
    if proc.is_file():
        words = proc.read_text().split("\n", 1)[0].split()
        numbers = [w for w in words if w.count(".") and w.replace(".", "").isdigit()]
        return numbers[0] if numbers else None
    return None


def _output(*command: str) -> str:
    """Standard output of a program, "" if it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def append(path: Path, record: dict[str, Any]) -> None:
    """Adds a record to a JSON list in a file, which is made if it is not there."""
    records = json.loads(path.read_text()) if path.is_file() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*records, record], indent=1) + "\n")


def results_file(folder: Path, what: str, record: dict[str, Any]) -> Path:
    """`what`-h200.json for an NVIDIA H200, `what`-x86_64.json for a processor."""
    name = record.get("gpu", record.get("machine", "cpu")).split()[-1].lower()
    return folder / f"{what}-{name}.json"
