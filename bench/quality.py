"""Bits per byte of a text: what a model, a weight format or a cache format costs in quality.

    python bench/quality.py TEXT [--model PATH] [--weights F] [--kv-cache F] [--windows N] [--json]

The text is cut into windows of the model's context that do not overlap; documents in it are those
between two blank lines, with the end token before, between and after them. All nats / ln 2 / all
bytes, where the bytes are those of the file or, with --windows, of the tokens that were read.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from npmoe.llm import LLM, shipped_model
from npmoe.runtime.progress import progress


def token_stream(llm: LLM, text: str) -> list[int]:
    """End token, document, end token, document, ..., end token."""
    assert llm.tokenizer is not None
    end = llm.config.eos_token_ids[0]
    stream = [end]
    for document in text.split("\n\n\n"):
        stream += llm.tokenizer.encode(document.strip("\n") + "\n", add_special_tokens=False)
        stream.append(end)
    return stream


def nats(logits: np.ndarray, targets: np.ndarray) -> float:
    """Sum of -log p(target): logits `[T, V]`, targets `[T]`."""
    top = logits.max(axis=1)
    norm = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return float((norm - logits[np.arange(len(targets)), targets]).sum(dtype=np.float64))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The loss over the whole text, or over its first windows."""
    with LLM(
        args.model,
        device="cpu",
        weights=args.weights,
        kv_cache=args.kv_cache,
        max_num_seqs=1,
        progress=False,
    ) as llm:
        stream = token_stream(llm, args.text.read_text("utf-8"))
        length, count = llm.max_seq_len, len(stream) - 1
        size = args.text.stat().st_size
        if args.windows is not None and args.windows * length < count:
            count = args.windows * length
            assert llm.tokenizer is not None
            size = len(llm.tokenizer.decode(stream[1 : count + 1]).encode())
        total = 0.0
        for start in progress(range(0, count, length), "windows"):
            stop = min(start + length, count)
            logits = np.asarray(llm.forward(stream[start:stop]))
            total += nats(logits, np.array(stream[start + 1 : stop + 1]))
    return {
        "model": Path(args.model or shipped_model()).name,
        "text": args.text.name,
        "weights": args.weights,
        "kv_cache": args.kv_cache,
        "window": length,
        "tokens": count,
        "bytes": size,
        "nats_per_token": total / count,
        "bits_per_byte": total / math.log(2) / size,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="bits per byte of a text")
    parser.add_argument("text", type=Path, metavar="TEXT", help="a UTF-8 file")
    parser.add_argument("--model", metavar="PATH", help="default: the shipped model")
    parser.add_argument("--weights", default="native", metavar="F", help="one format for all parts")
    parser.add_argument("--kv-cache", default="bf16", metavar="F", help="one format for K and V")
    parser.add_argument("--windows", type=int, metavar="N", help="read the first N windows only")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"{result['bits_per_byte']:.4f} bits per byte, {result['nats_per_token']:.4f} nats per "
        f"token ({result['tokens']:,} tokens, {result['bytes']:,} bytes of {result['text']}, "
        f"weights {result['weights']}, KV cache {result['kv_cache']})"
    )


if __name__ == "__main__":
    main()
