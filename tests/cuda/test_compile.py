"""Every kernel compiles for every architecture, without spills and within a budget of registers.

NVRTC needs no GPU. The launches are those of real models, as npmoe.models.decode asks for them, one
layer each; every architecture takes some of them, and together they cover formats and batch sizes.
What is known to fail is listed with its reason; the test tells when it no longer does.
"""

from dataclasses import dataclass

import pytest

from npmoe.models.prepare import KERNELS
from npmoe.models.stream import BLOCK_BYTES, W_CODES
from npmoe.ops.sampler import STATIC_SHARED_BYTES
from npmoe.runtime.resources import folder
from tests.cuda.nvrtc import Usage, compile_kernels, missing
from tests.cuda.steps import Shape, Specialised, launches

REASON = missing()
needs_nvrtc = pytest.mark.skipif(REASON is not None, reason=REASON or "")

QWEN = Shape("qwen3-30b-a3b", 2048, 48, 32, 4, 128, 128, 8, 768, 151936)
SEED = Shape("seed-67b", 4096, 32, 32, 8, 128, 64, 8, 2560, 128256)
MIXTRAL = Shape("mixtral-8x7b", 4096, 32, 32, 8, 128, 8, 2, 14336, 32000)
OLMOE = Shape("olmoe-1b-7b", 2048, 16, 16, 16, 128, 64, 8, 1024, 50304, False, "projection")
GPT_OSS = Shape("gpt-oss-20b", 2880, 24, 64, 8, 64, 32, 4, 2880, 201088, qk_norm="none")
SMALL_HEADS = Shape("small-heads", 2048, 16, 16, 8, 64, 64, 8, 1024, 50304, renormalize=False)


@dataclass(frozen=True)
class GPU:
    """shared: dynamic and static shared memory that one block can have, in bytes."""

    architecture: str
    multiprocessors: int
    shared: int

    @property
    def bulk(self) -> bool:
        """Bulk copies into shared memory, as npmoe.runtime.nvrtc.bulk says it."""
        return self.architecture >= "sm_90" or len(self.architecture.rstrip("a")) > len("sm_90")


A100 = GPU("sm_80", 108, 163 << 10)
L4 = GPU("sm_89", 58, 99 << 10)
H200 = GPU("sm_90a", 132, 227 << 10)
B200 = GPU("sm_100a", 148, 227 << 10)
RTX5090 = GPU("sm_120a", 170, 99 << 10)

Format = str | tuple[str, str]
STEPS: list[tuple[GPU, Shape, str, Format, int]] = [  # GPU, model, weights, K and V, sequences
    (H200, QWEN, "fp4", "fp4", 1),
    (H200, QWEN, "bf16", "bf16", 4),
    (H200, SEED, "bf16", "bf16", 1),
    (H200, SEED, "fp4", "fp4", 8),
    (H200, MIXTRAL, "fp4", "fp4", 2),
    (H200, QWEN, "fp4", "fp4", 8),
    (H200, QWEN, "nvfp4", "fp4", 4),
    (A100, QWEN, "fp4", ("bf16", "fp4"), 8),
    (A100, SMALL_HEADS, "bf16", "fp4", 1),
    (L4, SMALL_HEADS, "fp4", ("fp4", "bf16"), 4),
    (L4, QWEN, "bf16", "bf16", 1),
    (B200, SEED, "fp4", ("fp4", "bf16"), 1),
    (B200, QWEN, "bf16", "fp4", 8),
    (RTX5090, QWEN, "fp4", "fp4", 1),
    (RTX5090, SMALL_HEADS, "bf16", "bf16", 8),
    (H200, QWEN, "fp8", "bf16", 1),
    (H200, MIXTRAL, "int4", "fp4", 8),
    (H200, QWEN, "int4_asym", ("bf16", "fp4"), 4),
    (H200, SMALL_HEADS, "mxfp4", "fp4", 2),
    (H200, SEED, "nvfp4", "fp4", 1),
    (A100, QWEN, "int4_asym", "bf16", 1),
    (A100, SMALL_HEADS, "fp8", "fp4", 8),
    (L4, QWEN, "nvfp4", "fp4", 2),
    (B200, QWEN, "mxfp4", "fp4", 1),
    (RTX5090, SMALL_HEADS, "int4", "bf16", 4),
    (H200, QWEN, "fp4", "k8v4:rotated", 1),
    (H200, OLMOE, "fp4", "fp4", 1),
    (H200, GPT_OSS, "mxfp4", "bf16", 1),
    (H200, GPT_OSS, "bf16", "fp4", 8),
    (L4, GPT_OSS, "mxfp4", "fp4", 2),
    (H200, SEED, "fp4", "int8", 1),
    (H200, QWEN, "fp4", "int4_asym", 1),
    (A100, QWEN, "fp4", ("nvfp4", "fp8"), 8),
    (L4, SMALL_HEADS, "fp4", ("int4", "mxfp4"), 2),
    (B200, QWEN, "fp4", ("mxfp4", "int4_asym"), 1),
    (RTX5090, QWEN, "fp4", "nvfp4:rotated", 1),
]
DENSE = {"K": 256, "TOKENS": 1, "W_FORMAT": 1, "BATCH": 1, "STAGES": 2, "WARPS": 2}
EXPERTS = {"HIDDEN": 256, "WIDTH": 256, "EXPERTS": 8, "TOP_K": 2, "RENORMALIZE": 1}
EXPERTS |= {"W_FORMAT": 1, "BATCH": 1, "STAGES": 2, "WARPS": 2}
ATTENTION = {"HEADS": 8, "KV_HEADS": 4, "HEAD_DIM": 128, "PAGE": 16, "K_FORMAT": 0, "V_FORMAT": 0}
ATTENTION |= {"WARPS": 4, "STAGES": 3, "LEAST": 64, "FUSED": 1, "SCATTERED": 0}
SAMPLE = {"CLUSTER": 8, "IN_SHARED": 1, "MAX_LOGPROBS": 100}
"""Legal macros, of which the tests below change one."""

