"""The arguments of `npmoe bench`, of bench/decode.py and of bench/kernels.py."""

import argparse

from npmoe.bench.measure import BenchOptions
from npmoe.bench.shapes import SHAPES
from npmoe.bench.subject import Subject, checkpoint, named_shape
from npmoe.config import KVCacheConfig, formats_by_part, parse_weights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure: a checkpoint or a shape, formats, batch and context."""
    parser.add_argument("path", nargs="?", metavar="PATH", help="default: the shipped model")
    shapes = ", ".join(SHAPES)
    parser.add_argument("--shape", metavar="S", help=f"random weights instead: one of {shapes}")
    parser.add_argument(
        "--weights", default="native", metavar="F", help="a format, or part=format,part=format"
    )
    parser.add_argument("--kv-cache", default="bf16", metavar="F", help="a format, or two: K,V")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="tokens attended to")
    parser.add_argument(
        *("--page-size",), type=int, default=BenchOptions.page_size, metavar="N", help="tokens"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def read_subject(args: argparse.Namespace, default: str, ignored: tuple[str, ...] = ()) -> Subject:
    """The checkpoint or shape; `default` is the checkpoint where neither is named.

    Raises ValueError for both or an unknown shape, CheckpointError and UnsupportedModel.
    """
    if args.shape is None:
        return checkpoint(args.path or default, ignored)
    if args.path is not None:
        raise ValueError("pass PATH or --shape, not both")
    return named_shape(args.shape)


def read_options(args: argparse.Namespace, nvtx: bool = False, check: bool = False) -> BenchOptions:
    """Raises ValueError for an unknown format or part."""
    return BenchOptions(
        weights=parse_weights(formats_by_part(args.weights)),
        kv_cache=KVCacheConfig.parse(args.kv_cache),
        batch=args.batch,
        context=args.context,
        page_size=args.page_size,
        nvtx=nvtx,
        check=check,
        quiet=args.quiet,
    )
