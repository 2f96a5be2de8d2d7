"""Checks the GPU decode step against the NumPy model, then times it at full size.

Weights are random. `--check` compares logits on a small copy of the shape token by token; `--time`
builds the full shape on the device and reports milliseconds a token beside the memory floor.
"""

import argparse
import json
import time
from typing import Any

import cupy as cp
import numpy as np

from npmoe.batch import Batch
from npmoe.config import KVCacheConfig, RopeConfig
from npmoe.formats.fragments import RECORD_BYTES, to_fragments
from npmoe.formats.quant_tensor import QuantTensor, quantize
from npmoe.kv.storage import KVCache, kv_bytes_per_token
from npmoe.models.decode import DecodeStep, Tuning
from npmoe.models.layers import CausalLM
from npmoe.models.specs import AttentionSpec, ExpertSpec, LayerSpec, ModelSpec, RouterSpec
from npmoe.ops.linear import prepare_linear
from npmoe.ops.quantize import KVPages
from npmoe.runtime.graphs import Graph


def make_spec(hidden, layers, heads, kv_heads, dim, experts, top_k, width, vocab, theta=1e6):
    attention = AttentionSpec(heads, kv_heads, dim, dim**-0.5, qk_norm="head")
    layer = LayerSpec(attention, ExpertSpec(RouterSpec(experts, top_k, True), width))
    rope = RopeConfig(rope_theta=theta)
    return ModelSpec(hidden, vocab, 1e-6, rope, 1 << 17, (layer,) * layers, False)


SHAPES = {
    "qwen3-30b-a3b": (2048, 48, 32, 4, 128, 128, 8, 768, 151936),
    "seed-67b": (4096, 32, 32, 8, 128, 64, 8, 2560, 128256),
    "mixtral-8x7b": (4096, 32, 32, 8, 128, 8, 2, 14336, 32000),
}


def gpu(pages):
    return KVPages(pages.format, *(None if a is None else cp.asarray(a) for a in (pages.codes, pages.scales, pages.zeros)))


