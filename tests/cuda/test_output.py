"""cuda_src/output.cu on the CPU against a residual add of linear in NumPy."""

import numpy as np
import pytest

from npmoe.models.decode import THREADS
from npmoe.ops.linear import linear_ref
from tests.cuda.build import launch
from tests.cuda.support import (
    TOLERANCE,
    Memory,
    activations,
    codes,
    dense,
    run_all_orders,
    weight,
)
from tests.helpers import relative_error

SPECIALISATIONS = [  # format, K, TOKENS, row tiles a block at most, bulk copies
    ("fp4", 640, 2, 3, True),
    # 17 slices: activations do not fit the registers
    pytest.param("bf16", 2176, 8, 2, False, marks=pytest.mark.sanitize),
]
LAUNCHES = [  # tokens at most, rows, blocks, bias
    (8, 56, 2, False),
    (1, 24, 1, True),
    (7, 8, 2, False),  # more blocks than row tiles
]


@pytest.mark.parametrize(("tokens", "rows", "blocks", "biased"), LAUNCHES)
@pytest.mark.parametrize(("fmt", "columns", "max_tokens", "tiles", "bulk"), SPECIALISATIONS)
def test_output(
    fmt: str,
    columns: int,
    max_tokens: int,
    tiles: int,
    bulk: bool,
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
    output, memory_size = dense("output", fmt, columns, max_tokens, tiles, bulk)

    def run(memory: Memory, seed: int) -> tuple[np.ndarray]:
        residual = memory.writable(before)
        launch(
            *(output, (blocks,), THREADS, residual, memory.read_only(codes(w))),
            *(None if bias is None else memory.read_only(bias), memory.read_only(x)),
            *(rows, tokens),
            **memory_size,
            seed=seed,
        )
        return (residual,)

    (residual,) = run_all_orders(run)
    assert relative_error(residual, before + linear_ref(x, w, bias)) < TOLERANCE[fmt]
