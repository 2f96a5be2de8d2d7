"""`npmoe bench` on the CPU, and on a GPU whose kernels g++ built (it counts launches for time)."""

import json
import math
from pathlib import Path

import pytest

from npmoe import cli
from npmoe.bench.kernels import as_records, kernel_times, table
from npmoe.bench.measure import BenchOptions, describe_record
from npmoe.bench.subject import named_shape
from npmoe.config import KVCacheConfig, parse_weights
from npmoe.models import decode
from npmoe.models.decode import DecodeStep
from tests.bench.conftest import TINY
from tests.cli_fixtures import make_checkpoint
from tests.cuda.fake_gpu import FakeGPU, Stream
from tests.helpers import GOLDEN

FP4 = ("--weights", "fp4", "--kv-cache", "fp4")
OPS = ["embed", *(["qkv", "attention", "output", "route", "gate_up", "down"] * 2), "lm_head"]
LAUNCHES = len(OPS)
CHOICE = ("top_k_kernel", "_group_kernel")
GROUPED = (*CHOICE, *(f"{op}_fp4" for op in ("grouped_gate_up", "grouped_down", "combine")))


def bench(capsys: pytest.CaptureFixture[str], *args: object) -> dict:
    assert cli.main(["bench", "--json", "--quiet", *map(str, args)]) == 0
    return json.loads(capsys.readouterr().out)


