"""Caches compared in step: what a position reads, and that positions stay side by side."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from npmoe.eval.distributions import score
from npmoe.eval.losses import measure_losses
from npmoe.eval.text import Window
from npmoe.formats.kv_cache import dequantize_kv_cache_fp4, quantize_kv_cache_fp4
from npmoe.llm import LLM
from npmoe.ops.attention import paged_attention, paged_attention_ref
from npmoe.ops.quantize import KVPages, write_kv_pages
from tests.cli_fixtures import make_checkpoint
from tests.helpers import make_pages

IDS = np.random.default_rng(3).integers(0, 256, 45).tolist()
CHUNK = 13


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("eval") / "tiny")


def load(folder: Path, kv_cache: str, chunk: int = CHUNK) -> LLM:
    return LLM(
        folder,
        device="cpu",
        kv_cache=kv_cache,
        prefill_chunk=chunk,
        max_num_seqs=1,
        progress=False,
    )


@pytest.fixture
def exact(folder: Path) -> Iterator[LLM]:
    with load(folder, "fp32") as llm:
        yield llm


def test_positions_read_what_the_cache_holds(
    folder: Path, exact: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An fp4 cache is an exact cache of keys and values that went through E2M1 and back, for the
    chunk at hand too; the first position, which reads itself alone, is not exempt."""
    with load(folder, "fp4") as llm:
        found = llm.forward(IDS)

    def rounded(pages: KVPages, x: np.ndarray, slots: np.ndarray, copy_slots: None) -> None:
        there = quantize_kv_cache_fp4(x.transpose(1, 0, 2)[None])
        back = dequantize_kv_cache_fp4(*there)[0].transpose(1, 0, 2)
        write_kv_pages(pages, np.ascontiguousarray(back), slots)

    plain = exact.forward(IDS)
    monkeypatch.setattr("npmoe.ops.qkv.write_kv_pages", rounded)
    np.testing.assert_allclose(found, exact.forward(IDS), rtol=1e-5, atol=1e-5)
    assert (np.abs(found - plain).max(axis=1) > 1e-3).all()


@pytest.mark.parametrize("attention", [paged_attention, paged_attention_ref])
@pytest.mark.parametrize(
    ("kv_format", "first", "second"),
    [("bf16", 0.8984375, 2.40625), ("fp4", 1.0, 2.25), ("nvfp4", 1.0, 2.25), ("mxfp4", 1.0, 2.0)],
)
def test_two_positions_by_hand(
    kv_format: str, first: float, second: float, attention: Callable[..., np.ndarray]
) -> None:
    """Values (6, 0.9) and (3, 2.4), a query of zeros, which weighs all positions alike.

    In fp4 the first is 1 * (6, 1), since 1.5 * (4, 0.5) is farther off, and the second
    0.75 * (4, 3), since 0.5 * (6, 4) is. E4M3 holds 0.75 too, E8M0 only 0.5. The second position
    reads the mean of both.
    """
    keys, values = make_pages(kv_format, 1, 1, 32), make_pages(kv_format, 1, 1, 32)
    v = np.zeros((2, 1, 32), np.float32)
    v[:, 0, :2] = [[6, 0.9], [3, 2.4]]
    slots = np.array([0, 1], np.int32)
    write_kv_pages(keys, v, slots)
    write_kv_pages(values, v, slots)
    table, ends, lengths = np.array([[0]]), np.array([0, 2]), np.array([2])
    read = attention(np.zeros_like(v), keys, values, table, ends, lengths, 1.0)
    expected = [[6, first], [4.5, (first + second) / 2]]
    np.testing.assert_allclose(read[:, 0, :2], expected, rtol=1e-6)


def test_each_cache_against_the_first(folder: Path, exact: LLM) -> None:
    """Three chunks of 13 tokens and one of 6, summed as if in one."""
    window = Window(IDS[:-1], IDS[1:])
    with exact.with_kv_cache("fp4") as rough, exact.with_kv_cache(("bf16", "int8")) as fine:
        llms = exact, rough, fine
        tallies = measure_losses(llms, [window, window], (0, 20, 44), quiet=True)
        reference, *others = (llm.forward(window.ids) for llm in llms)
    targets = np.array(window.targets)
    for logits, tally in zip((reference, *others), tallies, strict=True):
        whole = score(reference, logits, targets)
        columns = np.ones(44), whole.nats, whole.kl, whole.agrees
        halves = [[column[:20].sum(), column[20:].sum()] for column in columns]
        np.testing.assert_allclose(tally.sums.T, 2 * np.array(halves), rtol=1e-4, atol=1e-7)
    same, rough_kl, fine_kl = (tally.sums[:, 2].sum() for tally in tallies)
    assert same == 0 < fine_kl < rough_kl


def test_logits_in_chunks(exact: LLM) -> None:
    chunks = list(exact.engine.forward_chunks(IDS))
    assert [len(chunk) for chunk in chunks] == [13, 13, 13, 6]
    np.testing.assert_array_equal(np.concatenate(chunks), exact.forward(IDS))


def test_chunks_that_nobody_takes_free_their_pages(exact: LLM) -> None:
    whole = exact.forward(IDS)
    free = exact.engine.scheduler.allocator.num_free
    for _ in range(3):
        chunks = exact.engine.forward_chunks(IDS)
        next(chunks)
        chunks.close()
    assert exact.engine.scheduler.allocator.num_free == free
    np.testing.assert_array_equal(exact.forward(IDS), whole)


def test_a_cache_of_another_format(folder: Path, exact: LLM) -> None:
    """The same weights, not a copy; each has its own cache and its own end."""
    other = exact.with_kv_cache("fp4")
    assert other.engine.runner.model is exact.engine.runner.model
    assert other.engine.runner.cache.config.key_format == "fp4"
    before = exact.forward(IDS)
    with load(folder, "fp4") as fresh:
        np.testing.assert_array_equal(other.forward(IDS), fresh.forward(IDS))
    other.close()
    np.testing.assert_array_equal(exact.forward(IDS), before)
    with pytest.raises(ValueError, match="kv_cache = 'fp3'"):
        exact.with_kv_cache("fp3")
    with pytest.raises(RuntimeError, match="closed"):
        other.forward(IDS)


def test_a_bucket_may_end_inside_a_chunk(exact: LLM) -> None:
    (tally,) = measure_losses([exact], [Window(IDS[:3], IDS[1:4])], (0, 2, 256), quiet=True)
    assert tally.sums[:, 0].tolist() == [2, 1]
