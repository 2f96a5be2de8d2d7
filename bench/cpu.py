"""Decode speed on the CPU beside its floor: weight bytes of one token / memory read bandwidth.

    python bench/cpu.py [--model PATH] [--threads N] [--weights F] [--runs R]
                        [--json] [--machine WORDS]

Medians over the runs. A model smaller than the processor's caches can be faster than the floor,
which is of main memory; the cache of keys and values is not counted in it. Prompts of more than a
few tokens are multiplied by NumPy's BLAS, which has its own threads (OPENBLAS_NUM_THREADS).
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from npmoe.bench.bandwidth import cpu_bandwidth
from npmoe.dtypes import gigabytes
from npmoe.llm import LLM, shipped_model
from npmoe.models.stored import open_model
from npmoe.models.summary import STORED, read_bytes
from npmoe.sampling import SamplingParams


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One load and `runs` greedy completions of the same prompt."""
    path = args.model or shipped_model()
    start = time.perf_counter()
    with LLM(path, device="cpu", weights=args.weights, progress=False) as llm:
        load = time.perf_counter() - start
        rng = np.random.default_rng(0)
        room = llm.max_seq_len - args.tokens
        prompts = rng.integers(0, llm.config.vocab_size, (args.runs, min(args.prompt, room)))
        params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
        timings = [llm.generate(prompt.tolist(), params).timings for prompt in prompts]
    each = statistics.median(t.time_per_output_token for t in timings)
    read = read_bytes(open_model(path), args.weights if args.weights != "native" else STORED, True)
    assert read is not None
    bandwidth = cpu_bandwidth(args.threads)
    return {
        "machine": args.machine,
        "model": Path(path).name,
        "weights": args.weights,
        "threads": args.threads,
        "prompt_tokens": prompts.shape[1],
        "output_tokens": args.tokens,
        "runs": args.runs,
        "load_s": load,
        "time_to_first_token_s": statistics.median(t.time_to_first_token for t in timings),
        "time_per_output_token_s": each,
        "tokens_per_s": 1 / each,
        "read_bytes_per_token": read,
        "read_bandwidth_bytes_per_s": bandwidth,
        "floor_s_per_token": read / bandwidth,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="decode speed on the CPU")
    parser.add_argument("--model", metavar="PATH", help="default: the shipped model")
    parser.add_argument("--weights", default="native", metavar="F", help="one format for all parts")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--prompt", type=int, default=64, metavar="N", help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens to decode")
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--machine", metavar="WORDS", help="processor and cores, for the record")
    args = parser.parse_args()
    os.environ["NPMOE_NUM_THREADS"] = str(args.threads)
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return
    rows = {
        "decode": f"{result['tokens_per_s']:.1f} tokens/s",
        "time per token": f"{result['time_per_output_token_s'] * 1e3:.3f} ms",
        "floor per token": f"{result['floor_s_per_token'] * 1e3:.3f} ms = "
        f"{gigabytes(result['read_bytes_per_token'])} / "
        f"{gigabytes(result['read_bandwidth_bytes_per_s'])}/s",
        "time to first token": f"{result['time_to_first_token_s'] * 1e3:.1f} ms, "
        f"{result['prompt_tokens']} tokens",
        "load": f"{result['load_s']:.2f} s",
    }
    print(f"{result['model']}, weights {args.weights}, {args.threads} threads, {args.runs} runs")
    for name, text in rows.items():
        print(f"  {name:20} {text}")


if __name__ == "__main__":
    main()
