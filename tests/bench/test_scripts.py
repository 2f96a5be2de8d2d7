"""The scripts of bench/, with programs in place of NVIDIA's."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from npmoe.llm import LLM
from tests.bench.test_record import program
from tests.cli_fixtures import byte_tokens, make_checkpoint
from tests.cuda.fake_gpu import DRIVER, FakeGPU

ROOT = Path(__file__).parents[2]
FORMATS = ("--weights", "fp4", "--kv-cache", "fp4", "--context", "40", "--quiet")
MEMCHECK = "========= ERROR SUMMARY: 0 errors"
RACECHECK = "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)"


def run_script(monkeypatch: pytest.MonkeyPatch, name: str, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
    runpy.run_path(str(ROOT / "bench" / name), run_name="__main__")


def test_decode_appends_a_record(
    gpu: FakeGPU,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "decode.json"
    out.write_text('[{"shape": "older"}]')
    run_script(monkeypatch, "decode.py", "--shape", "tiny", *FORMATS, "--out", out, "--commit", "c")
    older, record = json.loads(out.read_text())
    assert older == {"shape": "older"}
    assert json.loads(capsys.readouterr().out) == record
    for key in (
        *("shape", "weights", "kv", "batch", "context", "ms_per_token", "floor_ms"),
        *("bytes_per_token", "read_gbps", "host_gap_pct", "tokens_checked"),
        *("gpu", "driver", "versions", "commit", "date"),
    ):
        assert key in record
    assert (record["shape"], record["commit"]) == ("tiny", "c")
    assert record["gpu"] == "NVIDIA Imagined 1"
    assert record["versions"]["cuda_driver"] == DRIVER


def test_kernels_appends_a_record(
    gpu: FakeGPU,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "kernels.json"
    run_script(monkeypatch, "kernels.py", "--shape", "tiny", *FORMATS, "--out", out)
    (record,) = json.loads(out.read_text())
    kernels = [k["kernel"] for k in record["kernels"]]
    assert kernels[:3] == ["embed", "qkv_fp4", "attention_fp4"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == kernels


def test_quality_is_bits_per_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two documents of four letters; with line ends and end tokens 12 predictions of 11 bytes."""
    model, text, end = make_checkpoint(tmp_path / "tiny"), tmp_path / "text.txt", 257
    text.write_text("abab\n\n\ncdcd")
    run_script(monkeypatch, "quality.py", text, "--model", model, "--kv-cache", "fp8", "--json")
    found = json.loads(capsys.readouterr().out)
    letters = byte_tokens()
    first, second = ([letters[c] for c in word] for word in ("ababĊ", "cdcdĊ"))
    ids = [end, *first, end, *second, end]
    with LLM(model, device="cpu", kv_cache="fp8", progress=False) as llm:
        logits = llm.forward(ids[:-1]).astype(np.float64)
    chosen = np.exp(logits)[range(12), ids[1:]] / np.exp(logits).sum(axis=1)
    assert found["bits_per_byte"] == pytest.approx(-np.log2(chosen).sum() / 11, rel=1e-5)
    assert found["nats_per_token"] == pytest.approx(-np.log(chosen).mean(), rel=1e-5)
    expected = {"model": "tiny", "text": "text.txt", "weights": "native", "kv_cache": "fp8"}
    expected |= {"window": 256, "tokens": 12, "bytes": 11}
    assert {name: found[name] for name in expected} == expected


def sanitize(tmp_path: Path, *lines: str) -> dict:
    """bench/sanitize.py's functions, with a compute-sanitizer of these lines of sh on the PATH."""
    program(tmp_path, "compute-sanitizer", *lines)
    return runpy.run_path(str(ROOT / "bench" / "sanitize.py"), run_name="sanitize")


def test_sanitize_counts_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    race = (
        "========= Error: Race reported between Write access at store(float *)+0x70 in a.cu:3\n"
        "=========     and Read access at store(float *)+0xa0 in a.cu:5 [{} hazards]\n========= "
    )
    log = ["3 passed, 1 skipped in 2s", race.format(4), race.format(8), RACECHECK]
    functions = sanitize(tmp_path, 'echo "$@"', *(f"echo '{line}'" for line in log))
    sanitizer = functions["find_sanitizer"]()
    assert sanitizer == str(tmp_path / "compute-sanitizer")
    found = functions["run_tool"](sanitizer, "racecheck", ["tests/gpu/test_step.py"])
    assert found == {
        "tool": "racecheck",
        "errors": 2,
        "reports": {
            "Error: Race reported between Write access at store(float *)+0x70 in a.cu:3; "
            "and Read access at store(float *)+0xa0 in a.cu:5": 2
        },
        "tests": "3 passed, 1 skipped in 2s",
        "passed": True,
    }


def test_sanitize_says_what_did_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    functions = sanitize(tmp_path, "echo Device not supported", "exit 3")
    found = functions["run_tool"]("compute-sanitizer", "memcheck", [])
    nothing = {"errors": None, "reports": {}, "tests": None}
    assert found == {"tool": "memcheck", **nothing, "passed": False}
    assert functions["summary"](MEMCHECK)["errors"] == 0


def test_the_sanitizer_runs_tests_without_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    functions = sanitize(tmp_path, 'echo "$@"')
    functions["run_tool"]("compute-sanitizer", "memcheck", ["tests/gpu/test_step.py"])
    command = capsys.readouterr().out
    assert command.startswith("--tool memcheck ")
    assert "-m gpu -p tests.gpu.no_pool" in command
    assert command.rstrip().endswith("tests/gpu/test_step.py")


def profile(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """bench/profile.sh where only `tmp_path` and the shell's own tools are on the PATH."""
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "python", "OUT": "out"}
    return subprocess.run(
        ["bash", str(ROOT / "bench" / "profile.sh"), *args],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("mode", "tool", "words"),
    [
        ("graphs", "nsys", "profile --trace=cuda,nvtx --cuda-graph-trace=node"),
        ("ranges", "nsys", "--device cuda --nvtx --shape seed-67b"),
        ("ncu", "ncu", "--nvtx --nvtx-include step/"),
    ],
)
def test_profile(mode: str, tool: str, words: str, tmp_path: Path) -> None:
    program(tmp_path, tool, 'echo "$0 $@"')
    done = profile(tmp_path, mode, "--shape", "seed-67b")
    assert done.returncode == 0
    command, *_ = done.stdout.splitlines()
    assert words in command
    assert "python -m npmoe bench --device cuda" in command
    assert command.endswith("--shape seed-67b")
    assert ("--nvtx" in command.split("npmoe bench")[1]) == (mode != "graphs")


def test_profile_without_nsys(tmp_path: Path) -> None:
    done = profile(tmp_path, "graphs", "--shape", "seed-67b")
    assert done.returncode == 1
    assert "nsys is not on the PATH" in done.stderr
    assert "ncu is there" not in done.stderr
    program(tmp_path, "ncu", "true")
    done = profile(tmp_path, "ranges", "--shape", "seed-67b")
    assert done.returncode == 1
    assert "profile.sh ncu --shape seed-67b" in done.stderr


@pytest.mark.parametrize("args", [(), ("everything",)])
def test_profile_says_how_it_is_used(args: tuple[str, ...], tmp_path: Path) -> None:
    done = profile(tmp_path, *args)
    assert done.returncode == 2
    assert "bench/profile.sh graphs" in done.stderr
