"""`npmoe bench` and profiling on a GPU: figures that can be, and the same tokens under ranges."""

import json

import pytest

import npmoe
from npmoe import cli
from npmoe.bench.kernels import kernel_times
from npmoe.bench.kv_table import TableOptions, measure_cells
from npmoe.bench.measure import BenchOptions
from npmoe.bench.subject import checkpoint
from npmoe.config import KVCacheConfig
from npmoe.llm import shipped_model

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.driver]

PROMPT = "Once upon a time there was a king"
GREEDY = npmoe.SamplingParams(temperature=0, repetition_penalty=1, max_tokens=12, ignore_eos=True)


def bench(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    assert cli.main(["bench", "--device", "cuda", "--json", "--quiet", *args]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("batch", [1, 8])
def test_the_shipped_model(batch: int, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--weights", "fp4", "--kv-cache", "fp4", "--batch", str(batch), "--check")
    record = bench(capsys, *args)
    assert record["graphs"]
    assert 100 < record["read_gbps"] < 20_000
    assert record["floor_ms"] < record["ms_per_token"] < 1000
    assert record["tokens_checked"] > 0


def test_random_weights_on_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--shape", "qwen3-30b-a3b", "--weights", "fp4", "--kv-cache", "fp4")
    record = bench(capsys, *args)
    assert record["bytes_per_token"] == pytest.approx(1.757e9, rel=0.01)
    assert record["ms_per_token"] > record["floor_ms"]


def test_ranges_change_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"device": "cuda", "kv_cache": "fp4", "progress": False, "max_seq_len": 256}
    with npmoe.LLM(**options) as plain, npmoe.LLM(nvtx=True, **options) as ranged:
        assert plain.generate(PROMPT, GREEDY).token_ids == ranged.generate(PROMPT, GREEDY).token_ids
    assert not bench(capsys, "--nvtx")["graphs"]


def test_kernels_by_themselves() -> None:
    subject = checkpoint(shipped_model())
    options = BenchOptions({"attention": "fp4"}, KVCacheConfig("fp4", "fp4"), context=300)
    times = kernel_times(subject, options)
    assert {"qkv_fp4", "attention_fp4", "gate_up_fp4", "lm_head_bf16"} <= {t.name for t in times}
    assert all(t.us > 0 and t.gbps > 0 for t in times)


def test_cells_of_the_kv_table() -> None:
    formats = tuple(map(KVCacheConfig.parse, ("bf16", "fp4")))
    options = TableOptions({"attention": "fp4"}, formats, contexts=(300,), batches=(1, 8))
    cells = list(measure_cells(checkpoint(shipped_model()), options, "cuda"))
    assert [c["batch"] for c in cells] == [1, 1, 8, 8]
    assert all(c["ms_per_token"] > 0 and c["attention_gbps"] > 0 for c in cells)
    assert cells[0]["tokens_that_fit"] < cells[1]["tokens_that_fit"]
