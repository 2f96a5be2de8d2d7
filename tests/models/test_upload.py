"""Loading to a GPU, without one: pinned memory, streams and kernels are the CPU's."""

import math
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from npmoe.config import KVCacheConfig, parse_weights
from npmoe.errors import CheckpointError, UnsupportedModel
from npmoe.formats.fragments import RECORDS
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.models import prepare, upload
from npmoe.models.conversion import chosen_formats, conversions, convert_parameter, loaded_formats
from npmoe.models.convert import convert_checkpoint
from npmoe.models.kernel_layout import prepare_for_gpu, prepare_vector
from npmoe.models.memory import need_of
from npmoe.models.parameters import VECTOR
from npmoe.models.stored import OpenModel, open_model, read_parameter
from npmoe.runtime import transfer
from tests.cuda import build
from tests.cuda.support import same_bits
from tests.helpers import GOLDEN, by_name, read_safetensors, write_safetensors
from tests.quantized_files import CASES, Case, make_quantized

needs_gxx = pytest.mark.skipif(build.missing() is not None, reason=build.missing() or "")


class FakeStream:
    """Counts; copies happen at once."""

    def __init__(self, non_blocking: bool = False) -> None:
        self.entered = 0

    def __enter__(self) -> "FakeStream":
        self.entered += 1
        return self

    def __exit__(self, *_: Any) -> None:
        self.entered -= 1

    def synchronize(self) -> None:
        assert self.entered == 0


