"""cuda_src/lm_head.cu on the CPU: logits against NumPy, and the greedy choice against argmax."""

import numpy as np
import pytest

from npmoe.formats.fragments import ROWS
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.ops.linear import linear_ref
from npmoe.ops.norm import rms_norm_ref
from tests.cuda.support import (
    TOLERANCE,
    Memory,
    activations,
    codes,
    norm_of_some,
    run_all_orders,
    streaming,
    weight,
)
from tests.helpers import relative_error

EPS = 1e-6
SPECIALISATIONS = [  # format, K, TOKENS, row tiles a block at most, chunks in the ring
    pytest.param("fp4", 384, 3, 4, 2, marks=pytest.mark.sanitize),
    ("bf16", 256, 8, 3, 0),
    pytest.param("fp8", 256, 2, 4, 2, marks=pytest.mark.sanitize),
    ("int4", 256, 6, 4, 2),
    ("int4_asym", 384, 2, 4, 0),
    ("mxfp4", 256, 8, 4, 0),
    ("nvfp4", 128, 1, 5, 2),
]
LAUNCHES = [  # tokens at most, vocabulary, blocks
    (8, 157, 3),  # three rows of padding
    (1, 80, 1),
    (2, 9, 4),
]


def greedy(best: np.ndarray) -> np.ndarray:
    """The rows that `best` names."""
    return (~best & np.uint64(0xFFFFFFFF)).astype(np.int64)


def run_lm_head(
    w: QuantTensor,
    x: np.ndarray,
    norm: np.ndarray,
    max_tokens: int,
    tiles: int,
    blocks: int,
    ring: int,
    norm_size: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """logits and best."""
    (vocab, columns), tokens = w.shape, x.shape[0]
    macros = {"K": columns, "TOKENS": max_tokens, "NORM_SIZE": norm_size or columns}
    lm_head = streaming(
        "lm_head", "lm_head", w.format, columns, tiles, vocab, ring, tokens=max_tokens, **macros
    )
    records = codes(w)

    def run(memory: Memory, seed: int) -> tuple[np.ndarray, np.ndarray]:
        logits = memory.output(tokens, vocab)
        best = memory.writable(np.zeros(tokens, np.uint64))
        lm_head(
            *((blocks,), logits, best, memory.read_only(records)),
            *(memory.read_only(x), memory.read_only(norm)),
            *(records.shape[0] * ROWS, vocab, tokens, EPS),
            seed=seed,
        )
        return logits, best

    logits, best = run_all_orders(run)
    return logits, best


@pytest.mark.parametrize(("tokens", "vocab", "blocks"), LAUNCHES)
@pytest.mark.parametrize(("fmt", "columns", "max_tokens", "tiles", "ring"), SPECIALISATIONS)
def test_lm_head(
    fmt: str,
    columns: int,
    max_tokens: int,
    tiles: int,
    ring: int,
    tokens: int,
    vocab: int,
    blocks: int,
) -> None:
    rng = np.random.default_rng(columns + vocab)
    w = weight(rng, fmt, vocab, columns)
    x = activations(rng, min(tokens, max_tokens), columns)
    norm = rng.uniform(0.5, 1.5, columns).astype(np.float32)
    logits, best = run_lm_head(w, x, norm, max_tokens, tiles, blocks, ring)
    assert relative_error(logits, linear_ref(rms_norm_ref(x, norm, EPS), w)) < TOLERANCE
    assert (greedy(best) == logits.argmax(axis=1)).all()


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_norm_is_over_the_columns_that_count(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    w, x = weight(rng, "bf16", 80, 384), activations(rng, tokens, 384)
    x[:, 320:] = 0
    norm = rng.uniform(0.5, 1.5, 384).astype(np.float32)
    logits, _ = run_lm_head(w, x, norm, 4, 3, 2, 2, norm_size=320)
    assert relative_error(logits, linear_ref(norm_of_some(x, norm, EPS, 320), w)) < TOLERANCE


@pytest.mark.parametrize("scale", [1, 0, -1])
def test_ties_go_to_the_lower_row(scale: int) -> None:
    """Rows 5 and 60 are the best alike; with scale 0 all are, and with -1 all but those two."""
    rng = np.random.default_rng(3)
    rows = np.tile(rng.standard_normal((1, 256)).astype(np.float32) * 0.1, (64, 1))
    rows[[5, 60]] *= 2
    w = weight(rng, "bf16", 64, 256)
    w.codes[...] = (rows * scale).view(np.uint32) >> 16
    x = np.tile(np.abs(rows[:1]) * np.sign(rows[:1]), (2, 1))
    logits, best = run_lm_head(w, x, np.ones(256, np.float32), 8, 3, 3, 0)
    assert (greedy(best) == logits.argmax(axis=1)).all()
    assert (greedy(best) == (5 if scale == 1 else 0)).all()
