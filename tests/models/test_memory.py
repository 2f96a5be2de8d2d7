"""A model that does not fit is refused before anything is read, with settings that fit."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

import npmoe
from npmoe.config import EngineConfig, KVCacheConfig, KVWindows, parse_weights
from npmoe.dtypes import gigabytes
from npmoe.errors import OutOfMemory
from npmoe.models import memory
from npmoe.models.convert import convert_checkpoint
from npmoe.models.memory import WORKSPACE_BYTES, check_memory, need_of
from npmoe.models.stored import open_model
from npmoe.models.upload import staging_bytes
from tests.helpers import GOLDEN

MIXTRAL = GOLDEN / "mixtral"


def refuse(
    monkeypatch: pytest.MonkeyPatch,
    free: float,
    device: str = "cpu",
    weights: str = "native",
    path: Path = MIXTRAL,
    **options: object,
) -> str:
    """The words of the OutOfMemory with so many bytes free."""
    monkeypatch.setattr(memory, "free_memory", lambda device: int(free))
    config = EngineConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(OutOfMemory) as caught:
        check_memory(open_model(path), parse_weights(weights), device, config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("device", "code_bytes", "kept"), [("cpu", 1, ("router",)), ("cuda", 0.5, ("router", "table"))]
)
def test_weights_are_those_of_the_device(
    device: str, code_bytes: float, kept: tuple[str, ...]
) -> None:
    """4-bit codes take a byte on a CPU, where the embedding stays in its file; on a GPU there are
    128 columns for the 64, 128 gate and up rows for the 32, and 128 rows that add to the 64."""
    opened = open_model(MIXTRAL)
    total = 0.0
    for p in opened.parameters:
        if p.part not in ("vector", "router", "table"):
            *lead, columns = p.shape
            if device == "cuda":
                columns = 128
                lead[-1] = 2 * 128 if p.name.endswith("gate_up_proj") else lead[-1]
                lead[-1] = 128 if p.name.endswith(("o_proj", "down_proj")) else lead[-1]
            total += math.prod(lead) * columns * (code_bytes + 2 / 32)
        elif p.part in kept:
            total += 2 * p.shape[0] * (128 if device == "cuda" else p.shape[1])
    need = need_of(opened, parse_weights("fp4"), KVCacheConfig("fp32", "fp32", 16), device)
    assert need.weights == total
    spec = opened.spec
    rotary = 4 * spec.head_dim if device == "cuda" else 0  # a cosine and a sine for two elements
    assert need.token == len(spec.layers) * 2 * spec.num_kv_heads * spec.head_dim * 4 + rotary
    largest = max(2 * math.prod(p.shape) for p in opened.parameters if p.part != "vector")
    assert staging_bytes(opened) - 4 * 256 == largest
    assert need.passing == (staging_bytes(opened) if device == "cuda" else 0)


def test_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    monkeypatch.setattr("npmoe.llm.load_model", None)
    with pytest.raises(OutOfMemory, match="the model needs"):
        npmoe.LLM(MIXTRAL, device="cpu", progress=False)


def test_a_smaller_weight_format_is_named_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_model(MIXTRAL)
    kv = EngineConfig().kv_cache
    sizes = {
        w: need_of(opened, parse_weights(w), kv, "cpu").weights for w in ("native", "fp8", "fp4")
    }
    said = refuse(monkeypatch, sizes["native"] - 1)
    assert f"needs {gigabytes(sizes['native'])} for weights" in said
    assert f"{gigabytes(sizes['native'] - 1)} are free" in said
    assert "What would fit: weights='fp4'; or weights='fp8'" in said
    said = refuse(monkeypatch, 1000)
    assert "What would fit" not in said
    assert f"takes {gigabytes(min(sizes.values()))} or more" in said


def test_a_smaller_cache_or_a_shorter_context_is_named_where_it_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = open_model(MIXTRAL)
    kv = KVCacheConfig("bf16", "bf16", 16)
    need = need_of(opened, {}, kv, "cpu")
    free = need.weights + 2 * 99 * need.token  # half of the rest is 99 tokens of bf16
    said = refuse(monkeypatch, free, max_seq_len=100, kv_cache=kv)
    assert f"{gigabytes(100 * need.token)} for the cache of 100 tokens" in said
    assert "kv_cache='fp4'" in said
    assert "max_seq_len=99" in said
    monkeypatch.setattr(memory, "free_memory", lambda device: math.ceil(free + 2 * need.token))
    check_memory(opened, {}, "cpu", EngineConfig(max_seq_len=100, kv_cache=kv))


def test_the_copies_of_windows_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three sequences and one outside the queues: 16 + 128 + 64 tokens in bf16, all layers."""
    opened = open_model(MIXTRAL)
    kv = KVCacheConfig("fp8", "fp8", 16, windows=KVWindows(16, 128))
    need, plain = (need_of(opened, {}, k, "cpu", 3, 64) for k in (kv, replace(kv, windows=None)))
    in_bf16 = need_of(opened, {}, KVCacheConfig("bf16", "bf16", 16), "cpu").token
    assert (need.token, plain.staying) == (plain.token, 0)
    assert need.staying == 4 * (16 + 128 + 64) * in_bf16
    free = need.weights + need.staying + 2 * 100 * need.token
    assert need.tokens(free, 0.5) == 100
    options: dict = {"max_seq_len": 101, "max_num_seqs": 3, "prefill_chunk": 64}
    said = refuse(monkeypatch, free, kv_cache=kv, **options)
    assert f"{gigabytes(need.staying)} to work in" in said
    assert "kv_cache='fp8'" in said  # without windows


def test_only_what_the_gpu_has_kernels_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    need = need_of(open_model(MIXTRAL), {}, KVCacheConfig(), "cuda")
    said = refuse(monkeypatch, need.weights + WORKSPACE_BYTES - 1, "cuda")
    assert "What would fit: weights='fp4'" in said
    assert "to work in" in said
    monkeypatch.setattr(memory, "RECORD_BYTES", {})
    assert "weights=" not in refuse(monkeypatch, need.weights + WORKSPACE_BYTES - 1, "cuda")


def test_a_converted_checkpoint_is_not_told_to_convert_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "fp8"
    convert_checkpoint(MIXTRAL, target, parse_weights("fp8"), quiet=True)
    assert "weights=" not in refuse(monkeypatch, 1000, path=target)
