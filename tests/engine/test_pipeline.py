"""The host one step behind a model that decodes by itself: everything comes out as without it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npmoe
import npmoe.llm
from npmoe import SamplingParams
from npmoe.engine.output import Completion
from tests.engine.self_decoding import SelfDecoding
from tests.llm_fixtures import EOS, LONGROPE, MOE, load, load_self_decoding, write_text_model
from tests.test_llm import PROMPTS, check_idle, force, greedy, memory_for, seeded

TEXT_PROMPTS = ["The router sends", "A mixture", "Numbers", "Which experts?", "a", "The router"]
late_or_not = pytest.mark.parametrize("late", [True, False], ids=["late", "early"])


def model_of(llm: npmoe.LLM) -> SelfDecoding:
    model = llm.engine.runner.model
    assert isinstance(model, SelfDecoding)
    return model


def same(got: list[Completion], want: list[Completion]) -> None:
    for a, b in zip(got, want, strict=True):
        for x, y in zip(a.choices, b.choices, strict=True):
            assert (x.token_ids, x.text, x.finish_reason) == (y.token_ids, y.text, y.finish_reason)
            for p, q in zip(x.logprobs or [], y.logprobs or [], strict=True):
                assert (p.token_id, list(p.top)) == (q.token_id, list(q.top))
                assert p.logprob == pytest.approx(q.logprob, abs=1e-4)


def check_forward_beside_a_request(llm: npmoe.LLM) -> None:
    """Logits of one prompt while another is generated change neither."""
    want = llm.generate(PROMPTS[2], greedy(8)).token_ids
    logits = llm.forward(PROMPTS[3])
    request = llm.engine.add(PROMPTS[2], greedy(8).resolve({}))
    while not request.done:
        np.testing.assert_array_equal(llm.forward(PROMPTS[3]), logits)
        llm.engine.step()
    assert llm.engine.completion(request).token_ids == want


def check_unforeseen_ends(llm: npmoe.LLM, ahead: npmoe.LLM, stop_token_ids: range) -> None:
    """Completions end at different lengths by stop tokens: a step more of `ahead` has begun each
    time, and their slots go to the prompts that wait."""
    params = seeded(30, stop_token_ids=list(stop_token_ids))
    prompts = PROMPTS + PROMPTS[::-1]
    want = llm.generate(prompts, params)
    assert len({len(c.token_ids) for c in want}) > 2
    for _ in range(2):
        same(ahead.generate(prompts, params), want)


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def plain(text_folder: Path) -> npmoe.LLM:
    """Samples on the host."""
    return load(text_folder)


@pytest.fixture(scope="module", params=[True, False], ids=["late", "early"])
def ahead(text_folder: Path, request: pytest.FixtureRequest) -> Iterator[npmoe.LLM]:
    with load_self_decoding(text_folder, request.param) as llm:
        yield llm
        check_idle(llm)


PARAMS: dict[str, SamplingParams] = {
    "greedy": greedy(20),
    "seeded": seeded(20),
    "top-p": greedy(20, top_p=0.7, temperature=0.8, seed=3),
    "penalties": seeded(20, repetition_penalty=1.3, presence_penalty=1.0, frequency_penalty=0.5),
    "bias": seeded(9, logit_bias={5: 4.0, 9: -100.0}),
    "logprobs": seeded(9, logprobs=3),
    "prompt logprobs": seeded(9, logprobs=0, prompt_logprobs=2),
    "n": seeded(12, n=3, top_k=20),
    "min_tokens": seeded(9, ignore_eos=False, logit_bias={EOS: 8.0}, min_tokens=4),
    "stop token": seeded(30, stop_token_ids=list(range(0, 300, 7))),
    "stop string": greedy(30, stop=["e", "st", "no"]),
    "one token": seeded(1),
    "two tokens": seeded(2),
    "endless": seeded(1000),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_one_prompt_and_several(plain: npmoe.LLM, ahead: npmoe.LLM, params: SamplingParams) -> None:
    same([ahead.generate(TEXT_PROMPTS[0], params)], [plain.generate(TEXT_PROMPTS[0], params)])
    for prompts in (TEXT_PROMPTS[:3], TEXT_PROMPTS):  # more than the model decodes at once, too
        same(ahead.generate(prompts, params), plain.generate(prompts, params))
    check_idle(ahead)


@late_or_not
@pytest.mark.parametrize(
    "options",
    [{"max_num_seqs": 2}, {"prefill_chunk": 1}, {"prefill_chunk": 7}, {"page_size": 5}],
    ids=str,
)
def test_any_schedule(late: bool, options: dict[str, int]) -> None:
    with load(MOE) as llm:
        want = llm.generate(PROMPTS, seeded(12))
    with load_self_decoding(MOE, late, **options) as llm:
        same(llm.generate(PROMPTS, seeded(12)), want)
        same(llm.generate(PROMPTS, seeded(12)), want)  # from cached pages
        check_idle(llm)


@late_or_not
def test_preemption(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(MOE) as llm:
        want = llm.generate(PROMPTS, seeded(20))
    monkeypatch.setattr(npmoe.llm, "free_memory", memory_for(17))
    with load_self_decoding(MOE, late, memory_fraction=1.0, max_seq_len=64) as tight:
        preempted = []
        preempt = tight.engine.scheduler.preempt
        tight.engine.scheduler.preempt = lambda s: (preempted.append(s), preempt(s))  # type: ignore
        same(tight.generate(PROMPTS, seeded(20)), want)
        assert preempted
        check_idle(tight)


def test_one_step_ahead_and_no_more(ahead: npmoe.LLM) -> None:
    """20 tokens: the first comes with the prompt; the end is known beforehand."""
    model = model_of(ahead)
    before, model.most_in_flight = model.num_steps, 0
    ahead.generate(TEXT_PROMPTS[0], greedy(20))
    assert model.num_steps - before == 19
    assert model.most_in_flight == 2


def test_one_token_after_a_stop_is_discarded(ahead: npmoe.LLM) -> None:
    model = model_of(ahead)
    before = model.num_steps
    params = SamplingParams(
        temperature=0, logit_bias=force(EOS), min_tokens=5, repetition_penalty=1, max_tokens=20
    )
    assert len(ahead.generate(TEXT_PROMPTS[0], params).token_ids) == 6
    model.synchronize()
    assert model.num_steps - before == 6  # the fifth gave the end; a sixth had begun
    check_idle(ahead)


@late_or_not
def test_no_page_beyond_the_context(late: bool) -> None:
    with load_self_decoding(MOE, late, max_seq_len=24) as llm, load(MOE, max_seq_len=24) as plain:
        for prompt in (PROMPTS[2], [5] * 23, [5] * 22, [5] * 21):
            same([llm.generate(prompt, greedy(99))], [plain.generate(prompt, greedy(99))])
            check_idle(llm)


def test_a_token_is_delivered_at_every_step(ahead: npmoe.LLM) -> None:
    engine = ahead.engine
    request = engine.add(PROMPTS[2], greedy(9).resolve({}))
    for count in range(1, 10):
        engine.step()
        assert len(request.sequences[0].output_ids) == count
    assert request.done
    check_idle(ahead)


def test_streaming(plain: npmoe.LLM, ahead: npmoe.LLM) -> None:
    want = list(plain.stream(TEXT_PROMPTS[0], seeded(30)))
    assert list(ahead.stream(TEXT_PROMPTS[0], seeded(30))) == want


def test_a_request_joins_while_another_is_decoded(plain: npmoe.LLM, ahead: npmoe.LLM) -> None:
    stream = ahead.stream(TEXT_PROMPTS[0], seeded(30))
    pieces = [next(stream) for _ in range(3)]
    assert ahead.engine.runner.pipeline.in_flight == 1
    others = [TEXT_PROMPTS[1], TEXT_PROMPTS[2]]
    same(ahead.generate(others, seeded(8)), plain.generate(others, seeded(8)))
    assert "".join([*pieces, *stream]) == plain.generate(TEXT_PROMPTS[0], seeded(30)).text


def test_a_newcomer_waits_for_the_step_in_flight_only(ahead: npmoe.LLM) -> None:
    engine = ahead.engine
    first = engine.add(PROMPTS[2], greedy(60).resolve({}))
    for _ in range(4):
        engine.step()
    second = engine.add(PROMPTS[0], greedy(2).resolve({}))
    engine.step()
    engine.step()
    assert len(second.sequences[0].output_ids) == 1
    for request in (first, second):
        engine.abort(request)
    check_idle(ahead)


def test_leaving_while_a_step_is_in_flight(plain: npmoe.LLM, ahead: npmoe.LLM) -> None:
    """Its pages go to others at once; the step that still writes to one of them does no harm."""
    left, stays = (ahead.stream(p, seeded(30)) for p in TEXT_PROMPTS[:2])
    pieces = [next(stays), next(stays)]
    next(left), next(left)
    assert ahead.engine.runner.pipeline.in_flight == 1
    left.close()
    same(ahead.generate(TEXT_PROMPTS[2:], seeded(9)), plain.generate(TEXT_PROMPTS[2:], seeded(9)))
    assert "".join([*pieces, *stays]) == plain.generate(TEXT_PROMPTS[1], seeded(30)).text
    alone = ahead.stream(TEXT_PROMPTS[0], seeded(30))
    next(alone), next(alone)
    alone.close()
    check_idle(ahead)
    same([ahead.generate("a", greedy(5))], [plain.generate("a", greedy(5))])


def test_logits_while_a_step_is_in_flight(plain: npmoe.LLM, ahead: npmoe.LLM) -> None:
    stream = ahead.stream(TEXT_PROMPTS[0], seeded(30))
    pieces = [next(stream) for _ in range(3)]
    ids = list(range(5, 60))
    np.testing.assert_allclose(ahead.forward(ids), plain.forward(ids), atol=1e-4)
    assert "".join([*pieces, *stream]) == plain.generate(TEXT_PROMPTS[0], seeded(30)).text


def test_closing_while_a_step_is_in_flight(text_folder: Path) -> None:
    llm = load_self_decoding(text_folder, late=True)
    stream = llm.stream(TEXT_PROMPTS[0], seeded(30))
    next(stream), next(stream)
    model = model_of(llm)
    steps = model.num_steps
    llm.close()
    assert model.num_steps == steps + 1  # it ended before the cache went
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


def test_closing_when_the_device_has_failed(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting raises then, as CuPy does: model and cache go all the same."""
    llm = load_self_decoding(text_folder, late=True)
    engine = llm.engine

    def fail() -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(model_of(llm), "synchronize", fail)
    llm.close()
    assert not hasattr(engine, "runner")


