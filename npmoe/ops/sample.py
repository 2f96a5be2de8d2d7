"""Logits -> tokens: penalties, filters, and a counter-based draw.

The draw is Gumbel-max: argmax of logit / temperature - log(-log(u)), where u of a token depends
only on (seed, position, stream, token id). So a seeded sequence is the same in any batch.
The generator is Philox 4x32-10 (Salmon et al., SC 2011).

`Chooser` puts the pieces together on the host; npmoe/ops/sampler.py is the same on the GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from npmoe.dtypes import Array
from npmoe.sampling import SamplingParams

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


def philox_ref(counter: Array, seed: int) -> Array:
    """Philox 4x32-10. counter uint32 `[N, 4]`, a 64-bit seed as key -> random uint32 `[N, 4]`."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (second >> np.uint64(32)) ^ c1 ^ np.uint64(key[0])
        c2 = (first >> np.uint64(32)) ^ c3 ^ np.uint64(key[1])
        c1, c3 = second & _LOW, first & _LOW
        key = [(k + w) & 0xFFFFFFFF for k, w in zip(key, _WEYL, strict=True)]
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def gumbel_ref(token_ids: Array, seed: int, position: int, stream: int) -> Array:
    """Gumbel noise float64 of token ids `[N]` at one position of one stream."""
    blocks, inverse = np.unique(token_ids >> 2, return_inverse=True)
    counter = np.zeros((len(blocks), 4), np.uint32)
    counter[:, 0] = blocks
    counter[:, 1] = position
    counter[:, 2] = stream
    bits = philox_ref(counter, seed)[inverse, token_ids & 3]
    return -np.log(-np.log((bits + 0.5) / 2.0**32))


def penalize(
    logits: Array,
    prompt_ids: Array,
    output_ids: Array,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """Changes one row of logits float32 `[vocab]` in place; ids int `[*]` of the tokens so far."""
    if repetition != 1:
        seen = np.unique(np.concatenate([prompt_ids, output_ids]))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / repetition, values * repetition)
    if presence or frequency:
        ids, counts = np.unique(output_ids, return_counts=True)
        logits[ids] -= np.float32(presence) + np.float32(frequency) * counts.astype(np.float32)


def candidates_ref(
    logits: Array, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Array, Array]:
    """Token ids that survive the filters, best first, and their (logits - max) / temperature,
    float64.

    Equal logits go to the lower token id. At least one token survives.
    """
    exact = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # -infinity is right for a temperature near 0
        scaled = (exact - exact.max()) / temperature
    ids = np.arange(len(scaled))
    if 0 < top_k < len(scaled):
        threshold = np.partition(scaled, -top_k)[-top_k]
        ids = np.flatnonzero(scaled >= threshold)  # more than k where the k-th is tied
    weights = np.exp(scaled[ids])
    if top_k == 0 and top_p < 1:
        # Tokens this light weigh less than 1 - top_p together: they are the tail, unsorted.
        heavy = weights >= (1 - top_p) * weights.sum() / len(ids)
        total, ids, weights = weights.sum(), ids[heavy], weights[heavy]
    order = np.argsort(-scaled[ids], kind="stable")[: top_k or None]
    ids, weights = ids[order], weights[order]
    if top_p < 1:
        total = total if top_k == 0 else weights.sum()
        before = np.concatenate([[0.0], np.cumsum(weights[:-1])])
        ids, weights = ids[before < top_p * total], weights[before < top_p * total]
    if min_p > 0:
        ids = ids[weights >= min_p * weights[0]]
    return ids, scaled[ids]


def sample_ref(
    logits: Array,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
    stream: int = 0,
) -> int:
    """One token of one row of logits float32 `[vocab]`; temperature 0 takes the first maximum."""
    if temperature == 0:
        return int(np.argmax(logits))
    ids, scaled = candidates_ref(logits, temperature, top_k, top_p, min_p)
    return int(ids[np.argmax(scaled + gumbel_ref(ids, seed, position, stream))])


def log_softmax(logits: Array) -> Array:
    """Natural log probabilities float32 `[vocab]` of a row of logits."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum(dtype=np.float64)).astype(np.float32)


@dataclass(frozen=True)
class Sampled:
    """A token; where log probabilities are wanted its own, and the most probable tokens' by id."""

    token_id: int
    logprob: float | None = None
    top: dict[int, float] = field(default_factory=dict)


def report(logits: Array, token_id: int, alternatives: int) -> Sampled:
    """A token with log probabilities by one row of the model's own logits float32 `[vocab]`."""
    logprobs = log_softmax(logits)
    best = candidates_ref(logits, 1.0, alternatives, 1.0, 0.0)[0] if alternatives else ()
    top = {int(i): float(logprobs[i]) for i in best}
    return Sampled(token_id, float(logprobs[token_id]), top)


@dataclass(frozen=True)
class Chooser:
    """How one sequence chooses its next token.

    params: resolved. token_ids: prompt and completion so far. end_ids: tokens that end it, which
    the first params.min_tokens may not be. seed and stream key the random numbers.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt: int
    seed: int
    stream: int
    end_ids: frozenset[int]

    @property
    def penalizes(self) -> bool:
        """Whether scores depend on the tokens so far."""
        p = self.params
        return p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0

    @property
    def must_go_on(self) -> bool:
        """Whether the next token may not end the completion."""
        assert self.params.min_tokens is not None
        return len(self.token_ids) - self.num_prompt < self.params.min_tokens

    @property
    def takes_argmax(self) -> bool:
        """Whether the next token, and all after it, are the best by the model's own logits."""
        changed = self.penalizes or self.params.logit_bias or self.must_go_on
        return self.params.temperature == 0 and not changed

    def scores(self, logits: Array) -> Array:
        """Logits float32 `[vocab]` with bias, penalties and -infinity for what is forbidden."""
        p = self.params
        assert p.repetition_penalty is not None
        scores = logits.copy()
        for token, bias in p.logit_bias.items():
            scores[token] += np.float32(bias)
        if self.penalizes:
            tokens = np.asarray(self.token_ids, np.int64)
            prompt, output = tokens[: self.num_prompt], tokens[self.num_prompt :]
            penalties = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
            penalize(scores, prompt, output, *penalties)
        if self.must_go_on:
            scores[list(self.end_ids)] = -np.inf
        return scores

    def choose(self, logits: Array) -> int:
        """The next token by logits float32 `[vocab]`."""
        p = self.params
        assert p.temperature is not None
        assert p.top_k is not None
        assert p.top_p is not None
        assert p.min_p is not None
        filters = p.temperature, p.top_k, p.top_p, p.min_p
        position = len(self.token_ids)
        return sample_ref(self.scores(logits), *filters, self.seed, position, self.stream)
