"""Bits per byte of a text: what a model, a weight format or a cache format costs in quality.

    python bench/quality.py TEXT [--model PATH] [--weights F] [--kv-cache F] [--windows N] [--json]

The text is cut into windows of the model's context that do not overlap; documents in it are those
between two blank lines, with the end token before, between and after them. All nats / ln 2 / all
bytes, where the bytes are those of the file or, with --windows, of the tokens that were read.

`npmoe eval` compares cache formats with each other, by position; this is one number.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from npmoe.eval.distributions import summary
from npmoe.eval.losses import measure_losses
from npmoe.eval.text import read_text
from npmoe.llm import LLM, shipped_model


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
        assert llm.tokenizer is not None
        text = read_text(args.text, llm.tokenizer, llm.config.eos_token_ids)
        length, count = llm.max_seq_len, text.num_targets
        if args.windows is not None:
            count = min(args.windows * length, count)
        (tally,) = measure_losses([llm], text.windows(length, count), (0, length))
        losses = summary(tally.sums.sum(axis=0), text.num_bytes(llm.tokenizer, count))
    return {
        "model": Path(args.model or shipped_model()).name,
        "text": args.text.name,
        "weights": args.weights,
        "kv_cache": args.kv_cache,
        "window": length,
        **{k: losses[k] for k in ("tokens", "bytes", "nats_per_token", "bits_per_byte")},
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
