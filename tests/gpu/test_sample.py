"""Sampling on a GPU: cuda_src/sample.cu against the host's `Chooser`, and whole requests."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import npmoe
from npmoe import SamplingParams
from npmoe.engine.output import Completion
from npmoe.ops import sampler as sampler_module
from npmoe.ops.sample import Chooser, candidates_ref, gumbel_ref, report
from npmoe.ops.sampler import Sampler, read_report
from npmoe.runtime.device import cupy
from npmoe.runtime.graphs import Graph
from tests.helpers import greedy_keys

pytestmark = pytest.mark.gpu
ROWS, ROUNDING = 8, 1e-4

PARAMS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 5},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.3, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.8, "top_p": 0.2, "min_p": 0.01},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": {3: 4.0, 8: -100.0}},
    {"temperature": 1.5, "top_k": 700, "logprobs": 100},
    {"temperature": 0.9, "frequency_penalty": 0.5, "presence_penalty": 1.0, "min_tokens": 40},
]


def make_choosers(vocab: int, seed: int) -> list[Chooser]:
    rng = np.random.default_rng(seed)
    return [
        Chooser(
            SamplingParams(**params).resolve({}),
            rng.integers(0, vocab, 30).tolist(),
            *(10, int(rng.integers(2**63)) * 2 + 1, i),
            frozenset({1, 5}),
        )
        for i, params in enumerate(PARAMS)
    ]


def check_token(
    chooser: Chooser, logits: np.ndarray, token: int, rounding: float = ROUNDING
) -> None:
    """Whether the token is the drawn one, but for roundings: at the edge of a filter, and of two
    that are as good as equal."""
    p, scores = chooser.params, chooser.scores(logits)
    assert p.temperature is not None
    assert p.top_k is not None
    assert p.top_p is not None
    assert p.min_p is not None
    if p.temperature == 0:
        assert token == scores.argmax()
        return

    def noisy(edge: float) -> dict[int, float]:
        top_p = min(1.0, p.top_p + edge) if p.top_p < 1 else 1.0
        ids, scaled = candidates_ref(scores, p.temperature, p.top_k, top_p, p.min_p * (1 - edge))
        noise = gumbel_ref(ids, chooser.seed, len(chooser.token_ids), chooser.stream)
        return dict(zip(ids.tolist(), scaled + noise, strict=True))

    assert noisy(rounding)[token] >= max(noisy(-rounding).values()) - rounding, p


@pytest.mark.parametrize("way", ["cluster", "global memory", "one block"])
@pytest.mark.parametrize(("vocab", "spread"), [(11, 1.0), (50_257, 2.5), (151_936, 3.0)])
def test_replays_of_a_graph_choose_as_the_host_does(way: str, vocab: int, spread: float) -> None:
    """Three replays: lengths grow between them, and counts on the device."""
    xp = cupy()
    choosers = make_choosers(vocab, vocab)
    in_shared = way == "cluster"
    changed: dict[str, Any] = {"bulk": lambda: way != "one block"}
    if not in_shared:
        changed["STATIC_SHARED_BYTES"] = 1 << 20  # nothing fits beside so much
    with patch.multiple(sampler_module, **changed):
        sampler = Sampler(ROWS, vocab)
        assert sampler.in_shared == in_shared
        best, seq_lens = xp.zeros(ROWS, xp.uint64), xp.zeros(ROWS, xp.int32)
        logits = xp.zeros((ROWS, vocab), xp.float32)
        xp.cuda.Stream.null.synchronize()
        graph = Graph(lambda: sampler.enqueue(best, logits, seq_lens))
        with graph.stream:
            sampler.set_rows(choosers)
        for step in range(3):
            rows = np.random.default_rng(step).standard_normal((ROWS, vocab)) * spread
            host = rows.astype(np.float32)
            with graph.stream:
                logits[...] = xp.asarray(host)
                best[...] = xp.asarray(greedy_keys(host))
                seq_lens[...] = xp.asarray(np.full(ROWS, 30 + step, np.int32))
                graph.replay()
            graph.stream.synchronize()
            tokens = (~best.get() & np.uint64(0xFFFFFFFF)).astype(int)
            reports, states = sampler.report.get(), sampler.states.get()
            for i, chooser in enumerate(choosers):
                check_token(chooser, host[i], int(tokens[i]))
                assert isinstance(chooser.token_ids, list)
                chooser.token_ids.append(int(tokens[i]))
                if chooser.penalizes:
                    counts = np.bincount(chooser.token_ids[10:], minlength=vocab)
                    assert (states[i] >> 2 == counts).all()
                if (wanted := chooser.params.logprobs) is not None:
                    wanted = min(wanted, vocab)
                    got = read_report(reports[i], int(tokens[i]), wanted)
                    want = report(host[i], int(tokens[i]), wanted)
                    assert list(got.top) == list(want.top)
                    assert got.logprob == pytest.approx(want.logprob, abs=2e-5)
                    assert list(got.top.values()) == pytest.approx(
                        list(want.top.values()), abs=2e-5
                    )


def test_greedy_rows_are_left_alone() -> None:
    xp = cupy()
    greedy = Chooser(SamplingParams().resolve({}), [1, 2], 1, 0, 0, frozenset())
    sampler = Sampler(2, 100)
    sampler.set_rows([greedy])
    best = xp.asarray(np.array([123, 456], np.uint64))
    logits, seq_lens = xp.zeros((2, 100), xp.float32), xp.full(2, 2, xp.int32)
    sampler.enqueue(best, logits, seq_lens)
    assert best.get().tolist() == [123, 456]


# Whole requests

TEXTS = ["Once upon a time there was a king", "The cat", "In the middle of the forest", "He said"]


@pytest.fixture(scope="module")
def gpu() -> Iterator[npmoe.LLM]:
    with npmoe.LLM(device="cuda", progress=False, max_seq_len=512) as llm:
        yield llm


def draws(count: int, **params: Any) -> SamplingParams:
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7}
    neutral |= {"ignore_eos": True, "min_tokens": 0}
    return SamplingParams(**(neutral | {"max_tokens": count, "repetition_penalty": 1.0} | params))


def check_completion(
    gpu: npmoe.LLM, answer: Completion, params: SamplingParams, rounding: float
) -> None:
    """Teacher-forced, by logits of one sequence alone."""
    ids, start = answer.prompt_token_ids + answer.token_ids, len(answer.prompt_token_ids)
    logits = gpu.forward(ids)
    for i, token in enumerate(answer.token_ids):
        prefix = ids[: start + i]
        chooser = Chooser(params.resolve({}), prefix, start, 7, 0, frozenset())
        check_token(chooser, logits[start + i - 1], token, rounding)


def test_a_seed_gives_the_same_tokens_at_any_batch_size(gpu: npmoe.LLM) -> None:
    """But for kernels that round otherwise at other batch sizes."""
    for params in (draws(24), draws(24, top_p=0.9), draws(24, presence_penalty=0.5, top_k=40)):
        alone = [gpu.generate(prompt, params).token_ids for prompt in TEXTS]
        for prompts in (TEXTS, TEXTS * 3):
            together = gpu.generate(prompts, params)
            for answer in together[: len(TEXTS)]:
                check_completion(gpu, answer, params, rounding=0.05)
            equal = [a.token_ids == b for a, b in zip(together, alone, strict=False)]
            assert sum(equal) > len(TEXTS) // 2
    gpu.engine.scheduler.allocator.check_integrity([])


def test_tokens_are_those_that_the_host_draws_from_the_same_logits(gpu: npmoe.LLM) -> None:
    biased = {"logit_bias": {7: 2.0}, "repetition_penalty": 1.2}
    for params in (draws(20), draws(20, top_p=0.8, temperature=0.7), draws(20, **biased)):
        check_completion(gpu, gpu.generate(TEXTS[0], params), params, ROUNDING)


def test_log_probabilities(gpu: npmoe.LLM) -> None:
    answer = gpu.generate(TEXTS[0], draws(12, logprobs=4))
    logits = gpu.forward(answer.prompt_token_ids + answer.token_ids)
    start = len(answer.prompt_token_ids) - 1
    for i, entry in enumerate(answer.logprobs or []):
        want = report(logits[start + i], entry.token_id, 4)
        assert entry.logprob == pytest.approx(want.logprob, abs=1e-3)
        assert list(entry.top.values()) == pytest.approx(list(want.top.values()), abs=1e-3)


def test_streams_end_and_leave_nothing_behind(gpu: npmoe.LLM) -> None:
    """A stop string ends one in mid-flight, another is left, and a third is joined."""
    whole = gpu.generate(TEXTS[0], draws(60)).text
    stop = whole[40:46]
    assert "".join(gpu.stream(TEXTS[0], draws(60, stop=stop))) == whole[: whole.find(stop)]
    left = gpu.stream(TEXTS[1], draws(60))
    next(left), next(left)
    left.close()
    stream = gpu.stream(TEXTS[0], draws(60))
    pieces = [next(stream), next(stream)]
    joined = gpu.generate(TEXTS[2], draws(9))
    check_completion(gpu, joined, draws(9), rounding=0.05)
    assert whole.startswith("".join(pieces))
    assert len("".join(stream)) > 40
    gpu.engine.scheduler.allocator.check_integrity([])


def test_a_long_stream_crosses_pages(gpu: npmoe.LLM) -> None:
    answer = gpu.generate(TEXTS[1], draws(300, temperature=0.0))
    ids = answer.prompt_token_ids + answer.token_ids
    logits, start = gpu.forward(ids), len(answer.prompt_token_ids)
    rows = logits[start - 1 : -1]
    chosen = rows[np.arange(len(rows)), answer.token_ids]
    assert len(answer.token_ids) == 300
    assert (rows.max(axis=1) - chosen).max() < 1e-3 * np.abs(rows).max()
