"""Whether what is timed is right: greedy tokens of the GPU's step against the NumPy model.

On a small copy of the shape, since NumPy would take minutes for the whole: the same family,
experts, experts a token, head size, query heads a KV head and formats; fewer layers, narrower.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from npmoe.batch import Batch
from npmoe.bench.near_ties import WatchedRouter
from npmoe.bench.random_model import device_vector, prepare, random_matrix, random_vector
from npmoe.bench.shapes import small_copy
from npmoe.bench.subject import Subject, from_config
from npmoe.config import KVCacheConfig, WeightsPolicy
from npmoe.dtypes import Array
from npmoe.kv.storage import KVCache
from npmoe.models.decode import DecodeStep
from npmoe.models.layers import CausalLM
from npmoe.models.parameters import VECTOR
from npmoe.ops.quantize import to_kernel_pages
from npmoe.runtime.device import cupy, to_device, to_host
from npmoe.runtime.graphs import Graph

PROMPT, STEPS, PAGE = 50, 16, 16
PAGES = -(-(PROMPT + STEPS + 1) // PAGE)
TOLERANCE = 5e-3
"""Largest error of logits over the largest logit, of a router as of the model. It is 2e-4 where
keys and values are stored as NumPy's; one code that rounds the other way costs up to 4e-3."""
MOST_NEAR_TIED = 1 / 8
"""Largest share of tokens that may take the other expert of a near-tied router."""


class WrongTokens(RuntimeError):
    """The GPU's step disagrees with the NumPy model: what is timed is broken."""


@dataclass(frozen=True)
class Run:
    """Consecutive steps on the GPU: tokens int32 `[steps, S]` that it was fed, all but the first
    by its own choice, and the logits float32 `[steps, S, vocab]` after each."""

    tokens: Array
    logits: Array


@dataclass(frozen=True)
class Checked:
    """Numbers of tokens. equal: of the GPU's, those that NumPy chooses too. near_tied: those whose
    logits agree once NumPy takes the other expert of a near-tied router; not among `equal`."""

    equal: int
    near_tied: int


def tokens_checked(
    raw: dict[str, Any], policy: WeightsPolicy, kv: KVCacheConfig, batch: int
) -> Checked:
    """Greedy tokens of a small copy, compared between GPU and NumPy.

    raw: the config.json of the shape. Raises what `PagedReference.count_equal` raises.
    """
    subject = from_config(small_copy(raw), "small copy")
    host, device = paired_weights(subject, subject.formats(policy))
    model, reference = CausalLM(subject.spec, host), PagedReference(subject, kv, batch)
    reference.prompt(model)
    run = _run_on_gpu(subject, device, reference)
    return reference.count_equal(model, run)