@pytest.mark.parametrize("name", ["start", "enqueue", "take", "forward"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_of_the_model(
    ahead: npmoe.LLM, monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException]
) -> None:
    want = ahead.generate(TEXT_PROMPTS[:2], greedy())
    model = model_of(ahead)
    original, calls = getattr(model, name), []

    def fail(*arguments: Any) -> Any:
        calls.append(1)
        result = original(*arguments)
        if len(calls) == (1 if name in ("start", "forward") else 3):
            raise error
        return result

    monkeypatch.setattr(model, name, fail)
    waiting = ahead.stream(TEXT_PROMPTS[2], greedy())
    with pytest.raises(error):
        ahead.generate(TEXT_PROMPTS[:2], greedy())
    same(ahead.generate(TEXT_PROMPTS[:2], greedy()), want)
    list(waiting)
    check_idle(ahead)


def test_longrope_is_never_run_ahead() -> None:
    """Its keys are computed anew where the sequence gets long."""
    prompt = np.random.default_rng(1).integers(3, 128, 60).tolist()
    with load(LONGROPE) as plain, load_self_decoding(LONGROPE, late=True) as llm:
        same([llm.generate(prompt, greedy(10))], [plain.generate(prompt, greedy(10))])
        assert model_of(llm).most_in_flight == 1
