"""Records: what ran where, and results files that grow."""

import json
import os
from pathlib import Path

import pytest

from npmoe.bench.record import append, driver_version, environment, results_file

PROC = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC 13\n"
)


def program(folder: Path, name: str, *lines: str) -> None:
    """An executable of these lines of sh."""
    path = folder / name
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o755)


def test_the_driver_as_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "nvidia-smi", "echo 570.11.02", "echo 570.11.02")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert driver_version(tmp_path / "none") == "570.11.02"


def test_the_driver_as_the_kernel_module_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "nvidia-smi", "echo no devices were found", "exit 6")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    proc = tmp_path / "version"
    assert driver_version(proc) is None
    proc.write_text(PROC)
    assert driver_version(proc) == "580.159.04"
    proc.write_text("something else\n")
    assert driver_version(proc) is None


def test_an_environment_on_the_cpu(tmp_path: Path) -> None:
    found = environment("cpu", tmp_path)
    assert found["commit"] == ""
    assert {"npmoe", "python", "numpy"} == found["versions"].keys()
    assert "gpu" not in found
    assert len(found["date"]) == len("2026-01-31")


def test_records_are_appended(tmp_path: Path) -> None:
    out = tmp_path / "new" / "decode.json"
    append(out, {"a": 1})
    append(out, {"a": 2})
    assert json.loads(out.read_text()) == [{"a": 1}, {"a": 2}]


def test_the_file_of_a_gpu(tmp_path: Path) -> None:
    assert results_file(tmp_path, "decode", {"gpu": "NVIDIA H200"}).name == "decode-h200.json"
    assert results_file(tmp_path, "decode", {"machine": "x86_64"}).name == "decode-x86_64.json"
