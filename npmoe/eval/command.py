"""The arguments of `npmoe eval`."""

import argparse
from pathlib import Path

from npmoe.config import KV_FORMATS, KVCacheConfig, formats_by_part, parse_weights
from npmoe.eval.measure import EvalOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to evaluate, and how to show it."""
    parser.add_argument("text", type=Path, metavar="TEXT", help="a UTF-8 file")
    parser.add_argument(
        "--model", metavar="PATH", help="folder, or org/name in the local Hugging Face cache"
    )
    parser.add_argument(
        *("--kv-cache",),
        action="append",
        metavar="F",
        help=f"a format, or two: K,V (repeatable); default: {', '.join(KV_FORMATS)}",
    )
    parser.add_argument(
        "--weights", default="native", metavar="F", help="a format, or part=format,part=format"
    )
    parser.add_argument("--device", default="cpu", metavar="D", help="auto, cpu or cuda")
    parser.add_argument("--context", type=int, metavar="N", help="tokens a window")
    parser.add_argument("--tokens", type=int, metavar="N", help="read so much of the text only")
    parser.add_argument(
        *("--passkeys",),
        type=int,
        default=EvalOptions.trials,
        metavar="N",
        help="keys to hide at each context; 0 leaves it out",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="loss against bytes a token")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no messages on standard error")


def read_options(
    args: argparse.Namespace, default_model: str, ignored: tuple[str, ...]
) -> EvalOptions:
    """Raises ValueError for an unknown format or part, a number out of range, and a plot that
    cannot be written."""
    _check_plot(args.plot)
    return EvalOptions(
        model=args.model or default_model,
        text=args.text,
        kv_caches={name: KVCacheConfig.parse(name) for name in args.kv_cache or KV_FORMATS},
        weights=parse_weights(formats_by_part(args.weights)),
        context=args.context,
        tokens=args.tokens,
        trials=args.passkeys,
        device=args.device,
        ignored=ignored,
        quiet=args.quiet,
    )


def _check_plot(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix != ".svg":
        raise ValueError(f"plot = {path}: expected a name that ends in .svg")
    if not path.parent.is_dir():
        raise ValueError(f"plot = {path}: the folder {path.parent} does not exist, create it first")