def check(fmt, kv, dim, seqs, context, page=16):
    spec = make_spec(256, 2, 8, 2, dim, 16, 4, 128, 1000)
    rng = np.random.default_rng(1)
    a, m = spec.layers[0].attention, spec.layers[0].mlp
    def mat(*shape):
        return quantize((rng.standard_normal(shape) * 1.5 / shape[-1] ** 0.5).astype(np.float32), fmt)
    cpu, dev = {}, {}
    def vec(name, n):
        cpu[name] = rng.uniform(0.5, 1.5, n).astype(np.float32); dev[name] = cp.asarray(cpu[name])
    def put(name, w, interleave=False):
        cpu[name] = prepare_linear(w)
        f = w
        if interleave:
            n = w.shape[-2] // 2
            order = np.stack([np.arange(n), np.arange(n) + n], 1).ravel()
            f = w.map_arrays(lambda x: x[..., order, :])
        dev[name] = to_fragments(f).map_arrays(cp.asarray)
    table = quantize(rng.standard_normal((1000, 256)).astype(np.float32), "bf16")
    cpu["embed_tokens"] = table; dev["embed_tokens"] = cp.asarray(table.codes)
    for i in range(2):
        p = f"layers.{i}."
        vec(p + "input_layernorm", 256); vec(p + "post_attention_layernorm", 256); vec(p + "q_norm", dim); vec(p + "k_norm", dim)
        put(p + "qkv_proj", mat((a.num_heads + 2 * a.num_kv_heads) * dim, 256)); put(p + "o_proj", mat(256, a.num_heads * dim))
        r = quantize((rng.standard_normal((16, 256)) * 0.1).astype(np.float32), "bf16")
        cpu[p + "router"] = prepare_linear(r); dev[p + "router"] = cp.asarray(r.codes)
        put(p + "gate_up_proj", mat(16, 256, 256), True); put(p + "down_proj", mat(16, 256, 128))
    vec("norm", 256); put("lm_head", mat(1000, 256))
    model = CausalLM(spec, cpu)
    n = -(-(context + 8) // page)
    cfg = KVCacheConfig.parse(kv)
    cache = KVCache(2, n * seqs + 1, page, a.num_kv_heads, dim, cfg)
    tables = np.random.default_rng(2).permutation(n * seqs).astype(np.int32).reshape(seqs, n)
    lens = [context - 3 * s for s in range(seqs)]
    for s in range(seqs):
        span = np.arange(lens[s], dtype=np.int32)
        ids = rng.integers(0, 1000, lens[s]).astype(np.int32)
        model.forward(Batch(ids, span, tables[s][span // page] * page + span % page, np.array([0, lens[s]], np.int32), np.array([lens[s]], np.int32), tables[s : s + 1], np.array([lens[s] - 1], np.int32)), cache.layers)
    gcache = [(gpu(k), gpu(v)) for k, v in cache.layers]
    step = DecodeStep(spec, dev, gcache, cp.asarray(tables), tuning=Tuning(splits=8))
    first = rng.integers(0, 1000, seqs).astype(np.int32)
    step.tokens[:] = cp.asarray(first); step.seq_lens[:] = cp.asarray(np.array(lens, np.int32))
    step.enqueue(); cp.cuda.get_current_stream().synchronize()  # compiles; the state is set again below
    gcache2 = [(gpu(k), gpu(v)) for k, v in cache.layers]
    for (k, v), (k2, v2) in zip(gcache, gcache2):
        for x, y in zip(k.arrays() + v.arrays(), k2.arrays() + v2.arrays()): x[...] = y
    step.tokens[:] = cp.asarray(first); step.seq_lens[:] = cp.asarray(np.array(lens, np.int32)); step.best[:] = 0; step.steps[:] = 0
    tokens = first; worst = 0.0; same = 0
    for t in range(4):
        pos = np.array([l + t for l in lens], np.int32)
        slots = np.array([tables[s][pos[s] // page] * page + pos[s] % page for s in range(seqs)], np.int32)
        ref = model.forward(Batch(tokens, pos, slots, np.arange(seqs + 1, dtype=np.int32), pos + 1, tables, np.arange(seqs, dtype=np.int32)), cache.layers)
        step.enqueue(); cp.cuda.get_current_stream().synchronize()
        got = step.logits.get(); worst = max(worst, float((abs(got - ref).max(1) / abs(ref).max(1)).max()))
        best = (~(step.best.get() & np.uint64(0xFFFFFFFF)).astype(np.uint32)).astype(np.int64)
        same += int((best == ref.argmax(1)).sum()); tokens = ref.argmax(1).astype(np.int32)
    diff = sum(int((x.get() != y).sum()) for (k, v), (k2, v2) in zip(gcache, cache.layers) for x, y in zip(k.arrays() + v.arrays(), k2.arrays() + v2.arrays()))
    print(f"check {fmt} kv {kv} dim {dim} seqs {seqs} ctx {context}: error {worst:.2e}, greedy {same}/{4 * seqs}, cache bytes differing {diff}", flush=True)


def random_fragments(*grid, fmt):
    codes = cp.random.randint(0, 256, (*grid, RECORD_BYTES[fmt]), dtype=cp.uint8)
    if fmt == "fp4":
        scales = (cp.random.random((*grid, 64), dtype=cp.float32) * 0.01 + 0.005).astype(cp.float16)
        codes[..., 1024:] = scales.view(cp.uint8)
    else:
        flat = codes.reshape(-1).view(cp.uint16); n = 1 << 26
        for i in range(0, flat.size, n):
            part = flat[i : i + n]; part[:] = (cp.random.standard_normal(part.size, dtype=cp.float32) * 0.02).view(cp.uint32) >> 16
    return codes


def build(shape, fmt, kv, seqs, context, page, tuning):
    spec = make_spec(*SHAPES[shape]); h = spec.hidden_size; a, m = spec.layers[0].attention, spec.layers[0].mlp
    w: dict[str, Any] = {}
    def mat(name, n, k, *lead):
        w[name] = QuantTensor(fmt, (*lead, n, k), random_fragments(*lead, -(-n // 16), k // 128, fmt=fmt), layout="fragments")
    w["embed_tokens"] = (cp.random.standard_normal((spec.vocab_size, h), dtype=cp.float32).view(cp.uint32) >> 16).astype(cp.uint16)
    e, i_ = m.router.num_experts, m.intermediate_size
    bytes_ = 0
    for i in range(len(spec.layers)):
        p = f"layers.{i}."
        for n_, c in (("input_layernorm", h), ("post_attention_layernorm", h), ("q_norm", 128), ("k_norm", 128)): w[p + n_] = cp.ones(c, cp.float32)
        mat(p + "qkv_proj", (a.num_heads + 2 * a.num_kv_heads) * 128, h); mat(p + "o_proj", h, a.num_heads * 128)
        w[p + "router"] = ((cp.random.standard_normal((e, h), dtype=cp.float32) * 0.05).view(cp.uint32) >> 16).astype(cp.uint16)
        mat(p + "gate_up_proj", 2 * i_, h, e); mat(p + "down_proj", h, i_, e)
        bytes_ += w[p + "qkv_proj"].codes.nbytes + w[p + "o_proj"].codes.nbytes + w[p + "router"].nbytes + (w[p + "gate_up_proj"].codes.nbytes + w[p + "down_proj"].codes.nbytes) * m.router.top_k // e
    w["norm"] = cp.ones(h, cp.float32); mat("lm_head", spec.vocab_size, h); bytes_ += w["lm_head"].codes.nbytes
    cfg = KVCacheConfig.parse(kv); n = -(-(context + 600) // page)
    cache = KVCache(len(spec.layers), n * seqs, page, a.num_kv_heads, a.head_dim, cfg, "cuda")
    for k, v in cache.layers:
        for p_ in (k, v):
            if p_.format == "fp4": p_.codes[...] = cp.random.randint(0, 256, p_.codes.shape, dtype=cp.uint8); p_.scales[...] = 0.1
            else: p_.codes[...] = (cp.random.standard_normal(p_.codes.shape, dtype=cp.float32).view(cp.uint32) >> 16).astype(cp.uint16)
    tables = cp.arange(n * seqs, dtype=cp.int32).reshape(seqs, n)
    bytes_ += int(seqs * context * len(spec.layers) * kv_bytes_per_token(cfg, a.num_kv_heads, a.head_dim))
    step = DecodeStep(spec, w, cache.layers, tables, tuning=tuning)
    step.seq_lens[:] = context
    return step, bytes_


def timed(graph, step, context, count=30):
    start = time.perf_counter()
    while time.perf_counter() - start < 0.4:
        for _ in range(10): graph.replay()
        graph.stream.synchronize(); step.seq_lens[:] = context; cp.cuda.get_current_stream().synchronize()
    out = []
    for _ in range(count):
        step.seq_lens[:] = context; cp.cuda.get_current_stream().synchronize()
        a, b = cp.cuda.Event(), cp.cuda.Event()
        a.record(graph.stream); graph.replay(); b.record(graph.stream); b.synchronize()
        out.append(cp.cuda.get_elapsed_time(a, b))
    return float(np.median(out))


def parts(step, context):
    """Microseconds of each kernel, in a chain of its own over all layers."""
    result = {}
    names = ("qkv", "attention", "output", "route", "gate_up", "down")
    import npmoe.models.decode as module
    original = module.launch
    for name in names:
        def only(k, *args, **kw):
            if k.name == name: original(k, *args, **kw)
        module.launch = only
        try:
            g = Graph(step.enqueue)
        finally:
            module.launch = original
        result[name] = round(timed(g, step, context, 15) / len(step.spec.layers) * 1e3, 2)
    return result


def main():
    p = argparse.ArgumentParser(); p.add_argument("--check", action="store_true"); p.add_argument("--time", nargs="*", default=[]); p.add_argument("--parts", action="store_true"); p.add_argument("--out"); p.add_argument("--variant", default="")
    o = p.parse_args(); records = []
    import npmoe.models.decode as decode_module
    if "ring" in o.variant: decode_module.RING_BYTES = 96000
    if "plain" in o.variant: decode_module.bulk = lambda: False
    if "profile" in o.variant:
        step, _ = build("qwen3-30b-a3b", "fp4", "fp4", 1, 1024, 64, Tuning(8, 132))
        for _ in range(3): step.enqueue()
        cp.cuda.get_current_stream().synchronize(); return
    if o.check:
        for args in (("fp4", "bf16", 128, 1, 100), ("bf16", "bf16", 128, 1, 300), ("fp4", "fp4", 128, 1, 300), ("fp4", "fp4", 64, 2, 700), ("bf16", "fp4", 128, 8, 200), ("fp4", ("bf16", "fp4"), 64, 4, 90)):
            check(*args)
    for item in o.time:
        shape, fmt, kv, seqs, context, splits, blocks = item.split(",")
        cp.get_default_memory_pool().free_all_blocks()
        tuning = Tuning(int(splits), int(blocks) or None)
        t0 = time.time(); step, nbytes = build(shape, fmt, kv, int(seqs), int(context), 64, tuning)
        cp.cuda.get_current_stream().synchronize(); t1 = time.time()
        g = Graph(step.enqueue); t2 = time.time()
        ms = timed(g, step, int(context)); floor = nbytes / 4.55e12 * 1e3
        r = dict(shape=shape, weights=fmt, kv=kv, batch=int(seqs), context=int(context), splits=int(splits), blocks=int(blocks), ms=round(ms, 4), floor=round(floor, 4), gb=round(nbytes / 1e9, 3), build_s=round(t1 - t0, 1), capture_s=round(t2 - t1, 1), finite=bool(cp.isfinite(step.logits).all()))
        if o.parts: r["parts"] = parts(step, int(context))
        records.append(r); print(json.dumps(r), flush=True); del g, step
    if o.out: json.dump(records, open(o.out, "w"), indent=1)


main()
