"""cuda_src/sample.cu on the CPU, alone and as a cluster of blocks: tokens, counts and reports are
those of the host's `Chooser`."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from npmoe.ops import sampler as sampler_module
from npmoe.ops.sample import Chooser, Sampled, philox_ref, report
from npmoe.ops.sampler import Sampler, read_report
from npmoe.sampling import SamplingParams
from tests.cuda.build import Kernel, kernel, launch
from tests.cuda.steps import NumPyAsCuPy
from tests.helpers import greedy_keys

UNUSED = np.uint64(77)
"""`best` of a row that the kernel has to leave alone."""


def chooser(
    token_ids: list[int] | None = None,
    num_prompt: int = 2,
    seed: int = 5,
    stream: int = 0,
    ends: tuple[int, ...] = (),
    **params: Any,
) -> Chooser:
    resolved = SamplingParams(**params).resolve({})
    ids = [1, 2, 3] if token_ids is None else token_ids
    return Chooser(resolved, ids, num_prompt, seed, stream, frozenset(ends))


class Setup:
    """A Sampler on the CPU, whose clusters are of `cluster` blocks."""

    def __init__(self, cluster: int, in_shared: bool) -> None:
        self.cluster = cluster
        self.shared_bytes = 227 << 10 if in_shared else sampler_module.STATIC_SHARED_BYTES

    def sample(
        self, choosers: list[Chooser], logits: np.ndarray, seed: int = 0
    ) -> tuple[list[Sampled], Sampler]:
        """The rows' tokens and the sampler afterwards."""

        def run(function: Kernel, *arguments: Any, **options: Any) -> None:
            launch(function, *arguments, **options, seed=seed)

        replaced = {
            "kernel": kernel,
            "launch": run,
            "CLUSTER": self.cluster,
            "bulk": lambda: self.cluster > 1,
            "cupy": lambda: NumPyAsCuPy(132, self.shared_bytes),
        }
        count, vocab = logits.shape
        with patch.multiple(sampler_module, **replaced):
            sampler = Sampler(count, vocab)
            assert (sampler.scratch is None) == sampler.in_shared
            sampler.set_rows(choosers)
            best = np.full(count, UNUSED, np.uint64)
            best[: len(choosers)] = greedy_keys(logits[: len(choosers)])
            lengths = np.array([len(c.token_ids) for c in choosers], np.int32)
            lengths.resize(count)
            sampler.enqueue(best, logits, lengths)
        assert (best[len(choosers) :] == UNUSED).all()
        tokens = (~best & np.uint64(0xFFFFFFFF)).astype(int)
        found = []
        for i, c in enumerate(choosers):
            if c.params.logprobs is None:
                found.append(Sampled(int(tokens[i])))
            else:
                wanted = min(c.params.logprobs, vocab)
                found.append(read_report(sampler.report[i], int(tokens[i]), wanted))
        return found, sampler


WAYS = {"one block": Setup(1, True), "cluster": Setup(4, True), "global memory": Setup(2, False)}
every_way = pytest.mark.parametrize("setup", WAYS.values(), ids=WAYS.keys())


def check(setup: Setup, choosers: list[Chooser], logits: np.ndarray, seed: int = 0) -> list[int]:
    """The kernel's tokens, after comparing them with the host's."""
    found, sampler = setup.sample(choosers, logits, seed)
    for i, (c, got) in enumerate(zip(choosers, found, strict=True)):
        want = c.choose(logits[i])
        assert got.token_id == want, f"row {i}: {c.params}"
        if c.params.logprobs is not None:
            close(got, report(logits[i], want, c.params.logprobs))
        if c.penalizes:
            counts = np.bincount([*c.token_ids[c.num_prompt :], want], minlength=logits.shape[1])
            assert (sampler.states[i] >> 2 == counts).all()
    return [got.token_id for got in found]


def close(got: Sampled, want: Sampled) -> None:
    assert got.logprob == pytest.approx(want.logprob, abs=2e-6)
    assert list(got.top) == list(want.top)
    assert list(got.top.values()) == pytest.approx(list(want.top.values()), abs=2e-6)


FIVE = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))
"""Best first they are tokens 1, 3, 4, 0, 2."""


@every_way
def test_filters_keep_what_they_should(setup: Setup) -> None:
    """Of many draws, all kept tokens come and no other. The last two begin with equal scores."""
    cases: list[tuple[dict[str, Any], set[int]]] = [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.64}, {1, 3}),
        ({"top_p": 0.66}, {1, 3, 4}),
        ({"top_k": 2, "top_p": 0.6}, {1}),
        ({"min_p": 0.24}, {0, 1, 3, 4}),
        ({"top_p": 0.8, "min_p": 0.6}, {1, 3}),
        ({"temperature": 0.5, "top_p": 0.55}, {1}),
        ({"top_p": 1e-9}, {1}),
    ]
    for params, kept in cases:
        rows = [chooser(seed=s, **({"temperature": 1.0} | params)) for s in range(40)]
        assert set(check(setup, rows, np.tile(FIVE, (40, 1)))) == kept, params
    for params, kept in [({"top_k": 2}, {0, 1}), ({"top_p": 0.75}, {0, 1, 2})]:
        rows = [chooser(seed=s, temperature=1.0, **params) for s in range(40)]
        assert set(check(setup, rows, np.zeros((40, 4), np.float32))) == kept, params


