"""Sampling on the GPU: what cuda_src/sample.cu reads and writes, and its launch.

Everything that a `Chooser` knows lies in device buffers, so that a captured graph draws a new token
at every replay: positions are the sequence lengths, and counts for the penalties grow there.
"""

from collections.abc import Sequence

import numpy as np

from npmoe.dtypes import Array
from npmoe.ops.sample import Chooser, Sampled
from npmoe.runtime.device import cupy
from npmoe.runtime.launch import launch
from npmoe.runtime.nvrtc import bulk, kernel
from npmoe.sampling import MAX_LOGPROBS

THREADS, CLUSTER = 1024, 8
STATIC_SHARED_BYTES = 12 << 10
REPORT_WORDS = 1 + 2 * MAX_LOGPROBS
CHOOSES, COUNTS, BIASED, REPORTS = 1, 2, 4, 8
IN_PROMPT, ENDS, ONE_MORE = 1, 2, 4
ROW = np.dtype(
    [
        ("flags", np.uint32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        *((name, np.float32) for name in ("top_p", "min_p", "repetition", "presence", "frequency")),
        *((name, np.uint32) for name in ("seed_low", "seed_high", "stream")),
        ("free_from", np.int32),
        ("alternatives", np.int32),
        ("unused", np.uint32, 3),
    ]
)
"""`Row` of sample.cu."""


class Sampler:
    """Buffers for up to max_seqs sequences; row s chooses for sequence s of a decode step."""

    def __init__(self, max_seqs: int, vocab_size: int) -> None:
        xp = cupy()
        self.vocab_size = vocab_size
        self.rows = xp.zeros((max_seqs, ROW.itemsize), xp.uint8)
        self.report = xp.zeros((max_seqs, REPORT_WORDS), xp.int32)
        self.states = xp.zeros((max_seqs, vocab_size), xp.uint32)
        self.biases = xp.zeros((max_seqs, vocab_size), xp.float32)
        self.cluster = CLUSTER if bulk() else 1
        self.share = 4 * -(-vocab_size // (4 * self.cluster))
        available = xp.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
        self.in_shared = 4 * self.share <= available - STATIC_SHARED_BYTES
        scratch = (max_seqs, self.cluster * self.share)
        self.scratch = None if self.in_shared else xp.zeros(scratch, xp.float32)

    def set_rows(self, choosers: Sequence[Chooser]) -> None:
        """Makes row i choose as choosers[i]; the rows behind them leave the greedy choice alone."""
        xp = cupy()
        rows = np.zeros(self.rows.shape[0], ROW)
        for i, chooser in enumerate(choosers):
            rows[i] = pack_row(chooser, self.vocab_size)
            if rows[i]["flags"] & COUNTS:
                self.states[i] = xp.asarray(pack_states(chooser, self.vocab_size))
            if rows[i]["flags"] & BIASED:
                biases = np.zeros(self.vocab_size, np.float32)
                biases[list(chooser.params.logit_bias)] = list(chooser.params.logit_bias.values())
                self.biases[i] = xp.asarray(biases)
        self.rows[...] = xp.asarray(rows.view(np.uint8).reshape(self.rows.shape))

    def enqueue(self, best: Array, logits: Array, seq_lens: Array) -> None:
        """Launches sample.cu on the current stream. best u64 `[S]`, logits float32 `[S, vocab]`,
        seq_lens int32 `[S]`, all on the device. best comes from lm_head, and becomes what `embed`
        of the next step reads.
        """
        macros = {"IN_SHARED": int(self.in_shared), "MAX_LOGPROBS": MAX_LOGPROBS}
        launch(
            kernel("sample", "sample", CLUSTER=self.cluster, **macros),
            (self.cluster, len(best)),
            THREADS,
            best,
            self.report,
            self.states,
            self.scratch,
            logits,
            self.biases,
            self.rows,
            seq_lens,
            self.vocab_size,
            self.share,
            shared=4 * self.share if self.in_shared else 0,
        )


def needs_sampler(chooser: Chooser) -> bool:
    """Whether lm_head's greedy choice is not all that is wanted."""
    return not chooser.takes_argmax or chooser.params.logprobs is not None


def pack_row(chooser: Chooser, vocab_size: int) -> np.ndarray:
    """One `Row` of sample.cu, ROW `[]`."""
    p = chooser.params
    assert p.temperature is not None
    assert p.top_k is not None
    assert p.min_tokens is not None
    row = np.zeros((), ROW)
    row["flags"] = (
        (0 if chooser.takes_argmax else CHOOSES)
        | (COUNTS if chooser.penalizes or chooser.must_go_on else 0)
        | (BIASED if p.logit_bias else 0)
        | (0 if p.logprobs is None else REPORTS)
    )
    row["temperature"] = np.clip(p.temperature, 1e-37, 1e37) if p.temperature else 0
    row["top_k"] = min(p.top_k, vocab_size)
    row["top_p"], row["min_p"] = p.top_p, p.min_p
    row["repetition"] = p.repetition_penalty
    row["presence"], row["frequency"] = p.presence_penalty, p.frequency_penalty
    row["seed_low"], row["seed_high"] = chooser.seed & 0xFFFFFFFF, chooser.seed >> 32
    row["stream"] = chooser.stream
    row["free_from"] = chooser.num_prompt + p.min_tokens
    row["alternatives"] = p.logprobs or 0
    return row


def pack_states(chooser: Chooser, vocab_size: int) -> Array:
    """What sample.cu keeps of each token, uint32 `[vocab]`: times in the completion << 2 | ends the
    completion << 1 | in the prompt."""
    tokens = np.asarray(chooser.token_ids, np.int64)
    counts = np.bincount(tokens[chooser.num_prompt :], minlength=vocab_size)
    states = counts.astype(np.uint32) * np.uint32(ONE_MORE)
    states[tokens[: chooser.num_prompt]] |= np.uint32(IN_PROMPT)
    states[list(chooser.end_ids)] |= np.uint32(ENDS)
    return states


def read_report(words: Array, token_id: int, alternatives: int) -> Sampled:
    """One row of `report`, int32 `[REPORT_WORDS]`, copied to the host."""
    logprobs = words.view(np.float32)
    ids, values = words[1:], logprobs[1 + MAX_LOGPROBS :]
    top = {int(ids[i]): float(values[i]) for i in range(alternatives)}
    return Sampled(token_id, float(logprobs[0]), top)
