"""The whole decode step on the CPU, kernels, launches and buffers, against the NumPy model."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from npmoe.batch import Batch
from npmoe.config import KVCacheConfig, WeightsPolicy, parse_weights
from npmoe.errors import NumericalError
from npmoe.formats.fragments import RECORD_BYTES, to_fragments
from npmoe.formats.quant_tensor import QuantTensor, quantize
from npmoe.kv.storage import KVCache
from npmoe.models import decode, stream
from npmoe.models.layers import CausalLM
from npmoe.models.specs import AttentionSpec, ModelSpec
from npmoe.ops import sampler
from npmoe.ops.linear import prepare_linear
from npmoe.ops.quantize import to_kernel_pages
from npmoe.ops.sample import Chooser, report
from npmoe.sampling import SamplingParams
from tests.cuda.build import Kernel, kernel, launch
from tests.cuda.steps import Shape, decode_on_cpu, empty_weights
from tests.cuda.test_experts import interleaved
from tests.cuda.test_lm_head import greedy
from tests.helpers import relative_error, with_attention

PAGE, PAGES_EACH = 16, 6
SHAPE = Shape("tiny", 256, 2, 4, 2, 64, 8, 3, 128, 200)
MIXED = {"attention": "fp8", "experts": "mxfp4", "lm_head": "int4_asym"}


def make_weights(
    policy: WeightsPolicy, norms_over_projections: bool = False, sinks: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same weights for the NumPy model and for the step."""
    rng = np.random.default_rng(11)
    s, plain, step = SHAPE, {}, {}

    def matrix(part: str, *shape: int) -> QuantTensor:
        x = rng.standard_normal(shape) * 1.5 / shape[-1] ** 0.5
        return quantize(x.astype(np.float32), policy[part])

    def put(name: str, w: QuantTensor) -> None:
        plain[name] = prepare_linear(w)
        step[name] = to_fragments(interleaved(w) if name.endswith("gate_up_proj") else w)

    def vector(name: str, size: int) -> None:
        plain[name] = step[name] = rng.uniform(0.5, 1.5, size).astype(np.float32)

    table = quantize(rng.standard_normal((s.vocab, s.hidden)).astype(np.float32), "bf16")
    plain["embed_tokens"], step["embed_tokens"] = table, table.codes
    for i in range(s.layers):
        layer = f"layers.{i}."
        vector(layer + "input_layernorm", s.hidden)
        vector(layer + "post_attention_layernorm", s.hidden)
        heads = (s.heads, s.kv_heads) if norms_over_projections else (1, 1)
        vector(layer + "q_norm", heads[0] * s.head_dim)
        vector(layer + "k_norm", heads[1] * s.head_dim)
        if sinks:
            vector(layer + "sinks", s.heads)
        put(
            layer + "qkv_proj",
            matrix("attention", (s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
        )
        put(layer + "o_proj", matrix("attention", s.hidden, s.heads * s.head_dim))
        router = quantize(rng.standard_normal((s.experts, s.hidden)).astype(np.float32), "bf16")
        plain[layer + "router"], step[layer + "router"] = prepare_linear(router), router.codes
        put(layer + "gate_up_proj", matrix("experts", s.experts, 2 * s.width, s.hidden))
        put(layer + "down_proj", matrix("experts", s.experts, s.hidden, s.width))
    vector("norm", s.hidden)
    put("lm_head", matrix("lm_head", s.vocab, s.hidden))
    return plain, step


def make_cache(kv: str | tuple[str, str], seqs: int) -> KVCache:
    config = KVCacheConfig.parse(kv)
    pages = PAGES_EACH * seqs
    return KVCache(SHAPE.layers, pages, PAGE, SHAPE.kv_heads, SHAPE.head_dim, config)


@pytest.mark.parametrize("clip", [None, 1.5])
def test_norms_over_projections(clip: float | None) -> None:
    spec = with_attention(SHAPE.spec(), [{"qk_norm": "projection", "clip": clip}] * 2)
    check_step(spec, "fp4", "bf16", (20, 3), True, False)


def test_keys_and_values_that_are_not_finite_are_named() -> None:
    """Where asked for; layer 1 gets its projections after layer 0."""
    _, on_device = make_weights(parse_weights("fp4"))
    on_device["layers.1.input_layernorm"][5] = np.inf
    tables = np.arange(2 * PAGES_EACH, dtype=np.int32).reshape(2, -1)

    def run(function: Kernel, *arguments: Any, **options: Any) -> None:
        launch(function, *arguments, **options, seed=3)

    with decode_on_cpu(kernel, run, bulk=True, multiprocessors=5):
        cache = make_cache("bf16", 2).layers
        step = decode.DecodeStep(SHAPE.spec(), on_device, cache, tables)
        step.seq_lens[:] = 20, 7
        step.enqueue()
        step.checked_rows = 2
        with pytest.raises(NumericalError, match="layer 1: a key or value of position 21 is NaN"):
            step.enqueue()
        step.checked_rows = 0
        step.enqueue()


def test_windows_and_sinks() -> None:
    """A window on the first layer alone, shorter than the sequences."""
    spec = with_attention(SHAPE.spec(), [{"window": 9, "sinks": True}, {"sinks": True}])
    check_step(spec, "bf16", "fp4", (40, 5), True, False)


@pytest.mark.parametrize(
    ("weights", "kv", "lengths", "bulk", "grouped"),
    [
        ("fp4", "fp4", (70,), True, False),
        ("bf16", ("bf16", "fp4"), (17, 1, 64), False, True),
        (MIXED, "fp4", (9, 40), True, False),
        ({"attention": "int4", "experts": "nvfp4", "lm_head": "fp8"}, "bf16", (3,), False, False),
        ("fp4", "bf16", (9, 4, 1, 30, 2, 17, 8, 3), True, True),
        ("fp4", "k8v4:rotated", (40, 9), True, False),
    ],
)
def test_a_step_is_that_of_the_model(
    weights: str | WeightsPolicy,
    kv: str | tuple[str, str],
    lengths: tuple[int, ...],
    bulk: bool,
    grouped: bool,
) -> None:
    check_step(SHAPE.spec(), weights, kv, lengths, bulk, grouped)


def check_step(
    spec: ModelSpec,
    weights: str | WeightsPolicy,
    kv: str | tuple[str, str],
    lengths: tuple[int, ...],
    bulk: bool,
    grouped: bool,
) -> None:
    """Four steps, each feeding the next its greedy token; the prompt runs in NumPy."""
    attention = spec.layers[0].attention
    assert isinstance(attention, AttentionSpec)
    policy = parse_weights(weights)
    plain, on_device = make_weights(policy, attention.qk_norm == "projection", attention.sinks)
    model, seqs = CausalLM(spec, plain), len(lengths)
    rng = np.random.default_rng(5)
    tables = rng.permutation(PAGES_EACH * seqs).astype(np.int32).reshape(seqs, -1)
    cache, expected_cache = make_cache(kv, seqs), make_cache(kv, seqs)

    def forward(tokens: np.ndarray, counts: np.ndarray, total: np.ndarray) -> np.ndarray:
        """Logits of the last of each sequence's `counts` tokens, which end at `total`."""
        starts = total - counts
        spans = [np.arange(a, b, dtype=np.int32) for a, b in zip(starts, total, strict=True)]
        slots = [t[p // PAGE] * PAGE + p % PAGE for t, p in zip(tables, spans, strict=True)]
        edges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        batch = Batch(
            *(tokens, np.concatenate(spans), np.concatenate(slots), edges, total, tables),
            (edges[1:] - 1).astype(np.int32),
        )
        return model.forward(batch, expected_cache.layers)

    total = np.array(lengths, np.int32)
    tokens = forward(rng.integers(0, SHAPE.vocab, total.sum()).astype(np.int32), total, total)
    tokens = tokens.argmax(axis=1).astype(np.int32)
    for ours, theirs in zip(cache.layers, expected_cache.layers, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            for x, y in zip(a.arrays(), to_kernel_pages(b).arrays(), strict=True):
                x[...] = y

    def run(function: Kernel, *arguments: Any, **options: Any) -> None:
        launch(function, *arguments, **options, seed=3)

    with decode_on_cpu(kernel, run, bulk, multiprocessors=5):
        tuning = decode.Tuning(grouped=grouped)
        step = decode.DecodeStep(model.spec, on_device, cache.layers, tables, tuning=tuning)
        step.tokens[:], step.seq_lens[:] = tokens, total
        for i in range(4):
            total = total + 1
            expected = forward(tokens, np.ones(seqs, np.int32), total)
            step.enqueue()
            assert relative_error(step.logits, expected) < 5e-3
            assert (step.seq_lens == total).all()
            assert (step.history[:, i] == tokens).all()
            tokens = expected.argmax(axis=1).astype(np.int32)
            assert (greedy(step.best) == tokens).all()


ONE_LAYER = Shape("one-layer", 256, 1, 32, 8, 128, 8, 3, 128, 200)
FEW_KV_HEADS = replace(ONE_LAYER, kv_heads=4)


@pytest.mark.parametrize(
    ("shape", "kv", "seqs", "contexts", "blocks"),
    [
        (ONE_LAYER, "fp4", 1, [1, 1025, 8192], (32, 8, 1)),
        (ONE_LAYER, "fp4", 2, [1, 1025, 4096], (16, 8, 2)),  # 256 of the 264 that run at once
        (ONE_LAYER, "fp4", 8, [1], (4, 8, 8)),  # clusters of 8 would be 512 blocks
        (ONE_LAYER, "bf16", 8, [1], (2, 8, 8)),  # one block a multiprocessor
        (FEW_KV_HEADS, "fp4", 8, [1, 1024], (8, 4, 8)),
    ],
)
def test_several_sequences_take_no_more_blocks_than_run_at_once(
    shape: Shape, kv: str, seqs: int, contexts: list[int], blocks: tuple[int, ...]
) -> None:
    found: list[tuple[int, ...]] = []

    def launch(kernel: str, grid: tuple[int, ...], *_: Any, **__: Any) -> None:
        if kernel == "attention":
            found.append(grid)

    spec = shape.spec()
    cache = KVCache(1, 2, PAGE, shape.kv_heads, shape.head_dim, KVCacheConfig.parse(kv))
    with decode_on_cpu(lambda _, name, **__: name, launch, True, 132, 227 << 10):
        table = np.zeros((seqs, 2), np.int32)
        step = decode.DecodeStep(spec, empty_weights(shape, "fp4"), cache.layers, table)
        assert step.contexts == contexts
        step.for_context(8192).enqueue()
    assert found == [blocks]


@pytest.mark.parametrize("weights", ["fp4", "bf16", {"attention": "fp8", "experts": "fp4"}])
def test_experts_in_one_kernel_or_two(weights: str | WeightsPolicy) -> None:
    """Two steps each, with rings too small for a block's weights; tokens are fed back."""
    policy = parse_weights(weights if isinstance(weights, str) else weights | {"lm_head": "bf16"})
    _, on_device = make_weights(policy)
    names: list[str] = []

    def run(function: Kernel, *arguments: Any, **options: Any) -> None:
        names.append(function.name)
        launch(function, *arguments, **options, seed=3)

    chunk = 2 * RECORD_BYTES[policy["experts"]]
    small = {"CHUNK_BYTES": chunk, "NARROW_CHUNK_BYTES": chunk}
    small |= dict.fromkeys(("RING_BYTES", "NARROW_EXPERT_RING_BYTES"), 4 * (chunk + 16))
    layer = ["attention", "output", "route"]
    two, one, followed = (["gate_up", "down"], ["experts"], ["experts_qkv"])
    alone = one
    if policy["attention"] != policy["experts"]:
        followed, alone = [*two, "qkv"], two
    logits = []
    for tuning, between, last in (
        (decode.Tuning(one_kernel=False), [*two, "qkv"], two),
        (decode.Tuning(qkv_with_experts=False), [*one, "qkv"], one),
        (decode.Tuning(), followed, alone),
    ):
        cache, tables = make_cache("bf16", 1), np.arange(PAGES_EACH, dtype=np.int32)[None]
        with (
            decode_on_cpu(kernel, run, True, multiprocessors=5),
            patch.multiple(stream, **small),
        ):
            args = SHAPE.spec(), on_device, cache.layers, tables
            step = decode.DecodeStep(*args, tuning=tuning)
            step.tokens[:] = 7
            step.enqueue()
            names.clear()
            step.enqueue()
        logits.append(step.logits.copy())
        assert names == ["embed", "qkv", *layer, *between, *layer, *last, "lm_head"]
    assert relative_error(logits[1], logits[0]) < 1e-5
    assert relative_error(logits[2], logits[0]) < 1e-5


def test_more_blocks_than_multiprocessors_are_refused() -> None:
    _, on_device = make_weights(parse_weights("bf16"))
    cache, tables = make_cache("bf16", 1), np.arange(PAGES_EACH, dtype=np.int32)[None]
    args = SHAPE.spec(), on_device, cache.layers, tables
    with (
        decode_on_cpu(kernel, launch, True, multiprocessors=5),
        pytest.raises(ValueError, match="blocks = 6: legal values are 1 to 5"),
    ):
        decode.DecodeStep(*args, tuning=decode.Tuning(blocks=6))


def test_a_sampled_step_feeds_its_choice_back() -> None:
    """Four steps of two rows, one drawn with penalties and one greedy: tokens are those of the host
    by the same logits, counts grow on the device, and the next step reads the token."""
    _, on_device = make_weights(parse_weights("bf16"))
    cache, seqs, rng = make_cache("bf16", 2), 2, np.random.default_rng(8)
    tables = np.arange(PAGES_EACH * seqs, dtype=np.int32).reshape(seqs, PAGES_EACH)
    params = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=2.0, logprobs=4)
    texts = [rng.integers(0, SHAPE.vocab, 5).tolist() for _ in range(seqs)]
    ends = frozenset[int]()
    choosers = [
        Chooser(params.resolve({}), texts[0], 3, 2**40 + 7, 1, ends),
        Chooser(SamplingParams().resolve({}), texts[1], 3, 0, 0, ends),
    ]
    with (
        decode_on_cpu(kernel, launch, True, multiprocessors=3),
        patch.object(sampler, "CLUSTER", 2),
    ):
        greedy_step = decode.DecodeStep(SHAPE.spec(), on_device, cache.layers, tables)
        step = greedy_step.with_sampler(sampler.Sampler(4, SHAPE.vocab))
        assert step.sampler is not None
        step.sampler.set_rows(choosers)
        step.tokens[:], step.seq_lens[:] = [t[-1] for t in texts], 4
        for i in range(4):
            step.enqueue()
            tokens = greedy(step.best)
            assert step.history[:, i].tolist() == [t[-1] for t in texts]
            assert tokens.tolist() == [c.choose(step.logits[s]) for s, c in enumerate(choosers)]
            want = report(step.logits[0], int(tokens[0]), 4)
            got = sampler.read_report(step.sampler.report[0], int(tokens[0]), 4)
            assert got.logprob == pytest.approx(want.logprob, abs=1e-5)
            assert list(got.top) == list(want.top)
            for text, token in zip(texts, tokens, strict=True):
                text.append(int(token))
        counts = np.bincount(texts[0][3:], minlength=SHAPE.vocab)
        assert (step.sampler.states[0] >> 2 == counts).all()
