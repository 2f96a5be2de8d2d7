"""Caches with windows of high precision: whatever happens to a sequence, its tokens stay."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import npmoe
import npmoe.llm
from npmoe import KVCacheConfig, KVWindows
from npmoe.models.cache import sequence_bytes
from tests.engine.test_pipeline import (
    check_forward_beside_a_request,
    check_unforeseen_ends,
    late_or_not,
    same,
)
from tests.llm_fixtures import GOLDEN, load, load_self_decoding, write_text_model
from tests.test_llm import PROMPTS, check_idle, greedy, seeded

PLUS = KVCacheConfig("fp4", "fp4", rotated=True, windows=KVWindows(first=3, recent=6))
PAGE_BYTES = 4 * 2 * 2 * (16 + 2)  # 4 tokens of 2 layers: K and V, a head of 32 in fp4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text"))


def load_plus(folder: Path, **options: Any) -> npmoe.LLM:
    return load(folder, **({"kv_cache": PLUS, "prefill_chunk": 7} | options))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[npmoe.LLM]:
    with load_plus(folder) as llm:
        yield llm
        check_all_free(llm)


def check_all_free(llm: npmoe.LLM) -> None:
    check_idle(llm)
    assert llm.engine.scheduler.slots.num_free == llm.engine.scheduler.max_num_seqs + 1


def computed(llm: npmoe.LLM, prompt: list[int], count: int) -> tuple[list[int], int]:
    """Tokens of a completion, and how many tokens were put into the model for it."""
    taken, run = 0, llm.engine.runner.run

    def counted(works: list, wants_all: list) -> list:
        nonlocal taken
        taken += sum(work.count for work in works)
        return run(works, wants_all)

    with patch.object(llm.engine.runner, "run", counted):
        return llm.generate(prompt, greedy(count)).token_ids, taken


def test_windows_that_reach_everything_are_a_bf16_cache(folder: Path) -> None:
    everything = KVCacheConfig("fp4", "int4", windows=KVWindows(0, 128))
    with (
        load_plus(folder, kv_cache=everything) as windows,
        load_plus(folder, kv_cache="bf16") as bf16,
    ):
        for prompt in PROMPTS:
            np.testing.assert_array_equal(windows.forward(prompt), bf16.forward(prompt))


def test_they_are_neither_the_one_cache_nor_the_other(llm: npmoe.LLM, folder: Path) -> None:
    """Until a query is 9 tokens away from some key it reads copies only."""
    logits = llm.forward(PROMPTS[3])
    for other, first, last in (("bf16:rotated", 0, 9), ("fp4:rotated", 9, 40)):
        with load_plus(folder, kv_cache=other) as plain:
            equal = (plain.forward(PROMPTS[3]) == logits).all(axis=1)
            assert equal[first:last].all() == (other == "bf16:rotated")
            assert not equal[9:].any()


@pytest.mark.parametrize(
    "options", [{}, {"max_num_seqs": 2}, {"prefill_chunk": 1}, {"prefill_chunk": 50}], ids=str
)
def test_a_list_equals_each_alone(llm: npmoe.LLM, folder: Path, options: dict[str, int]) -> None:
    alone = [llm.generate(p, seeded(12)).token_ids for p in PROMPTS]
    with load_plus(folder, **options) as other:
        for _ in range(2):
            assert [c.token_ids for c in other.generate(PROMPTS, seeded(12))] == alone
        check_all_free(other)


def test_a_conversation_goes_on_where_it_was(folder: Path) -> None:
    # 40 + 12 tokens, the last of which is not computed: 12 pages of 4 and three tokens.
    prompt = PROMPTS[3]
    with load_plus(folder) as llm:
        first, taken = computed(llm, prompt, 12)
        assert taken == 40 + 11
        longer = [*prompt, *first, 5, 6, 7]
        want = load_plus(folder).generate(longer, greedy(5)).token_ids
        assert computed(llm, longer, 5) == (want, len(longer) - 48 + 4)
        # The ring holds 7 tokens more than a window: 20 tokens are too far behind.
        assert computed(llm, [*prompt[:20], 5], 1)[1] == 21
        check_all_free(llm)


def test_forks_take_the_copies_along(llm: npmoe.LLM, folder: Path) -> None:
    together = llm.generate(PROMPTS[2], seeded(12, n=4))
    assert len({tuple(c.token_ids) for c in together.choices}) == 4
    with load_plus(folder, max_num_seqs=1) as narrow:  # no room to fork: each is computed anew
        same([narrow.generate(PROMPTS[2], seeded(12, n=4))], [together])
        check_all_free(narrow)


def test_preemption_changes_nothing(
    llm: npmoe.LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [llm.generate(p, seeded(20)).token_ids for p in PROMPTS]
    copies = 17 * sequence_bytes(llm.spec, PLUS, 7)
    monkeypatch.setattr(npmoe.llm, "free_memory", lambda device: int(copies + 17 * PAGE_BYTES))
    with load_plus(folder, memory_fraction=1.0, max_seq_len=64) as tight:
        assert tight.engine.scheduler.allocator.num_pages == 17
        scheduler = tight.engine.scheduler
        with patch.object(scheduler, "preempt", side_effect=scheduler.preempt) as preempt:
            assert [c.token_ids for c in tight.generate(PROMPTS, seeded(20))] == alone
        assert preempt.called
        check_all_free(tight)


def test_forward_beside_running_sequences(llm: npmoe.LLM) -> None:
    check_forward_beside_a_request(llm)


@late_or_not
def test_a_token_after_the_end_is_discarded(llm: npmoe.LLM, folder: Path, late: bool) -> None:
    with load_self_decoding(folder, late, max_num_seqs=3, kv_cache=PLUS, prefill_chunk=7) as ahead:
        check_unforeseen_ends(llm, ahead, range(0, 300, 7))
        check_all_free(ahead)


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss", "qwen3_moe_window"])
def test_beside_states_sinks_and_sliding_windows(name: str) -> None:
    """Windows that reach everything are a bf16 cache there, too."""
    everything = KVCacheConfig("fp32", "fp32", windows=KVWindows(0, 60))
    prompts = [[t % 100 for t in p] for p in PROMPTS]
    with (
        load(GOLDEN / name, kv_cache=everything) as windows,
        load(GOLDEN / name, kv_cache="bf16") as bf16,
    ):
        want = [c.token_ids for c in bf16.generate(prompts, greedy())]
        for _ in range(2):
            assert [c.token_ids for c in windows.generate(prompts, greedy())] == want
        check_all_free(windows)


def test_the_cache_has_as_many_bytes_as_were_counted(folder: Path) -> None:
    with load_plus(folder, max_num_seqs=3) as llm:
        # Two layers of a head of 32 in bf16: 256 bytes a token; 3 + 6 + 7 tokens have copies.
        assert sequence_bytes(llm.spec, PLUS, 7) == 16 * 256
        pages = llm.engine.scheduler.allocator.num_pages
        assert llm.engine.runner.cache.nbytes == 4 * 16 * 256 + pages * PAGE_BYTES
