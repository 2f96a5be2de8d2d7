"""Seconds from the start of a process to its first token, and the rate of loading in between.

    python bench/load.py qwen3-30b-a3b --gigabytes 17

Writes a checkpoint of random weights as `npmoe convert` would, with as many layers of the named
shape as come near the size, so that its files are in the page cache; then runs programs that load
it and generate one token, the second of which finds kernels that the first has compiled. One JSON
object for each run; gbps is the bytes of the files over the seconds of LLM(...), start of the
device and KV cache included. What the loader says itself is on standard error.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from npmoe.checkpoint import Checkpoint
from npmoe.dtypes import SAFETENSORS_DTYPES
from npmoe.models.conversion import format_bytes
from npmoe.models.convert import quantization_config, write_json, write_shards
from npmoe.models.families import read_model
from npmoe.models.own_layout import stored_arrays
from npmoe.models.parameters import ROUTER, TABLE, VECTOR, Parameter

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "seed-67b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2560,
    },
}
COMMON = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "intermediate_size": 6144,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
WORDS = np.random.default_rng(0).bytes(1 << 24)

FIRST_TOKEN = """
import json, sys, time
from npmoe import LLM, SamplingParams
imported = time.time()
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
loaded = time.time()
llm.generate([1, 2, 3], SamplingParams(max_tokens=1, temperature=0))
print(json.dumps({"imported": imported, "loaded": loaded, "token": time.time()}))
"""


def shape_config(shape: str, gigabytes: float, weights: str) -> dict[str, Any]:
    """config.json with the layers, 1 to all of the shape's, that come nearest to the size."""
    raw = COMMON | SHAPES[shape]
    layers = raw["num_hidden_layers"]

    def size(count: int) -> float:
        _, _, parameters = read_model(raw | {"num_hidden_layers": count}, shape)
        formats = {p.part: part_format(p, weights) for p in parameters}
        matrices = [p for p in parameters if p.part != VECTOR]
        return sum(format_bytes(formats[p.part], p.shape) for p in matrices) / 1e9

    each = size(2) - size(1)
    wanted = round((gigabytes - size(1)) / each) + 1
    return raw | {"num_hidden_layers": max(1, min(layers, wanted))}


def part_format(parameter: Parameter, weights: str) -> str:
    """Tables and routers are bf16."""
    return "bf16" if parameter.part in (TABLE, ROUTER) else weights


def random_arrays(parameter: Parameter, weights: str) -> Iterator[np.ndarray]:
    """A parameter's arrays as they are stored: codes at random, scales of a plausible size."""
    if parameter.part == VECTOR:
        yield np.ones(parameter.shape, np.float32)
        return
    for field, (word, shape) in stored_arrays(
        part_format(parameter, weights), parameter.shape
    ).items():
        dtype = SAFETENSORS_DTYPES[word]
        if field == "codes" and word == "U8":
            words = np.frombuffer(WORDS, np.uint8)
        elif field == "codes":
            values = np.random.default_rng(1).standard_normal(1 << 20, np.float32) / 50
            words = values.astype(dtype)
        else:
            words = np.full(1, 0.01, np.float32).astype(dtype)
        yield np.resize(words, math.prod(shape)).reshape(shape)


def write_checkpoint(folder: Path, shape: str, gigabytes: float, weights: str) -> None:
    """A converted checkpoint of random weights in an existing folder."""
    raw = shape_config(shape, gigabytes, weights)
    _, _, parameters = read_model(raw, shape)
    formats = {p.part: part_format(p, weights) for p in parameters if p.part != VECTOR}
    write_shards(parameters, formats, lambda p: random_arrays(p, weights), folder)
    write_json(folder / "config.json", raw | {"quantization_config": quantization_config(formats)})


def measure(folder: Path, options: dict[str, Any]) -> dict[str, float]:
    """One program, from its start to its first token."""
    size = Checkpoint(folder).nbytes
    started = time.time()
    command = [sys.executable, "-c", FIRST_TOKEN, str(folder), json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    at = json.loads(done.stdout)
    return {
        "gigabytes": round(size / 1e9, 2),
        "import_s": round(at["imported"] - started, 2),
        "load_s": round(at["loaded"] - at["imported"], 2),
        "gbps": round(size / 1e9 / (at["loaded"] - at["imported"]), 2),
        "first_token_s": round(at["token"] - started, 2),
    }


def main() -> None:
    """Writes the checkpoint, measures, and removes it unless a folder was named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the checkpoint")
    parser.add_argument("--weights", default="fp4", help="format as stored")
    parser.add_argument("--kv", default="fp4")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, help="keep the checkpoint here, or take what is here"
    )
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="npmoe-load-"))
    try:
        if not (folder / "config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_checkpoint(folder, options.shape, options.gigabytes, options.weights)
        llm_options = {
            "device": options.device,
            "kv_cache": options.kv,
            "max_seq_len": options.max_seq_len,
            "max_num_seqs": 1,
        }
        for _ in range(options.runs):
            result = {"shape": options.shape, "weights": options.weights, "kv": options.kv}
            print(json.dumps(result | measure(folder, llm_options)), flush=True)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
