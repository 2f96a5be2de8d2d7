"""What `npmoe info` counts, against numbers worked out by hand for the tiny checkpoint."""

from pathlib import Path

import numpy as np
import pytest

from npmoe.models.convert import convert_checkpoint
from npmoe.models.loader import load_model
from npmoe.models.stored import OpenModel, open_model
from npmoe.models.summary import STORED, Memory, describe, read_bytes, summarize
from tests.cli_fixtures import make_checkpoint

# Hidden 64, 4 heads and 2 KV heads of 32, 300 tokens; layer 0 has 4 experts of 32, layer 1 an MLP.
TABLE = HEAD = 300 * 64
ATTENTION = 2 * ((4 + 2 + 2) * 32 * 64 + 64 * 4 * 32)
EXPERTS = 4 * (2 * 32 * 64 + 64 * 32)
ROUTER = 4 * 64
MLP = 3 * 96 * 64
VECTORS = 2 * (64 + 64 + 32 + 32) + 64
TOTAL = TABLE + HEAD + ATTENTION + EXPERTS + ROUTER + MLP + VECTORS


@pytest.fixture
def opened(tmp_path: Path) -> OpenModel:
    return open_model(make_checkpoint(tmp_path / "tiny"))


def test_parameters(opened: OpenModel) -> None:
    summary = summarize(opened, [])
    assert summary.parameters_total == TOTAL
    assert summary.parameters_active == TOTAL - EXPERTS // 2
    assert (summary.num_moe_layers, summary.num_layers) == (1, 2)


def test_a_tied_head_counts_once(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    summary = summarize(open_model(folder), [])
    assert summary.parameters_total == TOTAL - HEAD
    assert "lm_head" not in summary.stored_bytes
    assert summary.read_bytes[STORED] == pytest.approx(
        2 * (HEAD + 64 + ATTENTION + EXPERTS / 2 + ROUTER + MLP) + 4 * VECTORS
    )


def test_stored_bytes_are_those_of_the_files(opened: OpenModel, tmp_path: Path) -> None:
    summary = summarize(opened, [])
    assert sum(summary.stored_bytes.values()) == opened.checkpoint.nbytes
    assert summary.stored_bytes["experts"] == 2 * EXPERTS
    assert summary.formats["experts"] == "bf16"
    folder = opened.checkpoint.folder
    convert_checkpoint(folder, tmp_path / "fp4", {"experts": "fp4"}, quiet=True)
    converted = open_model(tmp_path / "fp4")
    summary = summarize(converted, [])
    assert sum(summary.stored_bytes.values()) == converted.checkpoint.nbytes
    assert summary.stored_bytes["experts"] == EXPERTS / 2 + 2 * EXPERTS / 32
    assert summary.formats["experts"] == "fp4"


def test_bytes_read_for_a_token(opened: OpenModel) -> None:
    rest = 2 * (64 + ROUTER) + 4 * VECTORS  # one row of the embedding; norms are float32
    read = summarize(opened, []).read_bytes
    matrices = HEAD + ATTENTION + EXPERTS / 2 + MLP
    assert read["bf16"] == read[STORED] == pytest.approx(2 * matrices + rest)
    assert read["fp4"] == pytest.approx(matrices * (0.5 + 2 / 32) + rest)
    rows = 300 + 2 * (256 + 64) + 2 * (2 * 32 + 64) + 2 * 96 + 64  # fp8 has a scale for each
    assert read["fp8"] == pytest.approx(matrices + 4 * rows + rest)
    assert read_bytes(opened, "fp4", cpu=True) == pytest.approx(
        matrices * (1 + 2 / 32) + 2 * 64 + 2 * ROUTER + 4 * VECTORS
    )


@pytest.mark.parametrize(("kv", "size"), [("bf16", 2), ("fp8", 1 + 2 / 32), ("fp4", 0.5 + 2 / 32)])
def test_bytes_of_a_cached_token(opened: OpenModel, kv: str, size: float) -> None:
    assert summarize(opened, []).kv_bytes[kv] == 2 * 2 * 2 * 32 * size


def test_copies_of_a_sequence(opened: OpenModel) -> None:
    """656 tokens, of 2 layers of 2 heads of 32 elements, K and V, in bf16."""
    summary = summarize(opened, [])
    assert summary.window_bytes == (16 + 128 + 512) * 2 * 2 * 2 * 32 * 2
    assert "copies for each sequence in a cache of fp4+: 336 kB" in describe(summary)


def test_formats_that_the_shapes_cannot_take_are_left_out(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "odd", moe_intermediate_size=36, head_dim=16)
    summary = summarize(open_model(folder), [Memory("1 GB", 1e9)])
    assert set(summary.read_bytes) == {STORED, "bf16", "fp8"}
    assert set(summary.kv_bytes) == {"fp32", "bf16"}
    assert summary.window_bytes == 0
    assert "fp4" not in describe(summary)


def test_what_fits(opened: OpenModel) -> None:
    memories = [Memory("small", 1000), Memory("large", 1e6), Memory("here", 1e6, cpu=True)]
    fits = {(fit.memory, fit.weights): fit for fit in summarize(opened, memories).fits}
    assert fits["small", "fp4"].kv_tokens["fp4"] < 0
    large = fits["large", "bf16"]
    # On a GPU: 128 columns for 64 and 96, rows in tiles of 16, 128 gate and up rows for 32, 128
    # rows of what adds to the hidden state.
    attention = 2 * ((4 + 2 + 2) * 32 + 128) * 128
    experts = 4 * (2 * 128 + 128) * 128
    matrices = attention + experts + (2 * 96 + 128) * 128 + 304 * 128
    assert large.weight_bytes == 2 * (matrices + 2 * (TABLE + ROUTER)) + 4 * VECTORS
    assert large.kv_tokens["bf16"] == (1_000_000 - large.weight_bytes) // 512
    here = (HEAD + ATTENTION + EXPERTS + MLP) * (1 + 2 / 32) + 2 * (TABLE + ROUTER) + 4 * VECTORS
    assert fits["here", "fp4"].weight_bytes == here


def test_weight_bytes_are_those_of_the_loaded_model(opened: OpenModel) -> None:
    """Up to the padding of rows to whole tiles of 64."""
    fits = summarize(opened, [Memory("here", 1e9, cpu=True)]).fits
    expected = {fit.weights: fit.weight_bytes for fit in fits}
    policy = dict.fromkeys(("experts", "mlp", "attention", "lm_head"), "fp4")
    assert load_model(opened, policy, "cpu", quiet=True).nbytes == pytest.approx(
        expected["fp4"], rel=0.2
    )


def test_only_headers_are_read(opened: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(np, "memmap", refuse)
    fresh = open_model(opened.checkpoint.folder)
    assert "experts: 4" in describe(summarize(fresh, [Memory("1 GB", 1e9)]))
