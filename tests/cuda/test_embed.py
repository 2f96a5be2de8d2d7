"""cuda_src/embed.cu on the CPU: sequences move on by a token, whose embedding is looked up."""

import numpy as np
import pytest

from npmoe.formats.floats import decode_bf16, encode_bf16
from tests.cuda.build import kernel, launch
from tests.cuda.support import Memory, run_all_orders, same_bits

VOCAB, CAPACITY = 50, 4


def packed(token: int) -> int:
    """`best` as lm_head leaves it for a token of logit 1.0."""
    return 0xBF800000 << 32 | (~token & 0xFFFFFFFF)


@pytest.mark.parametrize("columns", [pytest.param(66, marks=pytest.mark.sanitize), 1024])
def test_embed(columns: int) -> None:
    rng = np.random.default_rng(columns)
    table = encode_bf16(rng.standard_normal((VOCAB, columns)).astype(np.float32))
    best = np.array([packed(7), 0, packed(VOCAB - 1), packed(0)], np.uint64)  # 0: take `tokens`
    state = {
        "tokens": np.array([1, 2, 3, 4], np.int32),
        "history": np.full((4, CAPACITY), -5, np.int32),
        "steps": np.array([0, 3, 4, 2**31 + 9], np.uint32),  # the last two wrap round
        "seq_lens": np.array([0, 10, 20, 30], np.int32),
    }
    embed = kernel("embed", "embed", K=columns)

    def run(memory: Memory, seed: int) -> tuple[np.ndarray, ...]:
        x, after = memory.output(4, columns), memory.writable(best)
        moved = [memory.writable(a) for a in state.values()]
        launch(
            *(embed, (4,), 256, x, after, *moved, memory.read_only(table), CAPACITY),
            seed=seed,
        )
        return x, after, *moved

    x, after, tokens, history, steps, seq_lens = run_all_orders(run)
    expected = np.array([7, 2, VOCAB - 1, 0])
    assert same_bits(x, decode_bf16(table[expected]))
    assert (after == 0).all()
    assert (tokens == expected).all()
    assert (steps == state["steps"] + 1).all()
    assert (seq_lens == state["seq_lens"] + 1).all()
    wanted = state["history"].copy()
    wanted[np.arange(4), state["steps"] % CAPACITY] = expected
    assert (history == wanted).all()
