"""The decode step's kernels on a GPU, whole and in sequence, against the NumPy model."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from npmoe.batch import Batch
from npmoe.config import KVCacheConfig, RopeConfig, WeightsPolicy, parse_weights
from npmoe.formats.fragments import RECORD_BYTES
from npmoe.formats.quant_tensor import QuantTensor, quantize
from npmoe.kv.storage import KVCache
from npmoe.models import stream
from npmoe.models.decode import LONG_CONTEXT, DecodeStep, Tuning
from npmoe.models.kernel_layout import prepare_for_gpu, prepare_vector
from npmoe.models.layers import CausalLM
from npmoe.models.parameters import VECTOR, TensorNames, decoder_parameters
from npmoe.models.specs import AttentionSpec, ExpertSpec, LayerSpec, ModelSpec, RouterSpec
from npmoe.ops.experts import SwiGLU
from npmoe.ops.linear import prepare_linear
from npmoe.ops.quantize import KVPages, from_kernel_pages, to_kernel_pages
from npmoe.runtime.device import cupy, to_device
from npmoe.runtime.graphs import Graph
from npmoe.runtime.recording import recorded
from tests.helpers import with_attention

pytestmark = pytest.mark.gpu
PAGE, STEPS, LONG = 16, 4, 1500  # from LONG tokens on, the kernels for long contexts
TOLERANCE = {"bf16": 2e-3, "fp4": 1e-2}  # of a cache: a key or value may round the other way


def tiny_spec(head_dim: int, kv_heads: int = 2, heads: int = 8) -> ModelSpec:
    """Two layers, 16 experts of width 192 (padded on the GPU), top 4."""
    attention = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, qk_norm="head")
    layer = LayerSpec(attention, ExpertSpec(RouterSpec(16, 4, True), 192))
    return ModelSpec(256, 1000, 1e-6, RopeConfig(), 4096, (layer,) * 2, False)


def random_weights(spec: ModelSpec, policy: WeightsPolicy) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same random parameters prepared for the CPU and for the GPU."""
    rng = np.random.default_rng(1)
    cpu: dict[str, Any] = {}
    gpu: dict[str, Any] = {}
    for p in decoder_parameters(spec, TensorNames()):
        if p.part == VECTOR:
            cpu[p.name] = rng.uniform(0.5, 1.5, p.shape).astype(np.float32)
            gpu[p.name] = cupy().asarray(prepare_vector(p, cpu[p.name]))
            continue
        values = rng.standard_normal(p.shape, np.float32) * (1.5 / p.shape[-1] ** 0.5)
        w: QuantTensor = quantize(values, policy.get(p.part, "bf16"))
        cpu[p.name] = w if p.part == "table" else prepare_linear(w)
        gpu[p.name] = prepare_for_gpu(p, w.map_arrays(lambda a: to_device(a, "cuda")))
    return cpu, gpu


def on_gpu(pages: KVPages) -> KVPages:
    """The pages as kernels hold them, on the device."""
    return _with_arrays(pages, map(cupy().asarray, to_kernel_pages(pages).arrays()))


def from_gpu(pages: KVPages) -> KVPages:
    """The inverse of `on_gpu`."""
    return from_kernel_pages(_with_arrays(pages, (a.get() for a in pages.arrays())))


def _with_arrays(pages: KVPages, arrays: Iterable[Any]) -> KVPages:
    return replace(pages, **dict(zip(("codes", "scales", "zeros"), arrays, strict=False)))


CASES = [  # weights, kv, head_dim, sequences, context
    ("fp4", "fp4", 128, 1, 700),
    ("fp4", "fp4", 128, 1, 1),
    ("fp4", "fp4", 128, 8, 65),
    ("fp4", "fp4", 128, 1, 1700),
    ("bf16", "bf16", 128, 1, 1500),
    ("fp4", ("fp4", "bf16"), 128, 1, 1600),
    ("bf16", "fp4", 64, 4, 1600),
    ("fp4", "bf16", 128, 1, 64),
    ("bf16", "bf16", 128, 1, 63),
    ("bf16", "bf16", 64, 2, 300),
    ("fp4", ("bf16", "fp4"), 64, 2, 100),
    ("bf16", "fp4", 64, 8, 200),
    ("fp8", "bf16", 128, 1, 70),
    ("fp8", "fp4", 128, 8, 33),
    ("int4", "fp4", 128, 1, 40),
    ("int4", "bf16", 64, 4, 40),
    ("int4_asym", "fp4", 128, 1, 90),
    ("int4_asym", "bf16", 128, 2, 20),
    ("mxfp4", "fp4", 128, 1, 50),
    ("mxfp4", "bf16", 64, 8, 30),
    ("nvfp4", "fp4", 128, 1, 80),
    ("nvfp4", "bf16", 128, 4, 30),
    ({"experts": "mxfp4", "attention": "fp8", "lm_head": "int4"}, "fp4", 128, 1, 60),
    ({"experts": "nvfp4", "attention": "int4_asym"}, "fp4", 128, 2, 60),  # lm_head is bf16
]