def paired_weights(
    subject: Subject, formats: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same random parameters laid out for the CPU and for the GPU; all experts differ."""
    rng = np.random.default_rng(2)
    host: dict[str, Any] = {}
    device: dict[str, Any] = {}
    for p in subject.parameters:
        if p.part == VECTOR:
            host[p.name] = random_vector(p, rng)
            device[p.name] = device_vector(p, host[p.name], "cuda")
            continue
        w = random_matrix(p, formats[p.part], rng)
        host[p.name] = prepare(p, w, "cpu")
        device[p.name] = prepare(p, w.map_arrays(lambda a: to_device(a, "cuda")), "cuda")
    return host, device


class PagedReference:
    """The NumPy side: a cache in shuffled pages, and one token of each sequence a step."""

    def __init__(self, subject: Subject, kv: KVCacheConfig, batch: int) -> None:
        spec = subject.spec
        self.rng = np.random.default_rng(3)
        self.spec, self.kv, self.batch = spec, kv, batch
        self.cache = self.new_cache("cpu")
        pages = self.rng.permutation(batch * PAGES).astype(np.int32)
        self.block_table = pages.reshape(batch, PAGES)
        self.lengths = np.array([max(1, PROMPT - 3 * s) for s in range(batch)], np.int32)

    def new_cache(self, device: str) -> KVCache:
        """An empty cache of these sizes."""
        s = self.spec
        pages = self.batch * PAGES
        return KVCache(
            len(s.layers), pages, PAGE, s.num_kv_heads, s.head_dim, self.kv, device=device
        )

    def prompt(self, model: CausalLM) -> None:
        """Fills the cache with a random prompt for each sequence."""
        for position in range(int(self.lengths.max())):
            tokens = self.rng.integers(0, self.spec.vocab_size, self.batch).astype(np.int32)
            positions = np.minimum(position, self.lengths - 1).astype(np.int32)
            self.forward(model, tokens, positions)

    def forward(self, model: CausalLM, tokens: Array, positions: Array) -> Array:
        """Logits float32 `[S, vocab]` of one token a sequence."""
        rows = np.arange(self.batch + 1, dtype=np.int32)
        pages = self.block_table[rows[:-1], positions // PAGE]
        slots = pages * PAGE + positions % PAGE
        batch = Batch(tokens, positions, slots, rows, positions + 1, self.block_table, rows[:-1])
        return model.forward(batch, self.cache.layers)

    def count_equal(self, model: CausalLM, run: Run) -> Checked:
        """Tokens of `run` that the model chooses too, given the same tokens before.

        Another token is a near tie if the model's own best is ahead by no more than twice the
        largest difference of logits. Raises WrongTokens for other ones, for logits that
        `_expected` cannot explain, and for more than MOST_NEAR_TIED near-tied routers.
        """
        steps, equal, near_tied = len(run.tokens) - 1, 0, 0
        for i in range(steps):
            expected, is_near_tied = self._expected(model, run, i)
            near_tied += int(is_near_tied.sum())
            for s in range(self.batch):
                error = np.abs(run.logits[i, s] - expected[s]).max()
                chosen, best = run.tokens[i + 1, s], int(expected[s].argmax())
                if chosen == best:
                    equal += not is_near_tied[s]
                elif expected[s, best] - expected[s, chosen] > 2 * error:
                    raise WrongTokens(
                        f"step {i}, sequence {s}: the GPU chose {chosen}, NumPy {best}"
                    )
        if near_tied > MOST_NEAR_TIED * steps * self.batch:
            raise WrongTokens(
                f"{near_tied} of {steps * self.batch} tokens agree only if NumPy takes the other "
                "expert of a near-tied router"
            )
        return Checked(equal, near_tied)

    def _expected(self, model: CausalLM, run: Run, step: int) -> tuple[Array, Array]:
        """Logits float32 `[S, vocab]` of a step, from which those of `run` are no further apart
        than TOLERANCE, and bool `[S]`: of which sequences a near-tied router explains them.

        Of those NumPy takes the other expert in one layer, and goes on with the keys and values
        that follow from it. A router is near-tied if two logits would be the same, were each off
        by TOLERANCE. Raises WrongTokens for logits that remain further apart.
        """
        given, num_layers = run.logits[step], len(self.spec.layers)
        inputs = run.tokens[step], self.lengths + np.int32(step)
        takes_next = np.zeros((num_layers, self.batch), bool)
        own, leads = self._watched_forward(model, *inputs, takes_next)
        expected = own.copy()
        for s in range(self.batch):
            for layer in np.argsort(leads[:, s], kind="stable"):
                if _is_near(given[s], expected[s]) or leads[layer, s] > 2 * TOLERANCE:
                    break
                takes_next[:, s] = np.arange(num_layers) == layer
                expected[s] = self._watched_forward(model, *inputs, takes_next)[0][s]
            if not _is_near(given[s], expected[s]):
                error, largest = np.abs(given[s] - own[s]).max(), np.abs(own[s]).max()
                raise WrongTokens(
                    f"step {step}, sequence {s}: logits differ by {error:.3g}, the largest is "
                    f"{largest:.3g}"
                )
        return expected, takes_next.any(axis=0)

    def _watched_forward(
        self, model: CausalLM, tokens: Array, positions: Array, takes_next: Array
    ) -> tuple[Array, Array]:
        """`forward`, and leads float32 `[layers, S]`; see WatchedRouter for both."""
        router = WatchedRouter(takes_next)
        watched = CausalLM(model.spec, model.weights, router)
        return self.forward(watched, tokens, positions), np.stack(router.leads)


def _is_near(logits: Array, expected: Array) -> bool:
    """Whether logits `[vocab]` are within TOLERANCE of the expected; not if one is no number."""
    error = np.abs(logits - expected).max()
    return bool(error <= TOLERANCE * np.abs(expected).max())


def _run_on_gpu(subject: Subject, weights: dict[str, Any], reference: PagedReference) -> Run:
    """STEPS + 1 replays of one graph, each fed the choice of the one before on the device."""
    cache = reference.new_cache("cuda")
    table = to_device(reference.block_table, "cuda")
    step = DecodeStep(subject.spec, weights, cache.layers, table)
    graph = Graph(step.enqueue)  # runs once: only now the cache, the tokens and the lengths
    first = reference.rng.integers(0, subject.spec.vocab_size, reference.batch).astype(np.int32)
    tokens, logits = [], []
    with graph.stream:
        for theirs, ours in zip(cache.layers, reference.cache.layers, strict=True):
            for pages, filled in zip(theirs, ours, strict=True):
                given = to_kernel_pages(filled).arrays()
                for a, b in zip(pages.arrays(), given, strict=True):
                    a[...] = to_device(b, "cuda")
        step.tokens[...] = to_device(first, "cuda")
        step.seq_lens[...] = to_device(reference.lengths, "cuda")
        step.best[...] = 0
        for _ in range(STEPS + 1):
            graph.replay()
            tokens.append(to_host(step.tokens).copy())
            logits.append(to_host(step.logits).copy())
    cupy().cuda.Device().synchronize()
    return Run(np.stack(tokens), np.stack(logits))