class FakeEvent:
    def __init__(self, disable_timing: bool = False) -> None:
        pass

    def record(self, stream: FakeStream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeCuPy:
    """NumPy with what an upload takes from cupy.cuda; new arrays hold garbage."""

    cuda = SimpleNamespace(Stream=FakeStream, Event=FakeEvent, alloc_pinned_memory=bytearray)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def empty(shape: Any, dtype: Any) -> np.ndarray:
        return np.full(shape, 0xA5, dtype)

    @staticmethod
    def zeros(shape: Any, dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype).view(_Gettable)


class _Gettable(np.ndarray):
    def get(self) -> np.ndarray:
        return np.asarray(self)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuPy()
    monkeypatch.setattr(transfer, "cupy", lambda: fake)
    monkeypatch.setattr(upload, "cupy", lambda: fake)
    monkeypatch.setattr(upload, "to_device", lambda x, device: np.array(x))
    monkeypatch.setattr(upload, "free_cached_memory", lambda: None)
    monkeypatch.setattr(
        transfer, "copy_to_device", lambda to, source, stream: np.copyto(to, source)
    )
    monkeypatch.setattr(prepare, "kernel", build.kernel)
    monkeypatch.setattr(prepare, "launch", build.launch)


def expected_weights(opened: OpenModel, weights: str) -> dict[str, Any]:
    """Read as the CPU reads, prepared by the array code."""
    policy = parse_weights(weights)
    found: dict[str, Any] = {}
    for p in opened.parameters:
        w = read_parameter(opened, p)
        if p.part == VECTOR:
            found[p.name] = prepare_vector(p, w)
        else:
            found[p.name] = prepare_for_gpu(p, convert_parameter(p, w, policy))
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, w in expected.items():
        if isinstance(w, QuantTensor):
            assert (found[name].format, found[name].shape) == (w.format, w.shape), name
            assert same_bits(found[name].codes, w.codes), name
        else:
            assert same_bits(found[name], w), name


@needs_gxx
@pytest.mark.parametrize("weights", ["native", "fp4"])
@pytest.mark.parametrize("buffer_bytes", [1 << 10, 1 << 20])
@pytest.mark.parametrize(
    "name",
    ["qwen3_moe", "qwen3_moe_v5", "mixtral"],  # a tensor an expert, fused ones
)
def test_a_hub_checkpoint(gpu: None, name: str, buffer_bytes: int, weights: str) -> None:
    opened = open_model(GOLDEN / name)
    formats = loaded_formats(opened, parse_weights(weights), "cuda")
    found = upload.load_on_gpu(opened, formats, True, buffer_bytes)
    assert_same(found, expected_weights(open_model(GOLDEN / name), weights))
    assert opened.checkpoint.unused() == []
    held = [w.codes if isinstance(w, QuantTensor) else w for w in found.values()]
    assert not any(np.shares_memory(a, b) for a, b in pairwise(held))


@needs_gxx
@pytest.mark.parametrize("buffer_bytes", [1 << 10, 1 << 20])
def test_a_converted_checkpoint_is_laid_out_and_not_quantised_again(
    gpu: None, tmp_path: Path, buffer_bytes: int
) -> None:
    target = tmp_path / "fp4"
    policy = parse_weights("fp4")
    convert_checkpoint(GOLDEN / "mixtral", target, policy, quiet=True)
    opened = open_model(target)
    found = upload.load_on_gpu(opened, loaded_formats(opened, {}, "cuda"), True, buffer_bytes)
    assert_same(found, expected_weights(opened, "native"))
    assert_same(found, expected_weights(open_model(GOLDEN / "mixtral"), "fp4"))


@needs_gxx
@pytest.mark.parametrize("weights", ["fp8", "int4", "int4_asym", "mxfp4", "nvfp4"])
def test_other_formats_are_converted_or_stored_with_the_same_outcome(
    gpu: None, tmp_path: Path, weights: str
) -> None:
    policy = parse_weights(weights)
    original = open_model(GOLDEN / "mixtral")
    expected = expected_weights(original, weights)
    assert_same(
        upload.load_on_gpu(original, loaded_formats(original, policy, "cuda"), True), expected
    )
    convert_checkpoint(GOLDEN / "mixtral", tmp_path / weights, policy, quiet=True)
    stored = open_model(tmp_path / weights)
    assert_same(upload.load_on_gpu(stored, loaded_formats(stored, {}, "cuda"), True), expected)


@needs_gxx
def test_experts_that_are_stored_as_mxfp4_stay_so(gpu: None) -> None:
    opened = open_model(GOLDEN / "gpt_oss")
    found = upload.load_on_gpu(opened, loaded_formats(opened, {}, "cuda"), True)
    assert found["layers.0.down_proj"].format == "mxfp4"
    assert_same(found, expected_weights(opened, "native"))


@needs_gxx
@by_name(CASES)
def test_what_others_quantised(gpu: None, tmp_path: Path, case: Case) -> None:
    """Laid out from what the CPU reads, in its format where kernels read that, else in bf16: they
    read no fp8 blocks of 32 columns and no int4 groups of 16."""
    opened = open_model(make_quantized(tmp_path / "model", case, "mixtral")[0])
    formats = loaded_formats(opened, {}, "cuda")
    expected = {}
    for p in opened.parameters:
        w = read_parameter(opened, p)
        if p.part == VECTOR:
            expected[p.name] = prepare_vector(p, w)
        else:
            is_narrow = w.format == "fp8" and w.block[1] == 32 < w.shape[-1]
            is_narrow |= w.format.startswith("int4") and w.block == (1, 16)
            native = w.format in RECORDS and not is_narrow
            assert formats[p.name] == (w.format if native else "bf16")
            converted = convert_parameter(p, w, {p.part: formats[p.name]})
            expected[p.name] = prepare_for_gpu(p, converted)
    assert_same(upload.load_on_gpu(opened, formats, True), expected)
    matrices = [p for p in opened.parameters if p.part != VECTOR]
    kept = sum(expected[p.name].nbytes for p in matrices)
    assert need_of(opened, {}, KVCacheConfig(), "cuda").weights == kept


@needs_gxx
def test_scales_that_fp16_cannot_hold_are_said(
    gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for name in ("w4a16", "w4a16-float32-scales"):
        case = next(c for c in CASES if c.name == name)
        opened = open_model(make_quantized(tmp_path / name, case, "mixtral")[0])
        upload.load_on_gpu(opened, loaded_formats(opened, {}, "cuda"))
        said.append(capsys.readouterr().err)
    assert "rounded" not in said[0]
    assert "layers.0.down_proj: fp16 cannot hold its scales exactly, rounded" in said[1]


@needs_gxx
def test_tables_and_routers_of_other_types_become_bf16(gpu: None, tmp_path: Path) -> None:
    folder, _ = make_quantized(tmp_path / "model", CASES[0], "mixtral")
    tensors = read_safetensors(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("block_sparse_moe.gate.weight"))
    shape = tensors[name][1]
    values = np.linspace(-1, 1, math.prod(shape)).astype(np.float16)
    tensors[name] = ("F16", shape, values.tobytes())
    write_safetensors(folder / "model.safetensors", tensors)
    opened = open_model(folder)
    formats = loaded_formats(opened, {}, "cuda")
    assert "router: fp16 has no equal here, converted to bf16" in conversions(opened, {}, formats)
    found = upload.load_on_gpu(opened, formats, True)
    expected = values.astype(ml_dtypes.bfloat16).view(np.uint16).reshape(shape)
    padding = ((0, 0), (0, 128 - shape[1]))  # columns that kernels read, and that add nothing
    np.testing.assert_array_equal(found["layers.0.router"], np.pad(expected, padding))


@needs_gxx
def test_tensors_of_several_types_are_put_together_on_the_host(gpu: None, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "mixtral", tmp_path / "mixed"))
    tensors = read_safetensors(folder / "model.safetensors")
    name = next(n for n in tensors if "q_proj" in n)
    _, shape, data = tensors[name]
    wide = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).tobytes()
    tensors[name] = ("F32", shape, wide)
    write_safetensors(folder / "model.safetensors", tensors)
    opened = open_model(folder)
    formats = loaded_formats(opened, parse_weights("fp4"), "cuda")
    assert_same(upload.load_on_gpu(opened, formats, True), expected_weights(opened, "fp4"))