OTHER_CACHES = [  # the same
    ("fp4", "k8v4", 128, 1, 700),
    ("bf16", "int8", 64, 4, 300),
    ("fp4", "fp8", 128, 8, 65),
    ("fp4", "mxfp4", 128, 1, 1700),
    ("fp4", KVCacheConfig("nvfp4", "nvfp4", 64), 64, 2, 200),
    ("bf16", "int4", 128, 1, 1600),
    ("fp4", "int4_asym", 128, 2, 100),
    ("fp4", ("int4_asym", "fp8"), 64, 1, 90),
    ("bf16", "fp4:rotated", 128, 1, 700),
    ("fp4", "k8v4:rotated", 64, 2, 200),
    ("bf16", KVCacheConfig("fp4", "int4", 64), 128, 1, 1500),
    ("bf16", KVCacheConfig("int8", "fp4", 128), 128, 1, 200),
    ("bf16", KVCacheConfig("fp4", "int8", 16), 128, 1, 300),
    ("bf16", KVCacheConfig("int8", "nvfp4", 16), 64, 2, 90),
]
GROUPED = [(*case, True) for case in CASES if case[3] > 1]


@pytest.mark.parametrize(
    ("weights", "kv", "head_dim", "seqs", "context", "grouped"),
    [*((*c, False) for c in CASES + OTHER_CACHES), *GROUPED],
)
def test_steps_agree_with_numpy(weights, kv, head_dim, seqs, context, grouped) -> None:
    check_steps(tiny_spec(head_dim), weights, kv, seqs, context, Tuning(grouped=grouped))


@pytest.mark.parametrize("clip", [None, 2.0])
def test_norms_over_projections(clip: float | None) -> None:
    spec = with_attention(tiny_spec(128), [{"qk_norm": "projection", "clip": clip}] * 2)
    check_steps(spec, "fp4", "fp4", 2, 90, Tuning())


@pytest.mark.parametrize(
    ("kv", "head_dim", "seqs", "context"),
    [("fp4", 64, 1, 700), ("bf16", 128, 1, 1700), ("k8v4", 64, 8, 300)],
)
def test_windows_and_sinks(kv: str, head_dim: int, seqs: int, context: int) -> None:
    """A window on the first layer alone, shorter than the sequences."""
    spec = with_attention(tiny_spec(head_dim), [{"window": 77, "sinks": True}, {"sinks": True}])
    check_steps(spec, "fp4", kv, seqs, context, Tuning())


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 2, 64), (12, 1, 128)])
def test_more_than_eight_query_heads_of_a_kv_head(heads: int, kv_heads: int, head_dim: int) -> None:
    spec = with_attention(tiny_spec(head_dim, kv_heads, heads), [{"window": 50}, {}])
    check_steps(spec, "bf16", "k8v4", 2, 120, Tuning())


@pytest.mark.parametrize(
    ("weights", "seqs", "grouped"), [("mxfp4", 1, False), ("fp4", 4, True), ("bf16", 2, False)]
)
def test_biases_and_clamped_experts_of_odd_widths(weights: str, seqs: int, grouped: bool) -> None:
    """gpt_oss's experts: of a hidden size that fills a part of the last 128 columns."""
    spec = tiny_spec(64)
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, ExpertSpec)
    router = replace(mlp.router, bias=True)
    mlp = replace(mlp, router=router, bias=True, activation=SwiGLU(1.702, 0.7, 1.0))
    spec = replace(spec, hidden_size=320, layers=(replace(spec.layers[0], mlp=mlp),) * 2)
    check_steps(spec, weights, "fp4", seqs, 60, Tuning(grouped=grouped))


@pytest.mark.parametrize("followed", [True, False])
@pytest.mark.parametrize(
    ("weights", "kv", "context"),
    [
        ("fp4", "fp4", 40),
        ("fp4", "fp4", 1700),
        ("bf16", "bf16", 1600),
        ("nvfp4", ("fp4", "bf16"), 300),
        ("int4_asym", ("bf16", "fp4"), 64),
        ("fp8", "fp4", 30),
    ],
)
def test_steps_of_large_experts_agree_with_numpy(weights, kv, context, followed) -> None:
    """In one kernel, whose rings are too small for a block's weights, with the next layer's qkv or
    not; and 8 heads on one KV head."""
    chunk = 2 * RECORD_BYTES[weights]
    small = {"CHUNK_BYTES": chunk, "NARROW_CHUNK_BYTES": chunk}
    small |= dict.fromkeys(("RING_BYTES", "NARROW_EXPERT_RING_BYTES"), 4 * (chunk + 16))
    with patch.multiple(stream, **small):
        tuning = Tuning(blocks=3, qkv_with_experts=followed)
        step = check_steps(tiny_spec(128, kv_heads=1), weights, kv, 1, context, tuning)
        with recorded() as launches:
            step.enqueue()
    names = [launch.kernel.name for launch in launches]
    assert sum(name.startswith("experts") for name in names) == 2
    assert sum(name.startswith("experts_qkv") for name in names) == followed


