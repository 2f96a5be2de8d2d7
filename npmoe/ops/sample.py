"""Logits -> tokens: penalties, filters, and a counter-based draw.

The draw is Gumbel-max: argmax of logit / temperature - log(-log(u)), where u of a token depends
only on (seed, position, stream, token id). So a seeded sequence is the same in any batch.
The generator is Philox 4x32-10 (Salmon et al., SC 2011).
"""

import numpy as np

from npmoe.dtypes import Array

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
