"""Seconds from the start of a process to its first token, and the rate of loading in between.

    python bench/load.py qwen3-30b-a3b --gigabytes 18

Writes a checkpoint of random weights as `npmoe convert` would, with as many layers of the named
shape as come near the size, so that its files are in memory: in /dev/shm where it has the room,
else in the page cache. Then runs programs that load it and generate one token, the second of which
finds kernels that the first has compiled. Each is a record, printed and appended to a results file:

    import_s       from the start of the process to the end of `import npmoe`
    device_s       to the device's first array
    weights_s      of the rest: what the loader says that the weights took; on a GPU only
    load_s         all of LLM(...): weights, kernels, graphs and KV cache
    gbps           bytes of the files / load_s
    first_token_s  from the start of the process to the first token
"""

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from npmoe.bench.record import append, environment, results_file
from npmoe.bench.shapes import SHAPES
from npmoe.checkpoint import Checkpoint
from npmoe.dtypes import SAFETENSORS_DTYPES
from npmoe.models.conversion import format_bytes
from npmoe.models.convert import (
    plan_shards,
    quantization_config,
    write_index,
    write_json,
    write_shard,
)
from npmoe.models.families import read_model
from npmoe.models.own_layout import stored_arrays
from npmoe.models.parameters import ROUTER, TABLE, VECTOR, Parameter
from npmoe.runtime.device import cpu_threads, free_memory

HERE = Path(__file__).resolve().parent
SHARD_BYTES = 1_000_000_000
MEMORY_FOLDER = Path("/dev/shm")
SPARE_BYTES = 4e9
"""Of a file, several of which are written at once; a folder in memory, and what must be free there
and in memory beside the files."""
PLAUSIBLE = {"scales": 0.01, "global_scale": 1e-4, "zeros": 8}
SCALE_BYTE = 120  # 2^-7 as E8M0, 2^8 as E4M3 under a global scale

FIRST_TOKEN = """
import json, sys, time
import npmoe
at = {"imported": time.time()}
from npmoe.runtime.device import resolve_device, to_device
import numpy as np
folder, options = sys.argv[1], json.loads(sys.argv[2])
options["device"] = resolve_device(options["device"])
to_device(np.zeros(1), options["device"])
at["device"] = time.time()
llm = npmoe.LLM(folder, **options)
at["loaded"] = time.time()
llm.generate([1, 2, 3], npmoe.SamplingParams(max_tokens=1, temperature=0))
print(json.dumps(at | {"token": time.time(), "on": llm.device}))
"""
LOADED = re.compile(r"of weights in ([\d.]+) s")


def shape_config(shape: str, gigabytes: float, weights: str) -> tuple[dict[str, Any], int]:
    """config.json with the layers, 1 to all of the shape's, that come nearest to the size, and the
    bytes of its matrices."""
    raw = SHAPES[shape] | {"tie_word_embeddings": False}
    layers = raw["num_hidden_layers"]

    def size(count: int) -> int:
        _, _, parameters = read_model(raw | {"num_hidden_layers": count}, shape)
        formats = {p.part: part_format(p, weights) for p in parameters}
        matrices = [p for p in parameters if p.part != VECTOR]
        return sum(format_bytes(formats[p.part], p.shape) for p in matrices)

    each = size(2) - size(1)
    wanted = round((1e9 * gigabytes - size(1)) / each) + 1
    count = max(1, min(layers, wanted))
    return raw | {"num_hidden_layers": count}, size(count)


def part_format(parameter: Parameter, weights: str) -> str:
    """Tables and routers are bf16."""
    return "bf16" if parameter.part in (TABLE, ROUTER) else weights


def random_arrays(parameter: Parameter, weights: str) -> list[np.ndarray]:
    """A parameter's arrays as they are stored, shared by all parameters of its shape and format."""
    if parameter.part == VECTOR:
        return [np.ones(parameter.shape, np.float32)]
    stored = stored_arrays(part_format(parameter, weights), parameter.shape)
    return [random_array(field, word, shape) for field, (word, shape) in stored.items()]