REGISTERS = 65536
BLOCKS = 2
"""Registers of a multiprocessor, and the blocks that share it, but for rings that fill its
memory, for grouped experts, for blocks that take more than half of it, and for blocks of half its
threads."""

PREPARED = [tuple(W_CODES[f] for f in pair) for pair in KERNELS]
STATIC_BYTES = {
    "grouped_gate_up": 1280,
    "grouped_down": 1280,
    "gate_up": 256,
    "down": 256,
    "experts": 256,
    "experts_qkv": 256,
    "sample": STATIC_SHARED_BYTES,
}  # room for shared memory that is not dynamic
SPILLS: dict[str, str] = {}  # step -> what spills, by the compiler that setup.cfg pins


def all_steps(known: dict[str, str]) -> pytest.MarkDecorator:
    """`parametrize` over STEPS; `known` says which are expected to fail, and why."""
    params = []
    for step in STEPS:
        gpu, shape, weights, kv, seqs = step
        formats = kv if isinstance(kv, str) else "+".join(kv)
        name = f"{gpu.architecture}-{shape.name}-{weights}-{formats}-{seqs}"
        marks = [pytest.mark.xfail(reason=known[name], strict=True)] if name in known else []
        params.append(pytest.param(step, id=name, marks=marks))
    return pytest.mark.parametrize("step", params)


def test_long_contexts_fill_the_gpu() -> None:
    """32 parts a head; but behind the experts' kernel, beside which nothing fits, as many as there
    is room for."""

    def grids(weights: str, kv: str) -> list[tuple[int, ...]]:
        found = launches(QWEN, weights, kv, 1, True, 132, H200.shared)
        return [x.grid for x in found if x.kernel.name == "attention"]

    assert grids("fp4", "fp4") == [(32, 4, 1)] * 4
    assert grids("bf16", "fp4") == [(32, 4, 1)] * 2 + [(66, 4, 1)] * 2
    assert grids("bf16", "bf16") == [(32, 4, 1)] * 4


@needs_nvrtc
@all_steps(SPILLS)
def test_no_spills_and_few_registers(step: tuple[GPU, Shape, str, Format, int]) -> None:
    gpu, shape, weights, kv, seqs = step
    step_launches = launches(shape, weights, kv, seqs, gpu.bulk, gpu.multiprocessors, gpu.shared)
    for launch in dict.fromkeys(step_launches):
        kernel = launch.kernel
        usage = compiled(kernel, gpu)[kernel.name]
        assert usage.spilled == 0, f"{kernel} spills {usage.spilled} bytes"
        macros = dict(kernel.macros)
        alone = macros.get("BULK") == 1 and macros.get("RESIDENT") == 0
        alone |= kernel.name.startswith("grouped") or 2 * launch.shared > gpu.shared
        each = macros.get("BLOCKS_EACH", 1)
        beside = each if alone else 1 if launch.threads == 1024 else BLOCKS
        budget = REGISTERS // beside // launch.threads
        room = (gpu.shared + BLOCK_BYTES) // each - BLOCK_BYTES
        assert usage.shared + launch.shared <= room, f"{kernel}: {room} bytes"
        assert usage.registers <= budget, f"{kernel}: {usage.registers} registers of {budget}"


def compiled(kernel: Specialised, gpu: GPU) -> dict[str, Usage]:
    return compile_kernels(kernel.stem, gpu.architecture, dict(kernel.macros))


