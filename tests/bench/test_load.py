"""bench/load.py: what it writes, where, and its records."""

import json
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from npmoe.models.parameters import VECTOR
from npmoe.models.stored import open_model, read_parameter
from tests.bench.test_scripts import ROOT, run_script


@pytest.fixture
def script(tiny_shape: None) -> dict[str, Any]:
    """The names of the script."""
    return runpy.run_path(str(ROOT / "bench" / "load.py"), run_name="load")


def test_a_record_for_each_run(
    tiny_shape: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, out = tmp_path / "model", tmp_path / "load.json"
    options = ("--gigabytes", 0, "--device", "cpu", "--max-seq-len", 32, "--folder", folder)
    run_script(monkeypatch, "load.py", "tiny", *options, "--out", out, "--commit", "c")
    records = json.loads(out.read_text())
    assert [r["run"] for r in records] == [0, 1]
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for record, line in zip(records, printed, strict=True):
        assert line.items() <= record.items()
        parts = record["import_s"] + record["device_s"] + record["load_s"]
        assert record["first_token_s"] >= parts - 0.02
        assert (record["shape"], record["device"], record["commit"]) == ("tiny", "cpu", "c")
        assert record["weights_s"] is None, "the loader says it on a GPU"
        assert {"versions", "date"} <= record.keys()
    assert open_model(folder).config.num_hidden_layers == 1, "the fewest, for no bytes"


@pytest.mark.parametrize("weights", ["fp4", "bf16", "fp8", "int4_asym", "mxfp4", "nvfp4"])
def test_the_files_are_a_checkpoint(script: dict[str, Any], tmp_path: Path, weights: str) -> None:
    raw, num_bytes = script["shape_config"]("tiny", 1.0, weights)
    limit = 200_000
    script["write_checkpoint"].__globals__["SHARD_BYTES"] = limit
    script["write_checkpoint"](tmp_path, raw, weights)
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    opened = open_model(tmp_path)
    assert opened.config.num_hidden_layers == 2, "all that the shape has"
    matrices = [p for p in opened.parameters if p.part != VECTOR]
    stored = [read_parameter(opened, p) for p in matrices]
    assert sum(w.nbytes for w in stored) == num_bytes
    for p, w in zip(matrices, stored, strict=True):
        values = w.dequantize()
        assert np.isfinite(values).all(), p.name
        assert values.std() > 0, p.name


@pytest.mark.parametrize(
    ("free", "memory", "in_memory"), [(9, 9, True), (1, 9, False), (9, 1, False)]
)
def test_the_files_are_in_memory_where_they_fit(
    script: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: float,
    memory: float,
    in_memory: bool,
) -> None:
    names = script["new_folder"].__globals__
    names["MEMORY_FOLDER"] = tmp_path
    names["free_memory"] = lambda device: memory * 1e9
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free * 1e9))
    folder = script["new_folder"](2_000_000_000)
    try:
        assert (folder.parent == tmp_path) == in_memory
    finally:
        folder.rmdir()


def test_seconds_of_the_loader_and_a_program_that_fails(
    script: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    raw, _ = script["shape_config"]("tiny", 0, "fp4")
    script["write_checkpoint"](tmp_path, raw, "fp4")
    names = script["measure"].__globals__
    names["FIRST_TOKEN"] = (
        "import json, sys\n"
        "print('npmoe: 17.00 GB of weights in 1.5 s, 11.3 GB/s', file=sys.stderr)\n"
        "print('npmoe: context 32 tokens', file=sys.stderr)\n"
        "print(json.dumps({'imported': 1, 'device': 2, 'loaded': 4, 'token': 5, 'on': 'cuda'}))"
    )
    record = script["measure"](tmp_path, {})
    assert (record["weights_s"], record["device_s"], record["load_s"]) == (1.5, 1, 2)
    assert "of weights in 1.5 s" in capfd.readouterr().err
    names["FIRST_TOKEN"] = "raise SystemExit(3)"
    with pytest.raises(SystemExit, match="ended with 3"):
        script["measure"](tmp_path, {})
