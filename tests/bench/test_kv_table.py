"""The table of KV cache formats: its numbers on the CPU, on a GPU whose kernels g++ built, and the
words of what is refused."""

import json
import runpy
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from npmoe.bench import kv_plot, kv_table, subject
from npmoe.bench.kv_plot import NoPlot, context_label, lines_of, write_plot
from npmoe.bench.kv_report import batch_table, markdown, row_names
from npmoe.bench.kv_table import TableOptions, does_not_fit, measure_cells
from npmoe.bench.subject import named_shape
from npmoe.config import KVCacheConfig, parse_weights
from npmoe.errors import OutOfMemory
from tests.cuda.fake_gpu import FakeGPU

ROOT = Path(__file__).parents[2]
BF16, FP4 = 2 * 2 * 64 * 2, 2 * 2 * (64 // 2 + 2 * 2)
"""Bytes of a token of the tiny shape: two layers, K and V of one head of 64; in fp4 half a byte an
element, and a scale of two bytes for each 32."""
ARGS = ("--shape", "tiny", "--page-size", "16", "--quiet")
SIZES = ("--context", "40", "70", "--batch", "1", "2")


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["kv_table.py", *map(str, args)])
    runpy.run_path(str(ROOT / "bench" / "kv_table.py"), run_name="__main__")


def options(*kv: str, **changes: Any) -> TableOptions:
    """One context of 40 tokens, one sequence, pages of 16, unless changed."""
    caches = tuple(map(KVCacheConfig.parse, kv))
    given: dict[str, Any] = {"contexts": (40,), "batches": (1,), "page_size": 16}
    return TableOptions(parse_weights("fp4"), caches, **(given | changes))


def cells(device: str, *kv: str, **changes: Any) -> list[dict[str, Any]]:
    """Of the tiny shape."""
    return list(measure_cells(named_shape("tiny"), options(*kv, **changes), device))


def free(num_bytes: int) -> Callable[[str], int]:
    return lambda device: num_bytes


