"""Loading to a real GPU: pinned memory, streams and the prepare kernel; and CuPy's real errors."""

import gc
from pathlib import Path

import numpy as np
import pytest

from npmoe.config import parse_weights
from npmoe.errors import DeviceError, OutOfMemory
from npmoe.formats.quant_tensor import QuantTensor, quantize
from npmoe.models.conversion import convert_parameter, loaded_formats
from npmoe.models.convert import convert_checkpoint
from npmoe.models.kernel_layout import prepare_for_gpu, prepare_vector
from npmoe.models.parameters import VECTOR, Parameter
from npmoe.models.prepare import KERNELS, prepare_matrix
from npmoe.models.stored import open_model, read_parameter
from npmoe.models.upload import load_on_gpu, staging_bytes
from npmoe.runtime.device import cupy, free_cached_memory, resolve_device, to_host
from npmoe.runtime.failures import named_errors
from npmoe.runtime.nvrtc import kernel
from tests.helpers import GOLDEN, by_name
from tests.quantized_files import CASES, Case, make_quantized

pytestmark = pytest.mark.gpu


def test_this_machine_has_what_is_needed() -> None:
    assert resolve_device("auto") == resolve_device("cuda") == "cuda"


@pytest.mark.parametrize(("stored", "target"), KERNELS)
@pytest.mark.parametrize(
    ("name", "part", "shape"),
    [
        ("o_proj", "attention", (2048, 4096)),
        ("lm_head", "lm_head", (1001, 2048)),
        ("gate_up_proj", "experts", (5, 2 * 192, 2048)),
        ("down_proj", "experts", (5, 2048, 192)),
    ],
)
def test_the_kernel_gives_the_bits_of_numpy(
    name: str, part: str, shape: tuple[int, ...], stored: str, target: str
) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(shape, np.float32)
    values *= np.exp2(rng.integers(-20, 12, (*shape[:-1], 1))).astype(np.float32)
    p, w = Parameter(name, part, shape, (), ()), quantize(values, stored)
    flags = cupy().zeros(1, np.int32)
    found = prepare_matrix(p, w.map_arrays(cupy().asarray), target, flags)
    expected = prepare_for_gpu(p, convert_parameter(p, w, {part: target}))
    assert isinstance(found, QuantTensor)
    assert isinstance(expected, QuantTensor)
    assert int(flags[0]) == 0
    assert (found.codes.get() == expected.codes).all()


@pytest.mark.parametrize("buffer_bytes", [1 << 12, 32 << 20])
@pytest.mark.parametrize("source", ["hub", "converted"])
def test_a_checkpoint(tmp_path: Path, source: str, buffer_bytes: int) -> None:
    folder = GOLDEN / "mixtral"
    if source == "converted":
        folder = tmp_path / "fp4"
        convert_checkpoint(GOLDEN / "mixtral", folder, parse_weights("fp4"), quiet=True)
    opened, policy = open_model(folder), parse_weights("fp4")
    found = load_on_gpu(opened, loaded_formats(opened, policy, "cuda"), True, buffer_bytes)
    for p in opened.parameters:
        w = read_parameter(opened, p)
        if p.part == VECTOR:
            w = prepare_vector(p, w)
        else:
            w = prepare_for_gpu(p, convert_parameter(p, w, policy))
        expected, loaded = (
            x.codes if isinstance(x, QuantTensor) else x for x in (w, found[p.name])
        )
        assert (to_host(loaded) == expected).all(), p.name


@by_name(CASES)
def test_what_others_quantised(tmp_path: Path, case: Case) -> None:
    opened = open_model(make_quantized(tmp_path / "model", case, "mixtral")[0])
    formats = loaded_formats(opened, {}, "cuda")
    found = load_on_gpu(opened, formats, True)
    for p in opened.parameters:
        w = read_parameter(opened, p)
        if p.part == VECTOR:
            w = prepare_vector(p, w)
        else:
            w = prepare_for_gpu(p, convert_parameter(p, w, {p.part: formats[p.name]}))
        expected, loaded = (
            x.codes if isinstance(x, QuantTensor) else x for x in (w, found[p.name])
        )
        assert (to_host(loaded) == expected).all(), p.name


@pytest.mark.driver
def test_little_memory_is_left_behind() -> None:
    gc.collect()  # what other tests have left
    free_cached_memory()
    pool = cupy().get_default_memory_pool()
    before = pool.total_bytes()
    opened = open_model(GOLDEN / "mixtral")
    weights = load_on_gpu(opened, loaded_formats(opened, {}, "cuda"), quiet=True)
    kept = sum(w.nbytes for w in weights.values())
    assert kept <= pool.total_bytes() - before <= kept + staging_bytes(opened) + (64 << 20)


@pytest.mark.driver
def test_memory_that_runs_out() -> None:
    with pytest.raises(OutOfMemory, match="max_seq_len"), named_errors():
        cupy().empty(1 << 50, np.uint8)


@pytest.mark.driver
def test_a_kernel_that_does_not_compile() -> None:
    with pytest.raises(DeviceError, match=r"refuses prepare\.cu: .*prepare makes"):
        kernel("prepare", "prepare", SOURCE=1, W_FORMAT=0, PAIRED=0)