@cache
def random_array(field: str, word: str, shape: tuple[int, ...]) -> np.ndarray:
    """Codes at random, no NaN among them; scales and zero points of a plausible size."""
    dtype = SAFETENSORS_DTYPES[word]
    if field != "codes":
        value = SCALE_BYTE if (field, word) == ("scales", "U8") else PLAUSIBLE[field]
        return np.full(shape, value, np.float32).astype(dtype)
    rng = np.random.default_rng(0)
    if word == "U8":
        values = rng.integers(0, 256, 1 << 24, np.uint8)
        values[values % 128 == 127] = 0  # NaN in fp8
    else:
        values = (rng.standard_normal(1 << 20, np.float32) / 50).astype(dtype)
    return np.resize(values, math.prod(shape)).reshape(shape)


def write_checkpoint(folder: Path, raw: dict[str, Any], weights: str) -> None:
    """A converted checkpoint of random weights in an existing folder, several files at a time."""
    _, _, parameters = read_model(raw, "config.json")
    formats = {p.part: part_format(p, weights) for p in parameters if p.part != VECTOR}
    arrays = {p.name: random_arrays(p, weights) for p in parameters}
    shards = plan_shards(parameters, formats, SHARD_BYTES)
    with ThreadPoolExecutor(cpu_threads()) as pool:
        tasks = [
            pool.submit(write_shard, folder, s, [a for p in s.parameters for a in arrays[p.name]])
            for s in shards
        ]
    for task in tasks:
        task.result()
    write_index(folder, shards)
    write_json(folder / "config.json", raw | {"quantization_config": quantization_config(formats)})


def new_folder(num_bytes: int) -> Path:
    """A new folder in MEMORY_FOLDER if it and the memory have the room, else where temporary files
    go."""
    needed = num_bytes + SPARE_BYTES
    fits = MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free > needed
    parent = MEMORY_FOLDER if fits and free_memory("cpu") > needed else None
    return Path(tempfile.mkdtemp(prefix="npmoe-load-", dir=parent))


def measure(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """One program, from its start to its first token."""
    size = Checkpoint(folder).nbytes
    command = [sys.executable, "-c", FIRST_TOKEN, str(folder), json.dumps(options)]
    weights_s, started = None, time.time()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        for line in program.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            found = LOADED.search(line)
            weights_s = float(found[1]) if found else weights_s
        output = program.stdout.read()
    if program.returncode:
        raise SystemExit(f"the program that loads ended with {program.returncode}")
    at = json.loads(output)
    load_s = at["loaded"] - at["device"]
    return {
        "device": at["on"],
        "gigabytes": round(size / 1e9, 2),
        "import_s": round(at["imported"] - started, 2),
        "device_s": round(at["device"] - at["imported"], 2),
        "weights_s": weights_s,
        "load_s": round(load_s, 2),
        "gbps": round(size / 1e9 / load_s, 2),
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
    parser.add_argument("--commit", help="what is measured, where git does not say")
    parser.add_argument("--out", type=Path, help="default: bench/results/load-<GPU>.json")
    args = parser.parse_args()
    raw, num_bytes = shape_config(args.shape, args.gigabytes, args.weights)
    folder = args.folder or new_folder(num_bytes)
    try:
        if not (folder / "config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            started = time.perf_counter()
            write_checkpoint(folder, raw, args.weights)
            print(f"written in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        records = [run(args, folder, number) for number in range(args.runs)]
    finally:
        if args.folder is None:
            shutil.rmtree(folder)
    for record in records:
        record |= environment(record["device"], HERE)  # starts the device here, which is not timed
        record["commit"] = args.commit or record["commit"]
        append(args.out or results_file(HERE / "results", "load", record), record)


def run(args: argparse.Namespace, folder: Path, number: int) -> dict[str, Any]:
    """Measures one program and prints what it found."""
    options = {
        "device": args.device,
        "kv_cache": args.kv,
        "max_seq_len": args.max_seq_len,
        "max_num_seqs": 1,
    }
    record = {"shape": args.shape, "weights": args.weights, "kv": args.kv, "run": number}
    record |= measure(folder, options)
    print(json.dumps(record), flush=True)
    return record


if __name__ == "__main__":
    main()
