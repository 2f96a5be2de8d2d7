"""Milliseconds of the GPU decode step, at full size with random weights, beside the floor.

    python bench/decode.py qwen3-30b-a3b --weights fp4 --kv fp4 --context 1024

The floor is the bytes that a step must read (active weights and cache) over the read bandwidth
that `roofline` measures on this GPU. A step is embedding, all layers, the vocabulary projection and
the greedy choice, replayed as one CUDA graph; the median of many replays between events. Every
sequence of a batch gets one token a step, so ms_per_token and bytes_per_token are of the step.
"""

import argparse
import datetime
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np

import npmoe
from npmoe.config import KVCacheConfig, RopeConfig
from npmoe.formats.fragments import COLUMNS, LAYOUT, RECORDS, ROWS, to_fragments
from npmoe.formats.quant_tensor import QuantTensor, quantize
from npmoe.kv.storage import KVCache, kv_bytes_per_token
from npmoe.models import decode
from npmoe.models.decode import DecodeStep, Tuning
from npmoe.models.parameters import ROUTER, TABLE, VECTOR, TensorNames, decoder_parameters
from npmoe.models.specs import AttentionSpec, ExpertSpec, LayerSpec, ModelSpec, RouterSpec
from npmoe.runtime.graphs import Graph
from npmoe.runtime.launch import launch
from npmoe.runtime.nvrtc import kernel

# hidden, layers, heads, KV heads, experts, experts a token, expert width, vocabulary
SHAPES = {
    "qwen3-30b-a3b": (2048, 48, 32, 4, 128, 8, 768, 151936),
    "seed-67b": (4096, 32, 32, 8, 64, 8, 2560, 128256),
    "mixtral-8x7b": (4096, 32, 32, 8, 8, 2, 14336, 32000),
    "olmoe-1b-7b-like": (2048, 16, 16, 16, 64, 8, 1024, 50304),
}
HEAD_DIM, PAGE = 128, 64
RESULTS = Path(__file__).parent / "results"


def model_spec(shape: str) -> ModelSpec:
    """A decoder of the named shape, with q/k norms per head."""
    hidden, layers, heads, kv_heads, experts, top_k, width, vocab = SHAPES[shape]
    attention = AttentionSpec(heads, kv_heads, HEAD_DIM, HEAD_DIM**-0.5, qk_norm="head")
    layer = LayerSpec(attention, ExpertSpec(RouterSpec(experts, top_k, True), width))
    return ModelSpec(hidden, vocab, 1e-6, RopeConfig(), 1 << 17, (layer,) * layers, False)


def random_bf16(*shape: int, scale: float = 1.0) -> Any:
    """Normal numbers as bf16 bits, uint16."""
    out = cp.empty(shape, cp.uint16)
    flat, step = out.reshape(-1), 1 << 26
    for start in range(0, flat.size, step):
        part = flat[start : start + step]
        values = cp.random.standard_normal(part.size, dtype=cp.float32) * scale
        part[:] = values.view(cp.uint32) >> 16
    return out


