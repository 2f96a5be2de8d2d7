"""Families that are published in FP8 with a scale a block: read in that form as their values."""

import json
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from npmoe.models.loader import load_model
from npmoe.models.stored import open_model
from tests.helpers import GOLDEN, golden_arrays, logits_in_chunks, relative_error

BLOCK = 16
LARGEST = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
QUANTISED = re.compile(r"layers\.\d+\.(self_attn|linear_attn|mlp|block_sparse_moe)\.")
KEPT = re.compile(r"norm|\.gate\.weight|shared_expert_gate|conv1d|in_proj_(a|b|ba)\.|indexer")


def quantised(name: str, values: np.ndarray) -> bool:
    """Whether published checkpoints have this tensor in FP8: projections, no routers or norms."""
    is_matrix = values.ndim == 2 and name.endswith("weight")
    return is_matrix and bool(QUANTISED.search(name)) and not KEPT.search(name)


def in_blocks(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """E4M3 codes, float32 scales of blocks, and what they mean together."""
    rows, columns = values.shape
    grid = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = np.zeros((grid[0] * BLOCK, grid[1] * BLOCK), np.float32)
    padded[:rows, :columns] = values
    tiles = padded.reshape(grid[0], BLOCK, grid[1], BLOCK)
    scales = (np.abs(tiles).max(axis=(1, 3)) / LARGEST + 1e-6).astype(np.float32)
    codes = (tiles / scales[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn)
    meant = codes.astype(np.float32) * scales[:, None, :, None]
    return (
        np.ascontiguousarray(codes.reshape(padded.shape)[:rows, :columns]),
        scales,
        np.ascontiguousarray(meant.reshape(padded.shape)[:rows, :columns]),
    )


def make_twins(name: str, folder: Path) -> tuple[Path, Path]:
    """A golden checkpoint in FP8, and one in float32 with the same values."""
    fp8, plain = folder / "fp8", folder / "plain"
    for target in (fp8, plain):
        target.mkdir()
        shutil.copy(GOLDEN / name / "config.json", target)
    stored = load_file(GOLDEN / name / "model.safetensors")
    codes, values = dict(stored), {n: np.asarray(a, np.float32) for n, a in stored.items()}
    for n, a in stored.items():
        if quantised(n, a):
            scales = n.removesuffix("weight") + "weight_scale_inv"
            codes[n], codes[scales], values[n] = in_blocks(values[n])
    assert len(codes) > len(stored)
    save_file(codes, fp8 / "model.safetensors")
    save_file(values, plain / "model.safetensors")
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
    }
    (fp8 / "config.json").write_text(json.dumps(config))
    return fp8, plain


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        "minimax_m2",
        "glm4_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5_moe_text",
        "glm4_moe_lite",
    ],
)
def test_fp8_runs_as_its_values_do(name: str, tmp_path: Path) -> None:
    ids = golden_arrays(name)["input_ids"][:40]
    found, expected = (
        logits_in_chunks(load_model(open_model(path), {}, "cpu", quiet=True), ids, 40)
        for path in make_twins(name, tmp_path)
    )
    assert relative_error(found, expected) < 2e-5