def named(op: str, fmt: str) -> str:
    """Kernels of one format only are named after the op alone."""
    return op if op in ("embed", "route") else f"{op}_{fmt}"


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert cli.main(["bench", *map(str, args)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_a_shape_on_the_cpu(tiny_shape: None, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--shape", "tiny", "--device", "cpu", "--batch", 2, "--context", 40)
    record = bench(capsys, *args, *FP4)
    assert (record["shape"], record["device"], record["weights"]) == ("tiny", "cpu", "fp4")
    assert (record["kv"], record["batch"], record["context"]) == ("fp4", 2, 40)
    floor = 1e3 * record["bytes_per_token"] / (record["read_gbps"] * 1e9)
    assert record["floor_ms"] == pytest.approx(floor, rel=0.2)  # read_gbps is rounded
    assert 0 < record["ms_per_token"] < math.inf
    assert record["ratio"] == pytest.approx(record["ms_per_token"] / record["floor_ms"], rel=0.01)
    assert record["ms_per_token_top_p"] > 0
    assert "host_gap_pct" not in record
    assert not record["graphs"]


def test_windows_and_recurrent_states_on_the_cpu(
    tiny_shape: None, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--device", "cpu", "--batch", 2, "--context", 40)
    record = bench(capsys, "--shape", "tiny", *args, "--kv-cache", "fp4+")
    assert record["kv"] == "fp4:rotated:windows"
    assert record["ms_per_token"] > 0
    record = bench(capsys, GOLDEN / "qwen3_next", *args)
    assert record["ms_per_token"] > 0


def test_a_checkpoint_on_the_cpu(
    tiny_shape: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path / "tiny-model")
    weights = "experts=fp8,lm_head=int8"
    args = (folder, "--device", "cpu", "--weights", weights, "--context", 20)
    record = bench(capsys, *args, "--kv-cache", "fp8,fp4")
    assert record["shape"] == "tiny-model"
    expected = {"experts": "fp8", "lm_head": "int8", "attention": "bf16", "mlp": "bf16"}
    assert record["weights"] == expected
    assert record["kv"] == ["fp8", "fp4"]
    assert bench(capsys, *args, "--kv-cache", "mxfp4,nvfp4")["kv"] == ["mxfp4", "nvfp4"]
    assert cli.main(["bench", str(folder), "--device", "cpu", "--context", "20"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("tiny-model on cpu: weights bf16, KV cache bf16, batch 1, context 20\n")
    for words in ("bytes of a step", "floor", "x the floor", "step, top-p"):
        assert words in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--shape", "nine"), "legal shapes are qwen3-30b-a3b"),
        (("some/path", "--shape", "tiny"), "not both"),
        (("/no/such/folder",), "does not exist"),
        (("--shape", "tiny", "--weights", "fp3"), "'fp3'"),
        (("--shape", "tiny", "--weights", "head=fp4"), "no part 'head'"),
        (("--shape", "tiny", "--kv-cache", "fp8,fp3"), "kv_cache = 'fp3'"),
        (("--shape", "tiny", "--context", 0), "context = 0: legal values are 1 to 1024"),
        (("--shape", "tiny", "--context", 1025), "legal values are 1 to 1024"),
        (("--shape", "tiny", "--batch", 0), "batch = 0: legal values are >= 1"),
        (("--shape", "tiny", "--page-size", 0), "page_size = 0"),
        (("--shape", "tiny", "--nvtx"), "nvtx: "),
        (("--shape", "tiny", "--check"), "check: "),
        (("--device", "tpu"), "legal values are 'auto', 'cpu' and 'cuda'"),
    ],
)
def test_bad_arguments(
    args: tuple, words: str, tiny_shape: None, capsys: pytest.CaptureFixture[str]
) -> None:
    device = () if "--device" in args else ("--device", "cpu")
    assert words in refused(capsys, *args, *device)


def test_a_gpu(gpu: FakeGPU, capsys: pytest.CaptureFixture[str]) -> None:
    record = bench(capsys, "--shape", "tiny", "--context", 40, "--check", *FP4)
    assert (record["device"], record["gpu"]) == ("cuda", "NVIDIA Imagined 1")
    assert record["graphs"]
    assert record["ms_per_token"] == LAUNCHES
    assert record["host_gap_pct"] > 0
    assert record["prompt_ms"] > 0
    assert record["prompt_tokens"] == 9
    assert (record["tokens_checked"], record["tokens_near_tied"]) == (3, 0)
    assert "near-tied" not in describe_record(record)
    text = describe_record(record | {"tokens_near_tied": 1})
    assert text.endswith("near-tied        1 with the other expert of a near-tied router")
    assert record["ms_per_token_top_p"] == LAUNCHES + 1  # one to draw
    assert gpu.launched[-LAUNCHES:] == [named(op, "fp4") for op in OPS]
    assert set(gpu.ranges) == {()}


def test_a_converted_checkpoint_is_checked_in_its_formats(
    gpu: FakeGPU, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {k: v for k, v in TINY.items() if k not in ("model_type", "vocab_size")}
    stored = make_checkpoint(tmp_path / "stored", **sizes, mlp_only_layers=[])
    converted = tmp_path / "converted"
    assert cli.main(["convert", str(stored), str(converted), "--weights", "fp4", "--quiet"]) == 0
    args = (converted, "--kv-cache", "fp4", "--context", 40, "--check")
    record = bench(capsys, *args)
    assert (record["shape"], record["weights"]) == ("converted", "fp4")
    assert record["tokens_checked"] == 3
    others = {"roofline", "prepare_fp4", "sample", "store_kv_fp4", *GROUPED}
    assert (
        {"gate_up_fp4", "lm_head_fp4"}
        <= set(gpu.launched)
        <= {named(op, "fp4") for op in OPS} | others
    )


@pytest.mark.parametrize("nvtx", [(), ("--nvtx",)], ids=["graphs", "ranges"])
def test_no_step_goes_past_the_context(
    nvtx: tuple[str, ...],
    gpu: FakeGPU,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Five full pages have no room for a 41st token; making a graph runs its step, too."""
    enqueue, before = DecodeStep.enqueue, []

    def watched(step: DecodeStep) -> None:
        if Stream.current and Stream.current[-1].captured is None:  # it runs
            before.append(int(step.seq_lens.max()))
        enqueue(step)

    monkeypatch.setattr(DecodeStep, "enqueue", watched)
    bench(capsys, "--shape", "tiny", "--context", 40, "--page-size", 8, *nvtx, *FP4)
    assert max(before) == 39


def test_a_batch_of_three_has_no_graph(gpu: FakeGPU, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, "--shape", "tiny", "--batch", 3)
    assert "batch = 3: legal values are 1, 2, 4, 8" in text


def test_nvtx_ranges(gpu: FakeGPU, capsys: pytest.CaptureFixture[str]) -> None:
    record = bench(capsys, "--shape", "tiny", "--context", 40, "--nvtx", *FP4)
    assert not record["graphs"]
    assert "host_gap_pct" not in record
    layers = [i for i in range(2) for _ in range(6)]
    inner = [f"layer {i}" for i in layers]
    names = [named(op, "fp4") for op in OPS]
    ops = [("step", at, name) for at, name in zip(inner, names[1:-1], strict=True)]
    drawing = [("step", names[0]), *ops, ("step", names[-1]), ("step", "sample")]
    assert gpu.ranges[-LAUNCHES - 1 :] == drawing
    assert gpu.open_ranges == []


def test_kernels_by_themselves(gpu: FakeGPU) -> None:
    options = BenchOptions(
        parse_weights("fp4"), KVCacheConfig("fp4", "fp4"), context=40, page_size=16
    )
    times = kernel_times(named_shape("tiny"), options, bandwidth=1e9)
    assert [t.name for t in times] == [named(op, "fp4") for op in dict.fromkeys(OPS)]
    assert [t.launches for t in times] == [1, 2, 2, 2, 2, 2, 2, 1]
    assert all(t.us == 1000 for t in times)  # a millisecond a launch
    by_name = {t.name: t for t in times}
    gate_up = by_name["gate_up_fp4"]
    assert gate_up.num_bytes == 2 * 2 * 128 * 256 * 9 / 16 + 256 * 4  # two experts and the norm
    assert gate_up.percent == pytest.approx(100 * gate_up.num_bytes * 1e3 / 1e9)
    assert by_name["attention_fp4"].num_bytes == 40 * 2 * 64 * 9 / 16 + 2 * 64 * 4
    assert by_name["route"].num_bytes == 8 * 256 * 2 + 256 * 4
    assert "14.000 ms in all" in table(times, 1e9)
    with pytest.raises(ValueError, match="context = 0"):
        kernel_times(named_shape("tiny"), BenchOptions(context=0))
    assert as_records(times)[1]["kernel"] == "qkv_fp4"


def test_kernels_of_a_batch_by_themselves(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "GROUPED_BYTES", 0)
    options = BenchOptions(
        parse_weights("fp4"), KVCacheConfig("fp4", "fp4"), batch=2, context=40, page_size=16
    )
    times = kernel_times(named_shape("tiny"), options, bandwidth=1e9)
    ops = ("embed", "qkv_fp4", "attention_fp4", "output_fp4", "route", *GROUPED, "lm_head_fp4")
    assert tuple(t.name for t in times) == ops
    assert [t.launches for t in times] == [1, *[2] * 9, 1]
    by_name = {t.name: t for t in times}
    chosen = 8 * (1 - (3 / 4) ** 2)  # experts that two tokens choose, each two of eight
    down = 128 * 256 * 9 / 16
    assert by_name["grouped_down_fp4"].num_bytes == chosen * down
    assert by_name["grouped_gate_up_fp4"].num_bytes == chosen * 2 * down + 256 * 4  # and the norm
    assert by_name["combine_fp4"].num_bytes == by_name["top_k_kernel"].num_bytes == 0