@every_way
@pytest.mark.parametrize(("vocab", "spread"), [(3, 1), (1000, 3), (5003, 2), (5003, 0.2)])
def test_tokens_are_those_of_the_host(setup: Setup, vocab: int, spread: float) -> None:
    rng = np.random.default_rng(vocab)
    every = [
        {"temperature": 1.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.8, "top_p": 0.3},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 1.5, "top_k": 700, "min_p": 0.01, "logprobs": 0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 0.9, "frequency_penalty": 0.5, "presence_penalty": 1.0, "top_p": 0.8},
        {"temperature": 1e-320, "top_p": 0.9},
        {"temperature": 1e300, "top_k": 40},
        {"temperature": 1.0, "logit_bias": {2: 5.0, 1: -100.0}, "logprobs": 100},
    ]
    rows = []
    for i, params in enumerate(every):
        ids = rng.integers(0, vocab, 30).tolist()
        rows.append(chooser(ids, 10, int(rng.integers(2**63)) * 2 + 1, stream=i, **params))
    logits = (rng.standard_normal((len(rows) + 1, vocab)) * spread).astype(np.float32)
    for seed in (0, 1, 2):
        check(setup, rows, logits, seed)


@every_way
def test_ties_and_infinities(setup: Setup) -> None:
    """Few different scores, all the same, either zero, -infinity among them, huge ones."""
    rng = np.random.default_rng(0)
    logits = np.round(rng.standard_normal((6, 2500))).astype(np.float32)
    logits[1] = 0
    logits[2] = np.where(rng.random(2500) < 0.5, np.float32(0), np.float32(-0.0))
    logits[3, rng.random(2500) < 0.9] = -np.inf
    logits[4] *= 1e30
    logits[5] *= 1e-30
    for params in ({"top_k": 100}, {"top_k": 70, "top_p": 0.5}, {"top_p": 0.11}, {"min_p": 1.0}):
        for seed in (3, 4):
            rows = [chooser(temperature=0.7, seed=seed, logprobs=7, **params) for _ in logits]
            check(setup, rows, logits)


@every_way
def test_end_tokens_are_forbidden_at_first(setup: Setup) -> None:
    """Token 1 has nearly all the probability and ends the completion."""
    logits = np.zeros((3, 40), np.float32)
    logits[:, 1] = 30
    early, late = (
        chooser([5] * (4 + n), 4, ends=(1, 7), temperature=t, min_tokens=3, max_tokens=9)
        for n, t in ((2, 1.0), (3, 1.0))
    )
    greedy = chooser([5] * 4, 4, ends=(1, 7), temperature=0.0, min_tokens=3, max_tokens=9)
    tokens = check(setup, [early, late, greedy], logits)
    assert tokens[0] not in (1, 7)
    assert tokens[1:] == [1, 0]


@every_way
def test_a_row_does_not_depend_on_its_place_nor_on_the_others(setup: Setup) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((4, 300)).astype(np.float32)
    rows = [chooser(seed=s, temperature=1.0, top_p=0.9, logprobs=5) for s in range(4)]
    together, _ = setup.sample(rows, logits)
    for i in range(4):
        assert setup.sample([rows[i]], logits[i : i + 1])[0] == [together[i]]
    assert setup.sample(rows[::-1], logits[::-1].copy())[0] == together[::-1]


def test_sums_do_not_depend_on_the_number_of_blocks() -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((2, 3000)).astype(np.float32)
    rows = [chooser(seed=s, temperature=1.0, top_p=0.9, logprobs=20) for s in range(2)]
    first, *others = (setup.sample(rows, logits)[0] for setup in WAYS.values())
    assert all(other == first for other in others)


@pytest.mark.sanitize
def test_a_small_cluster_under_sanitizers() -> None:
    logits = np.random.default_rng(3).standard_normal((2, 30)).astype(np.float32)
    penalized = chooser(temperature=1.0, top_k=9, top_p=0.9, logprobs=30, presence_penalty=1.0)
    for setup in (Setup(2, True), Setup(1, False)):
        check(setup, [penalized, chooser(temperature=1.0, logit_bias={29: 9.0})], logits, seed=2)


def test_the_noise_is_that_of_philox() -> None:
    """Of equal scores, the token with the largest random word wins."""
    rows = [chooser(seed=s, stream=3, temperature=1.0) for s in (1, 2**64 - 1, 2**40 + 9)]
    tokens = [s.token_id for s in WAYS["cluster"].sample(rows, np.zeros((3, 999), np.float32))[0]]
    counters = np.zeros((250, 4), np.uint32)
    counters[:, 0], counters[:, 1], counters[:, 2] = np.arange(250), 3, 3
    for c, token in zip(rows, tokens, strict=True):
        assert token == philox_ref(counters, c.seed).ravel()[:999].argmax()