def test_json_and_table_of_the_cpu(
    tiny_shape: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts of 40 and 70 tokens take 3 and 5 pages of 16 tokens of each sequence."""
    with patch.object(kv_table, "free_memory", free(10_000_000)):
        given = (*ARGS, *SIZES, "--kv-cache", "bf16", "fp4", "--device", "cpu", "--commit", "abc")
        run(monkeypatch, *given, "--out", tmp_path)
    (path,) = tmp_path.glob("kv-table-*.json")
    records = json.loads(path.read_text())
    combinations = [(r["batch"], r["kv"], r["context"]) for r in records]
    assert combinations == [(b, kv, c) for b in (1, 2) for kv in ("bf16", "fp4") for c in (40, 70)]
    for r in records:
        token, pages = {"bf16": BF16, "fp4": FP4}[r["kv"]], {40: 3, 70: 5}[r["context"]]
        assert round(1e9 * r["kv_gb"]) == r["batch"] * pages * 16 * token
        assert r["tokens_that_fit"] == {"bf16": 19_531, "fp4": 69_444}[r["kv"]]  # 10 MB / token
        assert r["attention_gbps"] is None
        assert r["ms_per_token"] > 0
        assert (r["shape"], r["weights"], r["commit"]) == ("tiny", "fp4", "abc")
        assert {"versions", "date", "machine", "floor_ms", "read_gbps"} <= r.keys()
    page = path.with_suffix(".md").read_text()
    assert "commit abc" in page
    rows = [line for line in page.splitlines() if line.startswith(("| KV", "| bf16", "| fp4"))]
    assert rows[0] == rows[3] == "| KV cache | tokens that fit | 40 tokens | 70 tokens |"
    assert rows[1].startswith("| bf16 | 19,531 | ")
    assert "), 24.6 kB | " in rows[1]  # 48 tokens of 512 bytes
    assert rows[5].endswith("), 23 kB |")  # fp4, two sequences, 160 tokens of 144 bytes


def test_attention_on_a_gpu(gpu: FakeGPU) -> None:
    """There a launch takes a millisecond, of which a step of two layers has 14."""
    both = cells("cuda", "bf16", "fp4", batches=(1, 2))
    assert [(r["batch"], r["kv"]) for r in both] == [
        *((1, "bf16"), (1, "fp4")),
        *((2, "bf16"), (2, "fp4")),
    ]
    for r in both:
        token = {"bf16": BF16, "fp4": FP4}[r["kv"]]
        assert round(1e9 * r["kv_gb"]) == r["batch"] * 48 * token
        assert r["tokens_that_fit"] == (1 << 30) // token
    assert [r["ms_per_token"] for r in both[:2]] == [14, 14]
    assert {name for name in gpu.launched if "attention" in name} == {
        "attention_bf16",
        "attention_fp4",
    }


def test_the_rate_of_attention(gpu: FakeGPU) -> None:
    """1,000 tokens of 512 bytes in both layers by two launches of a millisecond: 0.256 GB/s."""
    (record,) = cells("cuda", "bf16", contexts=(1000,))
    assert record["attention_gbps"] == 0.3  # one digit
    with patch.object(kv_table, "attention_bytes", lambda cache, traffic: 5e9):  # and 5 GB
        (record,) = cells("cuda", "bf16")
    assert record["attention_gbps"] == 2500


def test_a_format_and_a_batch_that_a_gpu_has_not(gpu: FakeGPU) -> None:
    found = cells("cuda", "bf16", "fp32", batches=(1, 3))
    measured, fp32, batch, other = found
    assert "refused" not in measured
    assert fp32["refused"].startswith("kv_cache fp32 has no GPU kernel; use one of bf16, fp4")
    assert "tokens_that_fit" not in fp32
    assert batch["refused"] == "no CUDA graph takes a batch of 3; those are 1, 2, 4, 8"
    assert batch["tokens_that_fit"] == (1 << 30) // BF16
    assert other["refused"] == fp32["refused"]
    one, three = (batch_table([r for r in found if r["batch"] == b]) for b in (1, 3))
    assert one[3] == "| fp32 | - | refused, note 1 |"
    assert one[-1] == f"1. {fp32['refused']}"
    assert three[2:4] == [
        "| bf16 | 2,097,152 | refused, note 1 |",
        "| fp32 | - | refused, note 2 |",
    ]
    assert three[-2:] == [f"1. {batch['refused']}", f"2. {fp32['refused']}"]


def test_a_cache_that_does_not_fit(tiny_shape: None) -> None:
    """A sequence of 40 tokens has 48 in pages: 24,576 bytes in bf16, 6,912 in fp4."""
    with patch.object(kv_table, "free_memory", free(20_000)):
        refused, fitting = cells("cpu", "bf16", "fp4")
    assert refused["refused"] == "needs 24.6 kB of KV cache; 20 kB are free"
    assert refused["needs_gb"] == 24_576e-9
    assert refused["tokens_that_fit"] == 39
    assert "ms_per_token" not in refused
    assert "refused" not in fitting
    assert batch_table([refused])[-1] == "| bf16 | 39 | needs 24.6 kB |"


def test_gigabytes_that_are_missing() -> None:
    """seed-67b: 32 layers, K and V of 8 heads of 128, 2 bytes; 32 sequences of 131,072 tokens."""
    needed = 32 * 2 * 8 * 128 * 2 * 131_072 * 32
    found = does_not_fit(needed, 512e6, 98.5e9)
    words = "needs 550 GB of KV cache and 512 MB to work in; 98.5 GB are free"
    assert found == {"refused": words, "needs_gb": needed / 1e9}


def test_memory_that_runs_out_while_measuring(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator may refuse what the driver reported free; the next cell is measured."""
    make, calls = kv_table.GpuSetup.with_pages, []

    def fails_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise OutOfMemory("the GPU's memory is used up")
        return make(*args)

    monkeypatch.setattr(kv_table.GpuSetup, "with_pages", fails_once)
    refused, measured = cells("cuda", "bf16", "fp4")
    words = "needs 24.6 kB of KV cache and more to work in: the GPU's memory is used up"
    assert refused["refused"] == words
    assert measured["ms_per_token"] == 14


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"contexts": (40, 1025)}, "context = 1025: legal values are 1 to 1024"),
        ({"batches": (1, 0)}, "batch = 0: legal values are >= 1"),
        ({"batches": ()}, "batches: expected at least one"),
        ({"page_size": 0}, "page_size = 0"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], words: str, tiny_shape: None) -> None:
    with pytest.raises(ValueError, match=words):
        cells("cpu", "bf16", **changes)


def test_weights_that_do_not_fit(tiny_shape: None) -> None:
    with (
        patch.object(subject, "free_memory", free(1000)),
        pytest.raises(OutOfMemory, match="of weights"),
    ):
        cells("cpu", "bf16")


def record(kv: str, batch: int, context: int, **rest: Any) -> dict[str, Any]:
    """As on a GPU; 2.174 ms unless refused."""
    measured = {"ms_per_token": 2.174, "floor_ms": 1.52, "kv_gb": 1.208, "attention_gbps": 3401.2}
    return {
        **{"shape": "seed-67b", "device": "cuda", "weights": "fp4", "kv": kv, "batch": batch},
        **{"context": context, "page_size": 32, "read_gbps": 4490.8, "tokens_that_fit": 2_675_000},
        **(rest or measured),
        **{"gpu": "NVIDIA H200", "driver": "580.159.04", "versions": {"npmoe": "0.1.0"}},
        **{"commit": "5e37916", "date": "2026-12-01"},
    }


