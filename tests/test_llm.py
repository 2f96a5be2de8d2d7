"""The LLM class on tiny checkpoints: everything a user can ask of it, and what can go wrong."""

import gc
import json
import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npmoe
import npmoe.llm
from npmoe import SamplingParams
from npmoe.engine.output import TokenLogprob
from npmoe.errors import DeviceError, OutOfMemory, PromptError, TokenizerError, UnsupportedModel
from npmoe.ops.sample import log_softmax
from tests.llm_fixtures import EOS, LONGROPE, MOE, load, load_self_decoding, write_text_model

rng = np.random.default_rng(0)
PROMPTS = [rng.integers(3, 128, n).tolist() for n in (1, 3, 17, 40, 8, 25)]
ON = {"ignore_eos": True}


@pytest.fixture(scope="module")
def moe() -> npmoe.LLM:
    """Takes token ids only."""
    return load(MOE)


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def llm(text_folder: Path) -> npmoe.LLM:
    """Has a tokenizer."""
    return load(text_folder)


def greedy(count: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": count, **ON, **options})


def seeded(count: int = 8, **options: Any) -> SamplingParams:
    return greedy(count, temperature=1.0, seed=11, **options)


def check_idle(llm: npmoe.LLM) -> None:
    """No page is in use and nothing is queued."""
    scheduler = llm.engine.scheduler
    scheduler.allocator.check_integrity([])
    assert scheduler.allocator.num_free == scheduler.allocator.num_pages
    assert not scheduler.running
    assert not scheduler.waiting
    assert not llm.engine._owner


# Generating


def test_forward_equals_transformers(moe: npmoe.LLM) -> None:
    golden = np.load(MOE / "golden.npz")
    ids = golden["input_ids"].ravel().tolist()
    logits = moe.forward(ids)
    want = golden["logits"].reshape(logits.shape)
    assert logits.dtype == np.float32
    assert np.abs(logits - want).max() < 1e-5 * np.abs(want).max()
    check_idle(moe)


def test_greedy_is_the_argmax_of_forward(moe: npmoe.LLM) -> None:
    tokens = moe.generate(PROMPTS[2], greedy()).token_ids
    logits = moe.forward(PROMPTS[2] + tokens[:-1])
    assert logits[len(PROMPTS[2]) - 1 :].argmax(axis=1).tolist() == tokens


@pytest.mark.parametrize("params", [greedy(12), seeded(12)], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_seqs": 2}, {"prefill_chunk": 1}, {"prefill_chunk": 7}, {"page_size": 5}],
    ids=str,
)
def test_a_list_equals_each_alone(
    moe: npmoe.LLM, params: SamplingParams, options: dict[str, int]
) -> None:
    alone = [moe.generate(p, params).token_ids for p in PROMPTS]
    with load(MOE, **options) as other:
        together = other.generate(PROMPTS, params)
        assert [c.token_ids for c in together] == alone
        assert [c.prompt_token_ids for c in together] == PROMPTS
        check_idle(other)


@pytest.mark.parametrize("params", [greedy(20), seeded(20)], ids=["greedy", "seeded"])
def test_preemption_changes_nothing(
    moe: npmoe.LLM, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [moe.generate(p, params).token_ids for p in PROMPTS]
    monkeypatch.setattr(npmoe.llm, "free_memory", memory_for(17))
    with load(MOE, memory_fraction=1.0, max_seq_len=64) as tight:
        preempted = []
        preempt = tight.engine.scheduler.preempt
        tight.engine.scheduler.preempt = lambda s: (preempted.append(s), preempt(s))  # type: ignore
        assert tight.engine.scheduler.allocator.num_pages == 17
        assert [c.token_ids for c in tight.generate(PROMPTS, params)] == alone
        assert preempted
        check_idle(tight)


def memory_for(pages: int) -> Callable[[str], int]:
    """free_memory that has room for so many pages of 4 tokens (3 layers, 2 heads of 16, fp32)."""
    return lambda device: pages * 4 * 3 * 2 * 2 * 16 * 4


def test_n_completions(moe: npmoe.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    both = moe.generate([PROMPTS[2], PROMPTS[3]], seeded(n=4, logprobs=1))
    for completion in both:
        assert len(completion.choices) == 4
        assert len({tuple(c.token_ids) for c in completion.choices}) == 4
        assert all(len(c.logprobs or []) == 8 for c in completion.choices)
    assert both[0].token_ids == moe.generate(PROMPTS[2], seeded()).token_ids
    again = moe.generate(PROMPTS[2], seeded(n=4))
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in both[0].choices]
    check_idle(moe)
    monkeypatch.setattr(npmoe.llm, "free_memory", memory_for(14))
    for options in ({"max_num_seqs": 2}, {}):
        with load(MOE, memory_fraction=1.0, max_seq_len=48, **options) as tight:
            few = tight.generate([PROMPTS[2], PROMPTS[3]], seeded(n=4))
            assert [c.token_ids for x in few for c in x.choices] == [
                c.token_ids for x in both for c in x.choices
            ]
            check_idle(tight)


def test_n_completions_share_the_prompt(moe: npmoe.LLM) -> None:
    engine = moe.engine
    params = seeded(n=3).resolve({})
    request = engine.add(PROMPTS[2], params)  # 17 tokens: four full pages and a part
    engine.step()
    pages = [s.pages for s in request.sequences]
    assert len(pages) == 3
    assert pages[0][:4] == pages[1][:4] == pages[2][:4]
    assert len({p[4] for p in pages}) == 3
    engine.scheduler.allocator.check_integrity(pages)
    engine.abort(request)
    check_idle(moe)


def test_a_seed_is_drawn_where_none_is_given(moe: npmoe.LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16)
    assert moe.generate([5, 6], params).token_ids != moe.generate([5, 6], params).token_ids


def test_a_known_beginning_gives_the_same(moe: npmoe.LLM) -> None:
    params = greedy(logprobs=3)
    with load(MOE) as cold:
        first = cold.generate(PROMPTS[3], params)
        second = cold.generate(PROMPTS[3], params)
        extended = cold.generate(PROMPTS[3] + first.token_ids, params)
    assert second.token_ids == first.token_ids
    with load(MOE) as cold:
        fresh = cold.generate(PROMPTS[3] + first.token_ids, params)
    assert fresh.token_ids == extended.token_ids
    for a, b in ((first, second), (fresh, extended)):
        close(a.logprobs, b.logprobs)


def close(got: list[TokenLogprob] | None, want: list[TokenLogprob] | None) -> None:
    assert got is not None
    assert want is not None
    for a, b in zip(got, want, strict=True):
        assert a.token_id == b.token_id
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_logprobs_are_those_of_forward(moe: npmoe.LLM) -> None:
    params = greedy(
        temperature=0.3, seed=11, logprobs=4, prompt_logprobs=2, logit_bias={7: 3.0}, top_k=9
    )
    for prompt in (PROMPTS[3], PROMPTS[0]):
        completion = moe.generate(prompt, params)
        rows = moe.forward(prompt + completion.token_ids)
        recorded = [*(completion.prompt_logprobs or []), *(completion.logprobs or [])]
        assert len(recorded) == len(rows)
        assert recorded[0] is None
        tokens = prompt + completion.token_ids
        for i, entry in enumerate(recorded[1:]):
            assert entry is not None
            reference = log_softmax(rows[i])
            assert entry.token_id == tokens[i + 1]
            assert entry.logprob == pytest.approx(reference[tokens[i + 1]], abs=1e-4)
            best = np.argsort(-reference, kind="stable")[: len(entry.top)].tolist()
            assert len(entry.top) == (2 if i + 1 < len(prompt) else 4)
            assert list(entry.top) == best
            assert list(entry.top.values()) == pytest.approx(reference[best], abs=1e-4)
    none = moe.generate(PROMPTS[3], seeded(logprobs=0)).logprobs
    assert none is not None
    assert none[0].top == {}
    assert moe.generate(PROMPTS[3], seeded()).logprobs is None


@pytest.mark.parametrize("chunk", [1, 6, 512])
def test_prompt_logprobs_in_chunks_and_after_a_cached_prompt(moe: npmoe.LLM, chunk: int) -> None:
    params = greedy(2, prompt_logprobs=1, n=2)
    want = moe.generate(PROMPTS[3], params).prompt_logprobs
    assert want is not None
    with load(MOE, prefill_chunk=chunk) as other:
        other.generate(PROMPTS[3], greedy())
        got = other.generate([PROMPTS[3], PROMPTS[5]], params)[0].prompt_logprobs
    assert got is not None
    assert got[0] is None
    close(got[1:], want[1:])  # type: ignore[arg-type]


def test_timings(moe: npmoe.LLM) -> None:
    t = moe.generate(PROMPTS[2], greedy(10)).timings
    assert 0 < t.time_to_first_token < t.total
    assert t.total == pytest.approx(t.time_to_first_token + 9 * t.time_per_output_token)
    assert moe.generate(PROMPTS[2], greedy(1)).timings.time_per_output_token == 0


# Where a completion ends


def force(*tokens: int) -> dict[int, float]:
    return dict.fromkeys(tokens, 100.0)


def test_logit_bias_forces_and_forbids(moe: npmoe.LLM) -> None:
    assert moe.generate([5], greedy(3, logit_bias=force(9))).token_ids == [9, 9, 9]
    free = moe.generate([5], greedy(1)).token_ids[0]
    assert moe.generate([5], greedy(1, logit_bias={free: -100.0})).token_ids[0] != free


def test_max_tokens(moe: npmoe.LLM) -> None:
    completion = moe.generate([5], greedy(3))
    assert (len(completion.token_ids), completion.finish_reason) == (3, "length")


def test_end_tokens_of_both_configs_count(text_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(text_folder, tmp_path / "m")
    # 999 is not in the vocabulary: it can never come.
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 999]}')
    with load(folder) as two:
        for end in (EOS, 7):
            done = two.generate([5], SamplingParams(logit_bias=force(end)))
            assert (done.token_ids, done.finish_reason, done.text) == ([end], "stop", "")
            more = two.generate([5], greedy(4, logit_bias=force(end)))
            assert (more.token_ids, more.finish_reason) == ([end] * 4, "length")
            late = two.generate([5], SamplingParams(logit_bias=force(end, 9), min_tokens=3))
            assert len(late.token_ids) == 4
            assert late.token_ids[-1] == end
            assert not {EOS, 7} & set(late.token_ids[:-1])


def test_stop_token_ids(moe: npmoe.LLM) -> None:
    params = greedy(logit_bias=force(9), stop_token_ids=[9])
    completion = moe.generate([5], params)
    assert (completion.token_ids, completion.finish_reason) == ([9], "stop")
    later = moe.generate([5], greedy(logit_bias=force(9), stop_token_ids=[9], min_tokens=3))
    assert len(later.token_ids) == 4
    assert later.token_ids[3] == 9


def test_stop_strings(llm: npmoe.LLM) -> None:
    free = llm.generate("The router", greedy(30))
    assert llm.tokenizer is not None
    assert free.text == llm.tokenizer.decode(
        llm.tokenizer.encode("The router") + free.token_ids
    ).removeprefix("The router")
    stop = free.text[9:12]
    cut = llm.generate("The router", greedy(30, stop=["never there", stop]))
    assert cut.text == free.text[: free.text.find(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    late = llm.generate("The router", greedy(30, stop=stop, min_tokens=30))
    assert late.text == free.text
    pieces = list(llm.stream("The router", greedy(30, stop=stop)))
    assert "".join(pieces) == cut.text
    check_idle(llm)


def test_skip_special_tokens(llm: npmoe.LLM) -> None:
    params = {"logit_bias": force(0)}
    assert llm.generate("a", greedy(2, **params)).text == ""
    shown = llm.generate("a", greedy(2, skip_special_tokens=False, **params))
    assert shown.text == "<s><s>"


def test_a_full_context_ends_with_length(moe: npmoe.LLM) -> None:
    with load(MOE, max_seq_len=21) as short:
        completion = short.generate(PROMPTS[2], greedy(100))
        assert (len(completion.token_ids), completion.finish_reason) == (4, "length")
        assert completion.token_ids == moe.generate(PROMPTS[2], greedy(4)).token_ids
        assert short.generate([5] * 20, greedy(100)).finish_reason == "length"
        with pytest.raises(PromptError, match="21 tokens, the context takes 20"):
            short.generate([5] * 21)
        assert short.forward([5] * 21).shape == (21, 128)
        check_idle(short)


def test_longrope_switches_in_mid_completion() -> None:
    """One token after the switch at 64, everything is as if computed with the long factors."""
    prompt = rng.integers(3, 128, 60).tolist()
    with load(LONGROPE) as llm:
        tokens = llm.generate(prompt, greedy(10, logprobs=0))
        assert llm.engine.scheduler.longrope_switch == 64
        for i, entry in enumerate(tokens.logprobs or []):
            rows = llm.forward(prompt + tokens.token_ids[:i])
            assert entry.logprob == pytest.approx(log_softmax(rows[-1])[entry.token_id], abs=1e-4)
        both = llm.generate([prompt, prompt[:30]], greedy(10))
        assert both[0].token_ids == tokens.token_ids
        check_idle(llm)


# Text


def test_stream_and_generate_agree(llm: npmoe.LLM) -> None:
    want = llm.generate("The router sends", seeded(40))
    stream = llm.stream("The router sends", seeded(40))
    pieces = []
    try:
        while True:
            pieces.append(next(stream))
    except StopIteration as end:
        completion = end.value
    assert "".join(pieces) == completion.text == want.text
    assert completion.token_ids == want.token_ids
    assert len(pieces) > 5
    check_idle(llm)


def test_chat(llm: npmoe.LLM) -> None:
    messages = [{"role": "user", "content": "Which experts?"}]
    completion = llm.chat(messages, greedy())
    assert llm.tokenizer is not None
    assert completion.prompt_token_ids == llm.tokenizer.apply_chat_template(messages)
    assert "".join(llm.stream_chat(messages, greedy())) == completion.text


def test_text_and_ids_may_be_mixed(llm: npmoe.LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("The router")
    mixed = llm.generate(["The router", ids, np.array(ids), tuple(ids)], greedy())
    assert len({tuple(c.token_ids) for c in mixed}) == 1
    assert llm.generate(np.array(ids), greedy()).token_ids == mixed[0].token_ids
    assert llm.generate([], greedy()) == []


# Leaving early


def test_leaving_a_stream_early_frees_its_pages(llm: npmoe.LLM) -> None:
    for piece in llm.stream("The router", greedy(40)):
        assert piece
        break
    gc.collect()
    check_idle(llm)
    stream = llm.stream("The router", greedy(40))
    next(stream)
    assert llm.engine.scheduler.running
    stream.close()
    check_idle(llm)
    del stream
    never_started = llm.stream("The router", greedy(40))
    del never_started
    check_idle(llm)


def test_a_stream_that_the_garbage_collector_closes_in_a_step(llm: npmoe.LLM) -> None:
    want = llm.generate("A mixture", greedy(12)).token_ids
    streams = [llm.stream("The router", greedy(40)) for _ in range(2)]
    for stream in streams:
        next(stream)
    complete = llm.engine.scheduler.complete

    def close_one(work: Any) -> None:
        if streams:
            streams.pop().close()
        complete(work)

    llm.engine.scheduler.complete = close_one  # type: ignore[method-assign]
    try:
        assert llm.generate("A mixture", greedy(12)).token_ids == want
    finally:
        del llm.engine.scheduler.complete
    check_idle(llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
@pytest.mark.parametrize("where", ["model", "sampling"])
def test_an_error_in_a_step_frees_pages(
    llm: npmoe.LLM, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], where: str
) -> None:
    want = [c.token_ids for c in llm.generate(["The router", "A mixture"], greedy())]
    calls = 0

    def fail_at_third(function: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise error
            return function(*args, **options)

        return call

    owner, name = (llm.engine.runner, "run") if where == "model" else (llm.engine, "_choose")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail_at_third(getattr(owner, name)))
        with pytest.raises(error):
            llm.generate(["The router", "A mixture"], greedy())
    check_idle(llm)
    assert [c.token_ids for c in llm.generate(["The router", "A mixture"], greedy())] == want


CODE = tuple(f"{n}.py" for n in ("engine", "pipeline", "scheduler", "pages", "text", "runner"))


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th line that runs in the engine or the page allocator.

    The lines that take and release the lock are left out: Python looks for signals at calls and
    loops only, not between any two lines.
    """

    def __init__(self, line: int) -> None:
        self.left, self.fired = line, False

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.endswith(CODE):
            return None
        if frame.f_code.co_name in ("_turn", "_drop_aborted"):
            return None
        # Leaving by an exception is not interrupted a second time.
        if event == "line" and not self.fired:
            self.left -= 1
            if self.left <= 0:
                self.fired = True
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> "InterruptAt":
        sys.settrace(self)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)


@pytest.mark.parametrize("late", [None, True, False], ids=["host samples", "late", "early"])
def test_an_interrupt_at_any_line_leaves_a_working_engine(late: bool | None) -> None:
    """Another request waits half done meanwhile; it must come out right, whoever interrupts."""
    prompts, params = [PROMPTS[2], PROMPTS[4]], seeded(3, n=2)
    with load(MOE) if late is None else load_self_decoding(MOE, late) as llm:
        other_params = seeded(6).resolve({})
        other_want = llm.generate(PROMPTS[5], seeded(6)).token_ids
        want = [c.token_ids for x in llm.generate(prompts, params) for c in x.choices]
        line, step, completed = 1, 7, False
        while not completed:
            other = llm.engine.add(PROMPTS[5], other_params)
            llm.engine.step()
            try:
                with InterruptAt(line) as interrupt:
                    llm.generate(prompts, params)
            except KeyboardInterrupt:
                pass
            completed = not interrupt.fired
            llm.engine.scheduler.allocator.check_integrity([s.pages for s in other.sequences])
            steps = 0
            while not other.done:
                llm.engine.step()
                steps += 1
                assert steps < 20, f"stuck after an interrupt at line {line}"
            assert other.sequences[0].output_ids == other_want
            check_idle(llm)
            line += step
        assert line > 500
        assert [c.token_ids for x in llm.generate(prompts, params) for c in x.choices] == want


# Threads


def run_threads(*functions: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_two_threads_at_once(llm: npmoe.LLM) -> None:
    want = {p: llm.generate(p, seeded(20)) for p in ("The router", "A mixture", "Numbers")}

    def generate() -> None:
        for prompt, expected in want.items():
            assert llm.generate(prompt, seeded(20)).token_ids == expected.token_ids

    def stream() -> None:
        for prompt, expected in want.items():
            pieces = []
            for piece in llm.stream(prompt, seeded(20)):
                time.sleep(0.001)  # others' steps end this request meanwhile
                pieces.append(piece)
            assert "".join(pieces) == expected.text

    def forward() -> None:
        logits = llm.forward([5, 6, 7])
        for _ in range(5):
            np.testing.assert_allclose(llm.forward([5, 6, 7]), logits, atol=1e-5)

    run_threads(generate, stream, stream, forward)
    check_idle(llm)


def test_a_stream_gives_what_other_threads_computed(llm: npmoe.LLM) -> None:
    want = llm.generate("The router", greedy(12)).text
    stream = llm.stream("The router", greedy(12))
    pieces = [next(stream)]
    llm.generate("A mixture", greedy(30))  # its steps end the stream's request too
    assert "".join([*pieces, *stream]) == want


def test_a_short_request_does_not_wait_for_a_long_one(moe: npmoe.LLM) -> None:
    """A thread that steps in a loop lets others take their turn."""
    steps: list[int] = []
    started = threading.Event()
    run = moe.engine.runner.run

    def counted(*args: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            started.set()
        return run(*args)

    def short() -> None:
        started.wait()
        moe.generate([7, 8], greedy(2))
        assert len(steps) < 150

    moe.engine.runner.run = counted  # type: ignore[method-assign]
    try:
        run_threads(lambda: moe.generate([5, 6], greedy(250)) and None, short)
    finally:
        del moe.engine.runner.run


# Closing


def test_a_closed_llm(text_folder: Path) -> None:
    with load(text_folder) as llm:
        stream = llm.stream("The router", greedy(40))
        next(stream)
    llm.close()
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate("a"),
        lambda: llm.stream("a"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: llm.stream_chat([{"role": "user", "content": "a"}]),
        lambda: llm.forward([1]),
        lambda: next(stream),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_close_waits_for_the_step_in_progress(text_folder: Path) -> None:
    llm = load(text_folder)

    def generate() -> None:
        def forever() -> None:
            while True:
                llm.generate("The router", greedy(40))

        with pytest.raises(RuntimeError, match="closed"):
            forever()

    def close() -> None:
        time.sleep(0.05)
        llm.close()

    run_threads(generate, generate, close)


# Formats


def rms_error(got: np.ndarray, want: np.ndarray) -> float:
    """Relative; a random router flips now and then, which a largest error would show."""
    return float(np.sqrt(((got - want) ** 2).mean() / (want**2).mean()))


@pytest.mark.parametrize(
    "kv_cache",
    [
        *["fp32", "bf16", "fp8", "int8", "int4", "int4_asym", "fp4", ("fp8", "fp4")],
        *["k8v4", "fp32:rotated", "int4:rotated", "fp4+"],
        *["mxfp4", "nvfp4", ("mxfp4", "bf16"), "nvfp4:rotated", "nvfp4+"],
        npmoe.KVCacheConfig("int8", "int4", group_size=16),
    ],
    ids=str,
)
def test_every_kv_format_runs(llm: npmoe.LLM, text_folder: Path, kv_cache: Any) -> None:
    exact = llm.forward(PROMPTS[3])
    with load(text_folder, kv_cache=kv_cache) as other:
        logits = other.forward(PROMPTS[3])
        assert rms_error(logits, exact) < (0.6 if "4" in str(kv_cache) else 0.15)
        alone = [other.generate(p, greedy()).token_ids for p in PROMPTS]
        assert [c.token_ids for c in other.generate(PROMPTS, greedy())] == alone
        check_idle(other)


@pytest.mark.parametrize(
    "weights",
    [
        *["native", "bf16", "fp16", "fp8", "int8", "int4", "int4_asym", "fp4", "mxfp4", "nvfp4"],
        {"experts": "fp4", "attention": "fp8"},
    ],
    ids=str,
)
def test_every_weight_format_stays_near(llm: npmoe.LLM, text_folder: Path, weights: Any) -> None:
    exact = llm.forward(PROMPTS[3])
    with load(text_folder, weights=weights) as other:
        logits = other.forward(PROMPTS[3])
        limit = 0.6 if "4" in str(weights) else 0.15
        assert rms_error(logits, exact) < (1e-6 if weights == "native" else limit)
        assert len(other.generate("The router", greedy()).token_ids) == 8


# Bad input


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        *[("", "empty"), ([[]], "empty"), (["a", ""], "empty"), ("a" * 128, "128 tokens")],
        *[([300], "300"), ([5, -1], "-1"), ([[5, "a"]], "'a'"), ([[1.5]], "1.5")],
        *[(None, "None"), (5, "5"), ({"a": 1}, "expected"), (["a", None], "None")],
        *[([np.zeros(3)], "0.0"), ({"a"}, "expected"), ("\ud800", "not UTF-8")],
    ],
    ids=ascii,
)
def test_bad_prompts(llm: npmoe.LLM, prompt: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        llm.generate(prompt)
    check_idle(llm)


def test_bad_calls(llm: npmoe.LLM) -> None:
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: llm.stream("a", SamplingParams(n=2)), "n = 2"),
        (lambda: llm.stream(""), "empty"),
        (lambda: llm.generate("a", {"temperature": 0}), "params"),  # type: ignore[arg-type]
        (lambda: llm.generate("a", SamplingParams(stop_token_ids=[300])), "stop_token_ids"),
        (lambda: llm.generate("a", SamplingParams(logit_bias={300: 1})), "logit_bias"),
        (lambda: llm.forward([]), "empty"),
        (lambda: llm.forward([300]), "300"),
        (lambda: llm.forward("abc"), "'a'"),  # type: ignore[arg-type]
        (lambda: llm.chat([]), "messages"),
        (lambda: llm.chat("hi"), "messages"),  # type: ignore[arg-type]
        (lambda: llm.chat([{"role": "user", "content": "\ud800"}]), "not UTF-8"),
    ]
    for call, message in calls:
        with pytest.raises((ValueError, TokenizerError), match=message):
            call()
    check_idle(llm)


def test_a_chat_template_that_writes_nothing(
    llm: npmoe.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llm.tokenizer is not None
    monkeypatch.setattr(llm.tokenizer, "_chat_template", "")
    with pytest.raises(PromptError, match="empty"):
        llm.chat([{"role": "user", "content": "a"}])


def test_without_a_tokenizer(moe: npmoe.LLM) -> None:
    assert moe.tokenizer is None
    assert moe.generate([5], greedy(2)).text == ""
    assert list(moe.stream([5], greedy(2))) == []
    for call in (
        lambda: moe.generate("text"),
        lambda: moe.chat([{"role": "user", "content": "a"}]),
        lambda: moe.generate([5], SamplingParams(stop="a")),
    ):
        with pytest.raises(ValueError, match="tokenizer"):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seq_len": 257}, "max_seq_len = 257.*256"),
        ({"max_seq_len": 10**12}, "max_seq_len = 1000000000000.*256"),
        ({"max_seq_len": 0}, "max_seq_len = 0"),
        ({"max_seq_len": "9"}, "max_seq_len = '9'"),
        ({"max_seq_len": 9.5}, "max_seq_len = 9.5"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"page_size": 0}, "page_size"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"memory_fraction": 0}, "memory_fraction"),
        ({"memory_fraction": "1"}, "memory_fraction"),
        ({"kv_cache": "fp5"}, "kv_cache = 'fp5'"),
        ({"weights": "fp5"}, "fp5"),
        ({"weights": {"heads": "fp4"}}, "heads"),
        ({"weights": None}, "weights = None"),
        ({"ignore_config_keys": "a_key"}, "ignore_config_keys = 'a_key'"),
        ({"ignore_config_keys": None}, "ignore_config_keys = None"),
        ({"device": "tpu"}, "device = 'tpu'"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(MOE, **options)


def test_a_context_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npmoe.llm, "free_memory", memory_for(20))
    with pytest.raises(OutOfMemory, match=r"max_seq_len = 100 .*holds 40 tokens.*kv_cache"):
        load(MOE, max_seq_len=100)  # half of 20 pages of 4 tokens
    monkeypatch.setattr(npmoe.llm, "free_memory", lambda device: 100)
    with pytest.raises(OutOfMemory, match="holds 0 tokens"):
        load(MOE)


def test_a_shorter_default_context_is_said_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(npmoe.llm, "free_memory", memory_for(20))
    with load(MOE, progress=True) as llm:
        assert llm.max_seq_len == 40
        assert len(llm.generate([5] * 39, greedy(5)).token_ids) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "context 40 tokens (the model allows 256)" in said.err


def test_progress_can_be_switched_off(capfd: pytest.CaptureFixture) -> None:
    load(MOE, progress=False).close()
    assert capfd.readouterr() == ("", "")


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npmoe.runtime.device.load_driver", lambda: None)
    with pytest.raises(DeviceError, match="no NVIDIA GPU"):
        load(MOE, device="cuda")


@pytest.mark.parametrize(
    "config",
    [
        *[{"top_p": 2}, {"temperature": "hot"}, {"max_new_tokens": "many"}],
        *[{"eos_token_id": "</s>"}, {"eos_token_id": [[1], 2]}],
    ],
    ids=str,
)
def test_an_illegal_generation_config(
    text_folder: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = shutil.copytree(text_folder, tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"generation_config\.json"):
        load(folder)


def test_generation_config_is_used(text_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(text_folder, tmp_path / "m")
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 5.0, "max_new_tokens": 6})
    )
    with load(folder) as llm:
        results = llm.generate(["The router"] * 5, SamplingParams(ignore_eos=True))
        assert len({tuple(c.token_ids) for c in results}) > 1
        assert {len(c.token_ids) for c in results} == {6}


def test_a_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    folder = shutil.copytree(MOE, tmp_path / "m")
    shutil.copy(MOE.parent / "tokenizer" / "tokenizer.json", folder)
    with pytest.raises(TokenizerError, match=r"300 tokens.*128"):
        load(folder)


# Importing

IMPORT = """
import sys, time
start = time.perf_counter()
import npmoe
print(time.perf_counter() - start, *(m for m in HEAVY if m in sys.modules))
"""


def test_importing_is_quick_and_light() -> None:
    code = IMPORT.replace("HEAVY", '["numba", "cupy", "numpy", "tokenizers", "jinja2"]')
    best = math.inf
    for _ in range(3):
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        assert len(out) == 1, f"import npmoe loads {out[1:]}"
        best = min(best, float(out[0]))
    assert best < 0.3
