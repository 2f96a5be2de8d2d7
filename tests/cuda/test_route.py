"""cuda_src/route.cu and route.cuh on the CPU: router logits, and the choice of experts exactly."""

import numpy as np
import pytest

from npmoe.formats.quant_tensor import quantize
from npmoe.ops.linear import linear_ref
from npmoe.ops.route import top_k_ref
from tests.cuda.build import kernel, launch
from tests.cuda.support import Memory, activations, norm_of_some, run_all_orders
from tests.helpers import relative_error

EPS = 1e-6


@pytest.mark.parametrize(
    ("columns", "experts", "tokens", "warps", "biased", "norm_size"),
    [
        pytest.param(256, 3, 1, 4, True, 256, marks=pytest.mark.sanitize),
        (640, 20, 3, 4, False, 640),
        (1152, 20, 8, 8, True, 1152),
        (384, 5, 2, 4, True, 320),  # zeros in the last columns, which do not count
    ],
)
def test_router_logits(
    columns: int, experts: int, tokens: int, warps: int, biased: bool, norm_size: int
) -> None:
    rng = np.random.default_rng(columns + tokens)
    w = quantize((rng.standard_normal((experts, columns)) * 0.1).astype(np.float32), "bf16")
    x = activations(rng, tokens, columns)
    x[:, norm_size:] = 0
    norm = rng.uniform(0.5, 1.5, columns).astype(np.float32)
    bias = rng.standard_normal(experts).astype(np.float32) if biased else None
    sizes = {} if norm_size == columns else {"NORM_SIZE": norm_size}
    route = kernel("route", "route", K=columns, EXPERTS=experts, WARPS=warps, **sizes)

    def run(memory: Memory, seed: int) -> tuple[np.ndarray]:
        logits = memory.output(tokens, experts)
        launch(
            *(route, (experts,), 32 * warps, logits, memory.read_only(w.codes)),
            *(None if bias is None else memory.read_only(bias), memory.read_only(x)),
            *(memory.read_only(norm), tokens, EPS),
            seed=seed,
        )
        return (logits,)

    (logits,) = run_all_orders(run)
    expected = linear_ref(norm_of_some(x, norm, EPS, norm_size), w, bias)
    assert relative_error(logits, expected) < 2e-6


def hard_logits(experts: int) -> np.ndarray:
    """Random rows, then ties: few values, all equal, either zero, huge and tiny, two infinite."""
    rng = np.random.default_rng(experts)
    rows = rng.standard_normal((12, experts)).astype(np.float32)
    rows[1:5] = np.round(rows[1:5])
    rows[5], rows[6] = 0, -1.5
    rows[7] = np.where(rng.random(experts) < 0.5, np.float32(0), np.float32(-0.0))
    rows[8] *= 1e30
    rows[9] *= 1e-30
    rows[10] = np.arange(experts) // 3
    rows[11, 1:3] = -np.inf
    return rows


@pytest.mark.parametrize(
    ("experts", "top_k", "renormalize"),
    [
        (128, 8, True),
        pytest.param(60, 4, False, marks=pytest.mark.sanitize),
        (8, 2, True),
        (5, 5, False),
        (64, 1, True),
    ],
)
def test_choice_is_that_of_top_k_ref(experts: int, top_k: int, renormalize: bool) -> None:
    logits = hard_logits(experts)
    choose = kernel("choose", "choose", EXPERTS=experts, TOP_K=top_k, RENORMALIZE=renormalize)

    def run(memory: Memory, seed: int) -> tuple[np.ndarray, np.ndarray]:
        ids = memory.output(len(logits), top_k, dtype=np.int32)
        weights = memory.output(len(logits), top_k)
        launch(
            *(choose, (len(logits),), 64, ids, weights, memory.read_only(logits)),
            seed=seed,
        )
        return ids, weights

    ids, weights = run_all_orders(run)
    expected_weights, expected_ids = top_k_ref(logits, top_k, renormalize)
    assert (ids == expected_ids).all()
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-6)
