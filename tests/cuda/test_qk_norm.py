"""cuda_src/qk_norm.cu on the CPU: norms over the whole of q and of k, and bounds."""

import numpy as np
import pytest

from npmoe.ops.norm import rms_norm_ref
from tests.cuda.build import kernel, launch
from tests.cuda.support import Memory, run_all_orders, same_bits
from tests.helpers import relative_error

EPS = 1e-5


def run_qk_norm(
    x: np.ndarray, norms: tuple[np.ndarray, np.ndarray] | None, sizes: tuple[int, int], clip: float
) -> np.ndarray:
    q_rows, k_rows = sizes
    qk_norm = kernel("qk_norm", "qk_norm", Q_ROWS=q_rows, K_ROWS=k_rows)

    def run(memory: Memory, seed: int) -> tuple[np.ndarray, ...]:
        changed = memory.writable(x)
        weights = (None, None) if norms is None else map(memory.read_only, norms)
        blocks = (2 if clip == np.inf else 3, len(x))
        launch(qk_norm, blocks, 256, changed, *weights, EPS, clip, seed=seed)
        return (changed,)

    return run_all_orders(run)[0]


@pytest.mark.parametrize("clip", [np.inf, 0.75])
@pytest.mark.parametrize("sizes", [pytest.param((64, 32), marks=pytest.mark.sanitize), (2048, 512)])
def test_norms(sizes: tuple[int, int], clip: float) -> None:
    q_rows, k_rows = sizes
    rng = np.random.default_rng(q_rows)
    x = rng.standard_normal((3, q_rows + 2 * k_rows)).astype(np.float32)
    norms = tuple(rng.uniform(0.5, 1.5, n).astype(np.float32) for n in sizes)
    q, k, v = np.split(run_qk_norm(x, norms, sizes, clip), [q_rows, q_rows + k_rows], axis=1)
    given = np.split(x, [q_rows, q_rows + k_rows], axis=1)
    for got, projected, weight in zip((q, k), given, norms, strict=False):
        expected = np.clip(rms_norm_ref(projected, weight, EPS), -clip, clip)
        assert relative_error(got, expected) < 1e-6
    assert same_bits(v, np.clip(given[2], np.float32(-clip), np.float32(clip)))


def test_bounds_alone() -> None:
    x = np.array([[-3, -1, 0, 0.5, 2, 1, -0.25, 9, -7, 0.5, 0, -1]], np.float32)
    assert same_bits(run_qk_norm(x, None, (4, 4), 1.0), np.clip(x, np.float32(-1), np.float32(1)))