@all_steps({})
def test_shared_memory_fits(step: tuple[GPU, Shape, str, Format, int]) -> None:
    """Dynamic shared memory of every launch, with room for static arrays."""
    gpu, shape, weights, kv, seqs = step
    for launch in launches(shape, weights, kv, seqs, gpu.bulk, gpu.multiprocessors, gpu.shared):
        wanted = launch.shared + STATIC_BYTES.get(launch.kernel.name, 0)
        assert wanted <= gpu.shared, f"{launch.kernel} wants {wanted} bytes of {gpu.shared}"


def test_every_source_is_launched() -> None:
    stems = {path.stem for path in folder("cuda_src").glob("*.cu")}
    asked = {x.kernel.stem for x in launches(OLMOE, "fp4", "fp4", 1, True, 132, H200.shared)}
    assert stems - asked == {"roofline", "prepare"}  # a bench, and loading: see below


@needs_nvrtc
@pytest.mark.parametrize("gpu", [A100, L4, H200, B200, RTX5090], ids=lambda gpu: gpu.architecture)
def test_roofline_compiles(gpu: GPU) -> None:
    assert compiled(Specialised("roofline", "roofline", ()), gpu)["roofline"].spilled == 0


@needs_nvrtc
@pytest.mark.parametrize("gpu", [A100, L4, H200, B200, RTX5090], ids=lambda gpu: gpu.architecture)
@pytest.mark.parametrize(("source", "target"), PREPARED)
def test_prepare_compiles(gpu: GPU, source: int, target: int) -> None:
    for paired in (0, 1):
        macros = (("SOURCE", source), ("W_FORMAT", target), ("PAIRED", paired))
        assert compiled(Specialised("prepare", "prepare", macros), gpu)["prepare"].spilled == 0


@needs_nvrtc
@pytest.mark.parametrize(
    ("stem", "macros", "message"),
    [
        ("route", {"K": 100, "EXPERTS": 8, "WARPS": 4}, "route needs K"),
        ("route", {"K": 128, "EXPERTS": 8, "WARPS": 2}, "route needs WARPS"),
        ("qkv", {"K": 256, "TOKENS": 1, "WARPS": 8}, "define W_FORMAT"),
        ("lm_head", DENSE | {"W_FORMAT": 7}, "define W_FORMAT as 0 to 6"),
        (
            "attention",
            ATTENTION | {"HEADS": 68},
            "1 to 16 query heads",
        ),
        ("attention", ATTENTION | {"K_FORMAT": 8}, "define K_FORMAT"),
        ("attention", ATTENTION | {"KV_GROUP": 8}, "KV_GROUP 16, 32, 64, or 128"),
        ("attention", ATTENTION | {"CLUSTER": 3}, "CLUSTER 1, 2, 4 or 8"),
        ("embed", {"K": 129}, "even K"),
        ("qk_norm", {"Q_ROWS": 8, "K_ROWS": 6}, "multiples of 4"),
        *((stem, DENSE | {"K": 200}, "multiples of 128") for stem in ("qkv", "output", "lm_head")),
        *((stem, DENSE | {"TOKENS": 9}, "TOKENS 1 to 8") for stem in ("qkv", "output", "lm_head")),
        ("qkv", DENSE | {"BATCH": 0}, "1 or more"),
        ("output", DENSE | {"BATCH": 16, "WARPS": 4}, "finishes one row"),
        ("experts", EXPERTS | {"WIDTH": 192}, "HIDDEN and WIDTH"),
        ("prepare", {"SOURCE": 1, "W_FORMAT": 0, "PAIRED": 0}, "prepare makes"),
        ("prepare", {"SOURCE": 0, "W_FORMAT": 1}, "define PAIRED"),
        ("experts", EXPERTS | {"TOP_K": 9}, "TOP_K 1 to 32"),
        ("experts", EXPERTS | {"TOKENS": 1}, "TOKENS 2 to 8"),
        ("experts", EXPERTS | {"TOKENS": 4, "COLUMNS": 5}, "COLUMNS 1 to 4"),
        ("experts", EXPERTS | {"TOKENS": 4, "COLUMNS": 4, "RESIDENT": 1}, "that goes round"),
        ("sample", SAMPLE | {"CLUSTER": 9}, "CLUSTER 1 to 8"),
        ("sample", SAMPLE | {"MAX_LOGPROBS": 1025}, "a thread sorts one"),
    ],
)
def test_a_wrong_macro_is_named(stem: str, macros: dict[str, int], message: str) -> None:
    with pytest.raises(Exception, match=message):
        compile_kernels(stem, "sm_90a", macros)