def test_markdown() -> None:
    refused = record("fp4", 8, 131_072, refused="needs ...", needs_gb=549.8)
    page = markdown([record("fp4", 1, 32_768), record("fp4", 1, 131_072), refused])
    lines = page.splitlines()
    assert lines[0] == "# seed-67b: formats of the KV cache"
    where = "NVIDIA H200, driver 580.159.04, npmoe 0.1.0, commit 5e37916, 2026-12-01"
    assert lines[2] == where
    assert lines[4].startswith("Weights fp4, pages of 32 tokens; read bandwidth 4,491 GB/s")
    cell = "2.17 ms (floor 1.52), 1.21 GB, 3.40 TB/s"
    assert lines[6:11] == [
        "## Batch 1",
        "",
        "| KV cache | tokens that fit | 32,768 tokens | 131,072 tokens |",
        "| --- | --- | --- | --- |",
        f"| fp4 | 2,675,000 | {cell} | {cell} |",
    ]
    assert lines[12:] == [
        "## Batch 8",
        "",
        "| KV cache | tokens that fit | 131,072 tokens |",
        "| --- | --- | --- |",
        "| fp4 | 2,675,000 | needs 550 GB |",
    ]


def test_groups_of_two_sizes_are_two_rows(tiny_shape: None) -> None:
    """A token is 128 bytes of codes, and 8 scales of two bytes for groups of 32, 4 for those of
    64; 100,000 bytes are free."""
    kv_caches = tuple(KVCacheConfig("fp4", "fp4", size) for size in (32, 64))
    with patch.object(kv_table, "free_memory", free(100_000)):
        given = TableOptions({}, kv_caches, contexts=(40, 70), batches=(1,), page_size=16)
        found = list(measure_cells(named_shape("tiny"), given, "cpu"))
    assert [(r["kv"], r["kv_group_size"]) for r in found] == [("fp4", s) for s in (32, 32, 64, 64)]
    rows = [line.split(" | ")[:2] for line in batch_table(found)[2:]]
    assert rows == [["| fp4 in groups of 32", "694"], ["| fp4 in groups of 64", "735"]]
    assert list(lines_of(found)[1]) == ["fp4 in groups of 32", "fp4 in groups of 64"]


def test_names_of_rows() -> None:
    """Records without a number have groups of 32."""
    wide, same = {"kv_group_size": 64}, {"kv_group_size": 32}
    one = record("fp4", 1, 1024)
    assert row_names([one, one | same, record("int8", 1, 1024) | wide]) == [
        *("fp4", "fp4", "int8 in groups of 64"),
    ]
    assert row_names([one, one | wide]) == ["fp4 in groups of 32", "fp4 in groups of 64"]


def test_cells_lie_below_their_contexts() -> None:
    """Whatever their order; one that is missing is left out."""
    refused = {c: record("fp4", 1, c, refused="no", needs_gb=c / 1e3) for c in (1000, 2000, 3000)}
    other = record("int8", 1, 3000, refused="no", needs_gb=9.0)
    lines = batch_table([refused[3000], refused[1000], refused[2000], other])
    assert lines[0] == "| KV cache | tokens that fit | 1,000 tokens | 2,000 tokens | 3,000 tokens |"
    assert lines[2:] == [
        "| fp4 | 2,675,000 | needs 1 GB | needs 2 GB | needs 3 GB |",
        "| int8 | 2,675,000 | - | - | needs 9 GB |",
    ]


def test_the_table_in_the_repository_is_that_of_its_records() -> None:
    path = ROOT / "bench" / "results" / "kv-table-h200.json"
    assert markdown(json.loads(path.read_text())) == path.with_suffix(".md").read_text()


def test_lines_leave_out_what_was_refused() -> None:
    found = lines_of(
        [record("bf16", 1, 1024), record("bf16", 1, 8192), record("fp4", 1, 1024, refused="no")]
    )
    assert found == {1: {"bf16": [(1024, 2.174), (8192, 2.174)]}}


def test_labels_of_contexts() -> None:
    assert list(map(context_label, (40, 1024, 10_000, 131_072))) == ["40", "1k", "10,000", "128k"]


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    write_plot([record(kv, b, c) for kv in ("bf16", "fp4") for b in (1, 8) for c in (64, 99)], path)
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    assert width > height > 300


def test_no_plot_of_no_cells(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(NoPlot, match="no cell was measured"):
        write_plot([record("int8", 1, 1024, refused="no")], tmp_path / "plot.png")


def test_redrawing_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kv-table-h200.json"
    path.write_text(json.dumps([record("bf16", 1, 1024)]))
    with patch.object(kv_plot, "find_spec", lambda name: None):
        run(monkeypatch, "--redraw", path)
    message = "no plot: matplotlib is not installed: pip install 'npmoe[bench]'\n"
    assert capsys.readouterr().err == message
    assert "## Batch 1" in (tmp_path / "kv-table-h200.md").read_text()
    assert not (tmp_path / "kv-table-h200.png").exists()
