"""cuda_src/output.cu on the CPU against a residual add of linear in NumPy."""

import numpy as np
import pytest

from npmoe.formats.hadamard import hadamard
from npmoe.ops.linear import linear_ref
from tests.cuda.support import (
    TOLERANCE,
    Memory,
    activations,
    codes,
    run_all_orders,
    streaming,
    weight,
)
from tests.helpers import relative_error

# Format, K, TOKENS, row tiles a block at most, chunks in the ring; size of heads that are rotated
# as they are read, or 0.
SPECIALISATIONS = [
    ("fp4", 640, 3, 3, 2, 0),
    ("fp4", 512, 1, 4, 8, 0),  # all of a block in shared memory
    pytest.param("bf16", 1152, 8, 2, 0, 0, marks=pytest.mark.sanitize),
    pytest.param("nvfp4", 256, 2, 4, 0, 0, marks=pytest.mark.sanitize),
    ("fp8", 384, 8, 4, 0, 128),
    ("int4", 256, 1, 4, 0, 0),
    ("int4_asym", 128, 5, 4, 2, 64),
    ("mxfp4", 384, 1, 4, 2, 128),
]
WORDS = 1300  # that output empties
LAUNCHES = [  # tokens at most, rows, blocks, bias
    (8, 112, 2, False),
    (1, 48, 1, True),
    (7, 16, 2, False),  # more blocks than row tiles
]


def test_blocks_without_tiles_write_nothing() -> None:
    """More blocks than row tiles, one tile a block, everything in shared memory."""
    test_output("fp4", 512, 1, 1, 8, 0, tokens=1, rows=32, blocks=4, biased=False)


@pytest.mark.parametrize(("tokens", "rows", "blocks", "biased"), LAUNCHES)
@pytest.mark.parametrize(
    ("fmt", "columns", "max_tokens", "tiles", "ring", "head_dim"), SPECIALISATIONS
)
def test_output(
    fmt: str,
    columns: int,
    max_tokens: int,
    tiles: int,
    ring: int,
    head_dim: int,
    tokens: int,
    rows: int,
    blocks: int,
    biased: bool,
) -> None:
    tokens = min(tokens, max_tokens)
    rng = np.random.default_rng(columns + rows)
    w, x = weight(rng, fmt, rows, columns), activations(rng, tokens, columns)
    before = rng.standard_normal((tokens, rows)).astype(np.float32)
    bias = rng.standard_normal(rows).astype(np.float32) if biased else None
    macros = {"K": columns, "TOKENS": max_tokens, "ROTATED": head_dim}
    output = streaming(
        "output", "output", fmt, columns, tiles, rows, ring, tokens=max_tokens, **macros
    )

    def run(memory: Memory, seed: int) -> tuple[np.ndarray, ...]:
        residual, emptied = memory.writable(before), memory.output(WORDS)
        output(
            *((blocks,), residual, emptied, memory.read_only(codes(w))),
            *(None if bias is None else memory.read_only(bias), memory.read_only(x)),
            *(rows, WORDS, tokens),
            seed=seed,
        )
        return residual, emptied

    residual, emptied = run_all_orders(run)
    assert (emptied.view(np.uint32) == 0xFFFFFFFF).all()
    heads = x.reshape(tokens, -1, head_dim or columns)
    read = hadamard(heads).reshape(x.shape) if head_dim else x
    assert relative_error(residual, before + linear_ref(read, w, bias)) < TOLERANCE
