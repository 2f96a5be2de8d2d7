"""cuda_src/qkv.cu on the CPU against norm and linear in NumPy."""

import numpy as np
import pytest

from npmoe.models import decode
from npmoe.ops.linear import linear_ref
from npmoe.ops.norm import rms_norm_ref
from tests.cuda.build import kernel, launch
from tests.cuda.support import (
    TOLERANCE,
    W_FORMATS,
    Memory,
    activations,
    codes,
    error,
    run_all_orders,
    weight,
)

EPS = 1e-5
SPECIALISATIONS = [  # format, K, TOKENS, TILES
    ("fp4", 128, 1, 1),  # one slice: seven warps without work
    ("fp4", 1152, 8, 3),  # nine slices on eight warps
    ("bf16", 1152, 4, 2),
    ("bf16", 256, 8, 6),
]
LAUNCHES = [  # tokens (0: TOKENS), rows, blocks, bias
    pytest.param(0, 80, 3, True, marks=pytest.mark.asan),
    (1, 40, 1, False),
    (3, 16, 5, True),  # more blocks than row tiles
]


@pytest.mark.parametrize(("fmt", "columns", "max_tokens", "tiles"), SPECIALISATIONS)
@pytest.mark.parametrize(("tokens", "rows", "blocks", "biased"), LAUNCHES)
def test_qkv(
    fmt: str,
    columns: int,
    max_tokens: int,
    tiles: int,
    tokens: int,
    rows: int,
    blocks: int,
    biased: bool,
) -> None:
    tokens = min(tokens or max_tokens, max_tokens)
    rng = np.random.default_rng(columns + rows)
    w, x = weight(rng, fmt, rows, columns), activations(rng, tokens, columns)
    norm = rng.uniform(0.5, 1.5, columns).astype(np.float32)
    bias = rng.standard_normal(rows).astype(np.float32) if biased else None
    run = kernel(
        *("qkv", "qkv"),
        **{"K": columns, "TOKENS": max_tokens, "TILES": tiles},
        **{"W_FORMAT": W_FORMATS[fmt], "DEPTH": decode.DEPTH[fmt]},
    )

    def once(memory: Memory, seed: int) -> tuple[np.ndarray]:
        projected = memory.output(tokens, rows)
        launch(
            *(run, (blocks,), decode.THREADS, projected, memory.read_only(codes(w))),
            *(None if bias is None else memory.read_only(bias), memory.read_only(x)),
            *(memory.read_only(norm), rows, tokens, EPS),
            shared=decode._stream_bytes(columns // 128, max_tokens, tiles),
            seed=seed,
        )
        return (projected,)

    (projected,) = run_all_orders(once)
    expected = linear_ref(rms_norm_ref(x, norm, EPS), w, bias)
    assert error(projected, expected) < TOLERANCE[fmt]
