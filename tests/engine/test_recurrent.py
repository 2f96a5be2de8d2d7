"""Models whose layers keep recurrent states: whatever happens to a sequence, its tokens stay."""

from collections.abc import Iterator

import numpy as np
import pytest

import npmoe
import npmoe.llm
from npmoe.models.layers import CausalLM
from tests.engine.test_pipeline import (
    check_forward_beside_a_request,
    check_unforeseen_ends,
    late_or_not,
    same,
)
from tests.llm_fixtures import GOLDEN, load, load_self_decoding
from tests.test_llm import PROMPTS, check_idle, greedy, seeded

NEXT = GOLDEN / "qwen3_next"
PAGE_BYTES = 4 * 2 * 2 * 32 * 4  # 4 tokens of one layer with pages: K and V, 2 heads of 32, fp32


@pytest.fixture(scope="module")
def llm() -> Iterator[npmoe.LLM]:
    with load(NEXT) as llm:
        yield llm
        check_all_free(llm)


def check_all_free(llm: npmoe.LLM) -> None:
    check_idle(llm)
    scheduler = llm.engine.scheduler
    assert scheduler.slots.num_free == scheduler.slots.num_slots == scheduler.max_num_seqs + 1


def test_forward_equals_transformers_in_chunks(llm: npmoe.LLM) -> None:
    golden = np.load(NEXT / "golden.npz")
    with load(NEXT, prefill_chunk=23) as chunked:
        for each in (llm, chunked):
            logits = each.forward(golden["input_ids"].tolist())
            assert np.abs(logits - golden["logits"]).max() < 1e-5 * np.abs(golden["logits"]).max()


def test_the_same_prompt_again_and_one_that_goes_on(llm: npmoe.LLM) -> None:
    # Pages of 4: those of the first prompt are found by key, the state after them is not there.
    prompt = PROMPTS[2]
    first = llm.generate(prompt, greedy(12)).token_ids
    assert llm.generate(prompt, greedy(12)).token_ids == first
    longer = prompt + first[:7]
    assert llm.generate(longer, greedy(5)).token_ids == first[7:12]
    logits = llm.forward(prompt + first[:-1])
    assert logits[len(prompt) - 1 :].argmax(axis=1).tolist() == first


@pytest.mark.parametrize(
    "options", [{}, {"max_num_seqs": 2}, {"prefill_chunk": 1}, {"prefill_chunk": 7}], ids=str
)
def test_a_list_equals_each_alone(llm: npmoe.LLM, options: dict[str, int]) -> None:
    alone = [llm.generate(p, seeded(12)).token_ids for p in PROMPTS]
    with load(NEXT, **options) as other:
        assert [c.token_ids for c in other.generate(PROMPTS, seeded(12))] == alone
        check_all_free(other)


def test_forks_take_the_state_along(llm: npmoe.LLM) -> None:
    together = llm.generate(PROMPTS[2], seeded(12, n=4))
    assert len({tuple(c.token_ids) for c in together.choices}) == 4
    with load(NEXT, max_num_seqs=1) as narrow:  # no room to fork: each is computed anew
        same([narrow.generate(PROMPTS[2], seeded(12, n=4))], [together])
        check_all_free(narrow)


def test_preemption_changes_nothing(llm: npmoe.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [llm.generate(p, seeded(20)).token_ids for p in PROMPTS]
    states = 17 * llm.spec.state_bytes
    monkeypatch.setattr(npmoe.llm, "free_memory", lambda device: states + 17 * PAGE_BYTES)
    with load(NEXT, memory_fraction=1.0, max_seq_len=64) as tight:
        assert tight.engine.scheduler.allocator.num_pages == 17
        preempted = []
        preempt = tight.engine.scheduler.preempt
        tight.engine.scheduler.preempt = lambda s: (preempted.append(s), preempt(s))  # type: ignore
        assert [c.token_ids for c in tight.generate(PROMPTS, seeded(20))] == alone
        assert preempted
        check_all_free(tight)


def test_a_step_that_breaks_off_is_not_counted_twice(
    llm: npmoe.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = llm.generate(PROMPTS[2], greedy(10)).token_ids
    engine, model = llm.engine, llm.engine.runner.model
    assert isinstance(model, CausalLM)
    request = engine.add(PROMPTS[2], greedy(10).resolve({}))
    for _ in range(4):
        engine.step()
    last = model.layers[-1]

    def interrupted(*arguments: object) -> None:  # the first layer has its new state by now
        raise KeyboardInterrupt

    monkeypatch.setattr(last, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    while not request.done:
        engine.step()
    assert engine.completion(request).token_ids == want
    check_all_free(llm)


def test_an_aborted_sequences_slot_begins_anew(llm: npmoe.LLM) -> None:
    want = llm.generate(PROMPTS[3], greedy(6)).token_ids
    request = llm.engine.add(PROMPTS[2], greedy(20).resolve({}))
    for _ in range(3):
        llm.engine.step()
    slot = request.sequences[0].state_slot
    llm.engine.abort(request)
    other = llm.engine.add(PROMPTS[3], greedy(6).resolve({}))
    llm.engine.step()
    assert other.sequences[0].state_slot == slot
    while not other.done:
        llm.engine.step()
    assert llm.engine.completion(other).token_ids == want


def test_forward_beside_running_sequences(llm: npmoe.LLM) -> None:
    check_forward_beside_a_request(llm)


@late_or_not
def test_a_token_after_the_end_is_discarded_with_its_state(llm: npmoe.LLM, late: bool) -> None:
    with load_self_decoding(NEXT, late, max_num_seqs=3) as ahead:
        check_unforeseen_ends(llm, ahead, range(0, 128, 5))
        check_all_free(ahead)
