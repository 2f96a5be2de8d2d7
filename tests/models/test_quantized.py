"""Checkpoints that others quantised: every value, what runs, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npmoe.config import KVCacheConfig
from npmoe.errors import CheckpointError, UnsupportedModel
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.models.conversion import conversions, loaded_formats
from npmoe.models.convert import convert_checkpoint
from npmoe.models.loader import load_model
from npmoe.models.memory import need_of
from npmoe.models.parameters import TABLE
from npmoe.models.stored import OpenModel, open_model, read_parameter, stored_formats
from npmoe.models.summary import STORED, Memory, describe, summarize
from tests.helpers import (
    by_name,
    golden_arrays,
    logits_in_chunks,
    read_safetensors,
    relative_error,
    write_safetensors,
)
from tests.quantized_files import CASES, Case, gptq_config, make_quantized

BY_NAME = {case.name: case for case in CASES}
QKV = tuple(f"self_attn.{n}_proj" for n in "qkv")


def read(opened: OpenModel, name: str) -> QuantTensor:
    w = read_parameter(opened, next(p for p in opened.parameters if p.name == name))
    assert isinstance(w, QuantTensor)
    return w


def joined(values: dict[str, np.ndarray], *names: str) -> np.ndarray:
    return np.concatenate([values[name] for name in names])


@by_name(CASES)
def test_every_value_is_read_exactly(case: Case, tmp_path: Path) -> None:
    folder, values = make_quantized(tmp_path / "model", case)
    opened = open_model(folder)
    layer = "model.layers.0."
    expected = {
        "qkv_proj": joined(values, *(layer + name for name in QKV)),
        "o_proj": values[layer + "self_attn.o_proj"],
        "gate_up_proj": np.stack(
            [
                joined(values, *(f"{layer}mlp.experts.{e}.{n}_proj" for n in ("gate", "up")))
                for e in range(8)
            ]
        ),
        "down_proj": np.stack([values[f"{layer}mlp.experts.{e}.down_proj"] for e in range(8)]),
    }
    for name, wanted in expected.items():
        w = read(opened, f"layers.0.{name}")
        assert (w.format, w.shape) == (case.format, wanted.shape), name
        found = w.dequantize()
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, wanted.astype(np.float32), err_msg=name)
    assert read(opened, "layers.0.down_proj").block == case.down_block
    assert read(opened, "layers.0.router").format == "bf16"


@by_name(CASES)
def test_it_runs_as_its_values_in_float32_do(case: Case, tmp_path: Path) -> None:
    folder, _ = make_quantized(tmp_path / "model", case)
    ids = golden_arrays("qwen3_moe")["input_ids"][:30]
    quantized, plain = (
        load_model(open_model(path), {}, "cpu", quiet=True)
        for path in (folder, tmp_path / "model-plain")
    )
    expected = logits_in_chunks(plain, ids, 30)
    for chunk in (1, 30):
        assert relative_error(logits_in_chunks(quantized, ids, chunk), expected) < 2e-5


@by_name(CASES)
def test_info_names_it_and_reads_no_weight(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = make_quantized(tmp_path / "model", case)

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(np, "memmap", refuse)
    opened = open_model(folder)
    summary = summarize(opened, [Memory("here", 1e9, cpu=True), Memory("24 GB", 24e9)])
    assert summary.formats["experts"] == f"{case.format} ({case.word})"
    assert summary.formats["router"] == "bf16"
    assert case.word in describe(summary)


@by_name(CASES)
def test_memory_is_what_it_is_said_to_be(case: Case, tmp_path: Path) -> None:
    """Within 3 %, but for rows that are padded to tiles of 64: these matrices have none to pad."""
    opened = open_model(make_quantized(tmp_path / "model", case, "mixtral_rows")[0])
    model = load_model(opened, {}, "cpu", quiet=True)
    kept = sum(
        w.nbytes
        for p in opened.parameters
        if p.part != TABLE and isinstance(w := model.weights[p.name], QuantTensor)
    )
    assert need_of(opened, {}, KVCacheConfig("fp32", "fp32", 16), "cpu").weights == pytest.approx(
        kept, rel=0.03
    )