def check_steps(
    spec: ModelSpec,
    weights: str | WeightsPolicy,
    kv: str | tuple[str, str] | KVCacheConfig,
    seqs: int,
    context: int,
    tuning: Tuning,
) -> DecodeStep:
    """Steps behind sequences of about `context` tokens, and the cache after them; the step."""
    attention = spec.layers[0].attention
    assert isinstance(attention, AttentionSpec)
    cpu, gpu = random_weights(spec, parse_weights(weights))
    model = CausalLM(spec, cpu)
    pages = -(-(context + STEPS) // PAGE)
    heads = attention.num_kv_heads, attention.head_dim
    cache = KVCache(2, pages * seqs, PAGE, *heads, KVCacheConfig.parse(kv))
    rng = np.random.default_rng(2)
    tables = rng.permutation(pages * seqs).astype(np.int32).reshape(seqs, pages)
    lengths = np.array([max(1, context - 3 * s) for s in range(seqs)], np.int32)
    for s, length in enumerate(lengths):
        ids, span = rng.integers(0, 1000, length), np.arange(length, dtype=np.int32)
        slots = tables[s][span // PAGE] * PAGE + span % PAGE
        ends = np.array([0, length], np.int32)
        model.forward(
            Batch(ids, span, slots, ends, ends[1:], tables[s : s + 1], span[:0]), cache.layers
        )
    tolerance = TOLERANCE["bf16" if kv == "bf16" else "fp4"]
    device_cache = [(on_gpu(k), on_gpu(v)) for k, v in cache.layers]
    step = DecodeStep(spec, gpu, device_cache, cupy().asarray(tables), tuning=tuning)
    step = step.for_context(LONG_CONTEXT if context >= LONG else context)
    tokens = rng.integers(0, 1000, seqs).astype(np.int32)
    step.tokens.set(tokens)
    step.seq_lens.set(lengths)
    for t in range(STEPS):
        positions = lengths + t
        slots = tables[np.arange(seqs), positions // PAGE] * PAGE + positions % PAGE
        ends, rows = np.arange(seqs + 1, dtype=np.int32), np.arange(seqs, dtype=np.int32)
        batch = Batch(tokens, positions, slots, ends, positions + 1, tables, rows)
        expected = model.forward(batch, cache.layers)
        step.enqueue()
        found = step.logits.get()
        error = np.abs(found - expected).max(axis=1) / np.abs(expected).max(axis=1)
        assert error.max() < tolerance, f"step {t}"
        tokens = expected.argmax(axis=1).astype(np.int32)
        step.best[...] = 0  # the reference chooses: teacher-forced
        step.tokens.set(tokens)
    for mine, theirs in zip(cache.layers, device_cache, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            found = from_gpu(b)
            assert (a.codes != found.codes).mean() < 0.01  # roundings that fell the other way
            if a.scales is not None:
                assert found.scales is not None
                same = np.isclose(a.scales.astype(np.float32), found.scales, rtol=2e-3, atol=1e-6)
                assert (~same).mean() < 0.01
    return step


@pytest.mark.parametrize("weights", ["fp4", "bf16"])
@pytest.mark.parametrize("seqs", [2, 4, 8])
def test_a_row_depends_on_no_other_and_not_on_the_graph(seqs: int, weights: str) -> None:
    """The first row's logits, bit for bit, while the others' tokens and experts change."""
    spec, rng = tiny_spec(128), np.random.default_rng(4)
    _, gpu = random_weights(spec, parse_weights(weights))
    cache = KVCache(2, 2 * seqs, PAGE, 2, 128, KVCacheConfig.parse("bf16"))
    device_cache = [(on_gpu(k), on_gpu(v)) for k, v in cache.layers]
    tables = cupy().asarray(np.arange(2 * seqs, dtype=np.int32).reshape(seqs, 2))
    step = DecodeStep(spec, gpu, device_cache, tables, tuning=Tuning(grouped=True))
    graph = Graph(step.enqueue)
    seen = set()
    for tokens in rng.integers(0, 1000, (3, seqs)).astype(np.int32):
        for run in (step.enqueue, graph.replay):
            tokens[0] = 7
            with graph.stream:
                step.best[...] = 0
                step.tokens.set(tokens)
                step.seq_lens.set(np.full(seqs, 5, np.int32))
                run()
            graph.stream.synchronize()
            seen.add(step.logits[0].get().tobytes())
    assert len(seen) == 1