@needs_gxx
def test_values_that_fp4_cannot_hold_name_the_matrix(gpu: None, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "mixtral", tmp_path / "nan"))
    tensors = read_safetensors(folder / "model.safetensors")
    name = next(n for n in tensors if "layers.1" in n and "o_proj" in n)
    dtype, shape, data = tensors[name]
    tensors[name] = (dtype, shape, b"\xc0\xff" + data[2:])
    write_safetensors(folder / "model.safetensors", tensors)
    opened = open_model(folder)
    formats = loaded_formats(opened, parse_weights("fp4"), "cuda")
    with pytest.raises(ValueError, match=r"layers\.1\.o_proj .* cannot be fp4: .*NaN"):
        upload.load_on_gpu(opened, formats, True)


@needs_gxx
def test_the_rate_is_said_unless_quiet(gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_model(GOLDEN / "mixtral")
    upload.load_on_gpu(opened, loaded_formats(opened, {}, "cuda"), quiet=True)
    assert capsys.readouterr() == ("", "")
    upload.load_on_gpu(opened, loaded_formats(opened, {}, "cuda"))
    assert "of weights in" in (said := capsys.readouterr().err)
    assert "GB/s" in said


@needs_gxx
@pytest.mark.parametrize("kind", ["embed_tokens", "layernorm"])
def test_a_shard_that_shrinks_after_it_was_opened(gpu: None, tmp_path: Path, kind: str) -> None:
    folder = Path(shutil.copytree(GOLDEN / "mixtral", tmp_path / "short"))
    opened = open_model(folder)
    info = next(t for name, t in opened.checkpoint.tensors.items() if kind in name)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(info.stop - 7)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has become shorter"):
        upload.load_on_gpu(opened, loaded_formats(opened, {}, "cuda"), True)


def test_a_quantised_part_is_not_quantised_again(tmp_path: Path) -> None:
    target = tmp_path / "fp4"
    convert_checkpoint(GOLDEN / "mixtral", target, {"experts": "fp4"}, quiet=True)
    opened = open_model(target)
    with pytest.raises(UnsupportedModel, match="experts is fp4 already; making it fp8"):
        chosen_formats(opened, parse_weights("fp8"))
    assert chosen_formats(opened, parse_weights("fp4"))["attention"] == "fp4"
    assert chosen_formats(opened, {"attention": "fp8"})["experts"] == "fp4"