def random_matrix(weight_format: str, shape: tuple[int, ...]) -> QuantTensor:
    """A weight in fragments, each record a random one of 1024."""
    *lead, rows, columns = shape
    grid = (*lead, -(-rows // ROWS), columns // COLUMNS)
    some = cp.random.standard_normal((32 * ROWS, 32 * COLUMNS), dtype=cp.float32) * 0.02
    pool = to_fragments(quantize(some, weight_format)).codes.reshape(32 * 32, -1)
    records = pool[cp.random.randint(0, len(pool), grid)]
    return QuantTensor(weight_format, shape, records, layout=LAYOUT)


def random_weights(spec: ModelSpec, weight_format: str, batch: int) -> tuple[dict[str, Any], int]:
    """All parameters, and the bytes of them that a step reads: of the experts those that `batch`
    tokens choose together, if each chooses at random."""
    weights: dict[str, Any] = {}
    read = 0.0
    for p in decoder_parameters(spec, TensorNames()):
        if p.part == VECTOR:
            weights[p.name] = cp.ones(p.shape, cp.float32)
        elif p.part in (TABLE, ROUTER):
            weights[p.name] = random_bf16(*p.shape, scale=0.05 if p.part == ROUTER else 1.0)
            read += weights[p.name].nbytes if p.part == ROUTER else 0
        else:
            weights[p.name] = random_matrix(weight_format, p.shape)
            mlp = spec.layers[0].mlp
            assert isinstance(mlp, ExpertSpec)
            missed = (1 - mlp.router.top_k / mlp.router.num_experts) ** batch
            share = 1 - missed if p.part == "experts" else 1
            read += weights[p.name].nbytes * share
    return weights, int(read)


def random_cache(spec: ModelSpec, kv: str, batch: int, context: int) -> tuple[KVCache, Any, int]:
    """A filled cache, its block table, and the bytes of it that one step reads."""
    config = KVCacheConfig.parse(kv)
    pages = -(-(context + 64) // PAGE)
    kv_heads = spec.num_kv_heads
    cache = KVCache(len(spec.layers), pages * batch, PAGE, kv_heads, HEAD_DIM, config, "cuda")
    for layer in cache.layers:
        for half in layer:
            if half.format == "bf16":
                half.codes[...] = random_bf16(*half.codes.shape)
            else:
                half.codes[...] = cp.random.randint(0, 256, half.codes.shape, dtype=cp.uint8)
                half.scales[...] = 0.3
    table = cp.arange(pages * batch, dtype=cp.int32).reshape(batch, pages)
    bytes_a_token = len(spec.layers) * kv_bytes_per_token(config, kv_heads, HEAD_DIM)
    return cache, table, int(batch * context * bytes_a_token)


def median_ms(graph: Graph, prepare: Any, repeats: int = 30) -> float:
    """Median milliseconds of a replay, after 0.4 s of replays (the clocks rise under load)."""
    start = time.perf_counter()
    while time.perf_counter() - start < 0.4:
        for _ in range(10):
            prepare()
            graph.replay()
        graph.stream.synchronize()
    times = []
    for _ in range(repeats):
        prepare()
        before, after = cp.cuda.Event(), cp.cuda.Event()
        before.record(graph.stream)
        graph.replay()
        after.record(graph.stream)
        after.synchronize()
        times.append(cp.cuda.get_elapsed_time(before, after))
    return float(np.median(times))


def read_gbps() -> float:
    """Read bandwidth of this GPU in GB/s, over 4 GiB."""
    data = cp.random.randint(0, 256, 1 << 32, dtype=cp.uint8)
    sink = cp.zeros(1, cp.uint32)
    blocks = 2 * cp.cuda.Device().attributes["MultiProcessorCount"]
    function = kernel("roofline", "roofline")
    graph = Graph(lambda: launch(function, (blocks,), 512, sink, data, data.size // 16))
    return data.size / median_ms(graph, lambda: None, 10) / 1e6


def kernel_microseconds(step: DecodeStep, prepare: Any) -> dict[str, float]:
    """Each kernel in a chain of its own over all layers, microseconds a launch."""
    found = {}
    for name in ("qkv", "attention", "output", "route", "gate_up", "down", "lm_head"):

        def only(function: Any, *args: Any, wanted: str = name, **options: Any) -> None:
            if function.name == wanted:
                launch(function, *args, **options)

        decode.launch = only
        try:
            graph = Graph(step.enqueue)
        finally:
            decode.launch = launch
        launches = 1 if name == "lm_head" else len(step.spec.layers)
        found[name] = round(1e3 * median_ms(graph, prepare, 15) / launches, 2)
    return found


def commit() -> str:
    """The commit that is measured, with a mark if files differ from it."""
    command = ("git", "describe", "--always", "--dirty")
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def measure(options: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    """One record of the results file."""
    spec = model_spec(options.shape)
    weights, weight_bytes = random_weights(spec, options.weights, options.batch)
    cache, table, kv_bytes = random_cache(spec, options.kv, options.batch, options.context)
    step = DecodeStep(spec, weights, cache.layers, table, tuning=Tuning(options.splits))
    graph = Graph(step.enqueue)

    def prepare() -> None:
        with graph.stream:
            step.seq_lens[...] = options.context - 1

    ms = median_ms(graph, prepare)
    assert bool(cp.isfinite(step.logits).all())
    total = weight_bytes + kv_bytes
    record = {
        "shape": options.shape,
        "weights": options.weights,
        "kv": options.kv,
        "batch": options.batch,
        "context": options.context,
        "splits": step.splits,
        "ms_per_token": round(ms, 4),
        "floor_ms": round(total / bandwidth / 1e6, 4),
        "bytes_per_token": total,
        "read_gbps": round(bandwidth),
        "sampling": "greedy",
        "gpu": cp.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "cuda_runtime": cp.cuda.runtime.runtimeGetVersion(),
        "cupy": cp.__version__,
        "npmoe": npmoe.__version__,
        "commit": commit(),
        "cuda_driver": cp.cuda.runtime.driverGetVersion(),
        "date": datetime.date.today().isoformat(),
    }
    if options.kernels:
        record["kernel_us"] = kernel_microseconds(step, prepare)
    return record


def main() -> None:
    """Measures one configuration, prints it, and appends it to the results file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--weights", choices=RECORDS, default="fp4")
    parser.add_argument("--kv", choices=("bf16", "fp4"), default="fp4")
    parser.add_argument("--batch", type=int, choices=(1, 2, 4, 8), default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--splits", type=int, help="parts of the context; a multiple of 8")
    parser.add_argument("--kernels", action="store_true", help="time each kernel alone too")
    parser.add_argument("--bandwidth", type=float, help="GB/s; measured if left out")
    parser.add_argument("--out", type=Path, help="default: results/decode-<GPU>.json")
    options = parser.parse_args()
    record = measure(options, options.bandwidth or read_gbps())
    print(json.dumps(record))
    out = options.out or RESULTS / f"decode-{record['gpu'].split()[-1].lower()}.json"
    records = json.loads(out.read_text()) if out.is_file() else []
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([*records, record], indent=1) + "\n")


if __name__ == "__main__":
    main()
