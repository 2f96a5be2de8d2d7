"""cuda_src/qkv.cu on the CPU against norm and linear in NumPy."""

import numpy as np
import pytest

from npmoe.ops.linear import linear_ref
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

EPS = 1e-5
SPECIALISATIONS = [  # format, K, TOKENS, row tiles a block at most, chunks in the ring
    # One slice: warps without work.
    pytest.param(("fp4", 128, 1, 10, 2), marks=pytest.mark.sanitize),
    ("fp4", 128, 1, 10, 5),  # tiles in pairs
    ("mxfp4", 1024, 2, 10, 4),  # the same in two chunks
    ("fp4", 1152, 8, 4, 0),  # nine slices on eight warps
    ("bf16", 2176, 4, 20, 3),  # 17 slices on 16 warps
    ("bf16", 256, 5, 2, 0),
    ("fp8", 256, 1, 5, 2),
    ("int4", 384, 3, 5, 2),
    ("int4_asym", 256, 1, 4, 0),
    ("mxfp4", 128, 2, 5, 0),
    ("nvfp4", 256, 5, 4, 2),
]
LAUNCHES = [  # tokens at most, rows, blocks, bias
    (8, 160, 3, True),
    (1, 80, 1, False),
    (3, 32, 5, True),  # more blocks than row tiles
]


@pytest.mark.parametrize("launched", LAUNCHES, ids=str)
@pytest.mark.parametrize("specialisation", SPECIALISATIONS, ids=str)
def test_qkv(specialisation: tuple, launched: tuple) -> None:
    check_qkv(*specialisation, *launched)


def check_qkv(
    fmt: str,
    columns: int,
    max_tokens: int,
    tiles: int,
    ring: int,
    tokens: int,
    rows: int,
    blocks: int,
    biased: bool,
    norm_size: int | None = None,
) -> None:
    tokens = min(tokens, max_tokens)
    rng = np.random.default_rng(columns + rows)
    w, x = weight(rng, fmt, rows, columns), activations(rng, tokens, columns)
    norm = rng.uniform(0.5, 1.5, columns).astype(np.float32)
    bias = rng.standard_normal(rows).astype(np.float32) if biased else None
    macros = {"K": columns, "TOKENS": max_tokens}
    if norm_size is not None:
        macros["NORM_SIZE"], x[:, norm_size:] = norm_size, 0
    qkv = streaming("qkv", "qkv", fmt, columns, tiles, rows, ring, tokens=max_tokens, **macros)

    def run(memory: Memory, seed: int) -> tuple[np.ndarray]:
        projected = memory.output(tokens, rows)
        qkv(
            *((blocks,), projected, memory.read_only(codes(w))),
            *(None if bias is None else memory.read_only(bias), memory.read_only(x)),
            *(memory.read_only(norm), rows, tokens, EPS),
            seed=seed,
        )
        return (projected,)

    (projected,) = run_all_orders(run)
    normed = norm_of_some(x, norm, EPS, norm_size or columns)
    expected = linear_ref(normed, w, bias)
    assert relative_error(projected, expected) < TOLERANCE


@pytest.mark.parametrize("fmt", ["fp4", "bf16"])
@pytest.mark.parametrize(
    ("tiles", "rows", "blocks"),
    [(1, 32, 2), (2, 96, 3), pytest.param(1, 16, 3, marks=pytest.mark.sanitize)],
    ids=["single", "pairs", "idle blocks"],
)
@pytest.mark.parametrize("columns", [3072, 2944], ids=["four warps", "one warp"])
def test_activations_pass_through_a_window(
    fmt: str, tiles: int, rows: int, blocks: int, columns: int
) -> None:
    """24 slices in chunks of four for four warps, or 23 one by one; a block reads each once."""
    check_qkv(fmt, columns, 1, tiles, 5, tokens=1, rows=rows, blocks=blocks, biased=True)


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_norm_is_over_the_columns_that_count(tokens: int) -> None:
    check_qkv("fp4", 384, 4, 4, 2, tokens, rows=80, blocks=2, biased=True, norm_size=320)
