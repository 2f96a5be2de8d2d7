"""cuda_src/qkv.cu on the CPU against norm and linear in NumPy."""

import numpy as np
import pytest

from npmoe.models.decode import THREADS
from npmoe.ops.linear import linear_ref
from npmoe.ops.norm import rms_norm_ref
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

EPS = 1e-5
SPECIALISATIONS = [  # format, K, TOKENS, row tiles a block at most, bulk copies
    pytest.param("fp4", 128, 1, 10, True, marks=pytest.mark.sanitize),  # one slice: seven warps without work
    ("fp4", 1152, 8, 4, False),  # nine slices on eight warps
    ("bf16", 1152, 4, 20, True),
    ("bf16", 256, 5, 2, False),
]
LAUNCHES = [  # tokens at most, rows, blocks, bias
    (8, 80, 3, True),
    (1, 40, 1, False),
    (3, 16, 5, True),  # more blocks than row tiles
]


@pytest.mark.parametrize(("tokens", "rows", "blocks", "biased"), LAUNCHES)
@pytest.mark.parametrize(("fmt", "columns", "max_tokens", "tiles", "bulk"), SPECIALISATIONS)
def test_qkv(
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
    norm = rng.uniform(0.5, 1.5, columns).astype(np.float32)
    bias = rng.standard_normal(rows).astype(np.float32) if biased else None
    qkv, memory_size = dense("qkv", fmt, columns, max_tokens, tiles, bulk)

    def run(memory: Memory, seed: int) -> tuple[np.ndarray]:
        projected = memory.output(tokens, rows)
        launch(
            *(qkv, (blocks,), THREADS, projected, memory.read_only(codes(w))),
            *(None if bias is None else memory.read_only(bias), memory.read_only(x)),
            *(memory.read_only(norm), rows, tokens, EPS),
            **memory_size,
            seed=seed,
        )
        return (projected,)

    (projected,) = run_all_orders(run)
    assert relative_error(projected, linear_ref(rms_norm_ref(x, norm, EPS), w, bias)) < TOLERANCE[fmt]
