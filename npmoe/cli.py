"""The command line: `npmoe generate | chat | info | convert | bench | eval`.

What a program reads goes to standard output, everything for the person who waits to standard error.
Exit codes: 0; 2 for bad input, with one line on standard error; 130 after Ctrl-C; 141 when the
reader of the output has gone.
"""

import argparse
import errno
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from npmoe import __version__
from npmoe.bench import command as bench_command
from npmoe.bench.measure import describe_record, measure
from npmoe.config import (
    KV_FORMATS,
    WEIGHT_FORMATS,
    WEIGHT_PARTS,
    KVCacheConfig,
    formats_by_part,
    parse_weights,
)
from npmoe.engine.output import Completion
from npmoe.errors import NpmoeError, PromptError, TokenizerError
from npmoe.eval import command as eval_command
from npmoe.eval.measure import Evaluation, evaluate
from npmoe.eval.report import describe_evaluation, plot_evaluation
from npmoe.llm import LLM, shipped_model
from npmoe.models.convert import convert_checkpoint
from npmoe.models.stored import open_model
from npmoe.models.summary import EXAMPLE_MEMORY_GB, Memory, describe, summarize
from npmoe.runtime.device import free_memory, resolve_device
from npmoe.runtime.progress import say, say_end_of_line
from npmoe.runtime.terminal import print_pieces, read_lines
from npmoe.sampling import SamplingParams
from npmoe.tokenizer import Message

BAD_INPUT, INTERRUPTED, READER_GONE = 2, 130, 141
OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
CHAT_HELP = "/exit or Ctrl-D ends, /reset starts over, Ctrl-C stops an answer"


class UsageError(NpmoeError):
    """A wrong argument on the command line."""


@contextmanager
def _as_usage_errors() -> Iterator[None]:
    """Inside, a ValueError speaks of what the user passed; elsewhere it is a bug of ours."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, NpmoeError):
            raise
        raise UsageError(str(error)) from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file)  # argparse itself would pass over a full disk


def main(argv: list[str] | None = None) -> int:
    """Runs one command; `argv` without the program's name. Returns the exit code.

    Errors that are nobody's input keep their traceback.
    """
    if sys.stdout is None:
        return _fail("standard output is closed: redirect it to a file or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character
    try:
        try:
            args = _parser().parse_args(argv)
            args.run(args)
        finally:
            sys.stdout.flush()  # also of --help, which ends the program
    except NpmoeError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        say_end_of_line()
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return READER_GONE
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS:
            raise
        _drop_output()
        return _fail(f"the output cannot be written: {error.strerror}")
    return 0


def _fail(message: str) -> int:
    """Says what is wrong, in one line; the exit code for it."""
    say(f"error: {' '.join(message.split())}")
    return BAD_INPUT


def _drop_output() -> None:
    """What is still buffered has nowhere to go; the interpreter flushes once more as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> _Parser:
    parser = _Parser(prog="npmoe", description="Mixture-of-Experts models without PyTorch.")
    parser.add_argument("--version", action="version", version=f"npmoe {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    generate = commands.add_parser("generate", help="complete a text")
    generate.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="text; from standard input if absent or -"
    )
    generate.add_argument("--prompt-ids", metavar="IDS", help="token ids instead: 1,2,3")
    generate.add_argument("--json", action="store_true", help="print one JSON object at the end")
    _add_model_options(generate)
    _add_sampling_options(generate)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to a model that has a chat template")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    _add_model_options(chat)
    _add_sampling_options(chat)
    chat.set_defaults(run=_chat)

    info = commands.add_parser("info", help="sizes of a checkpoint, and what memory it needs")
    info.add_argument("path", nargs="?", metavar="PATH", help="default: the shipped model")
    info.add_argument("--memory", type=float, metavar="GB", help="memory to fit into")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    _add_ignored_keys(info)
    info.set_defaults(run=_info)

    convert = commands.add_parser("convert", help="write a checkpoint in other weight formats")
    convert.add_argument("source", metavar="SRC")
    convert.add_argument("target", metavar="DST", help="a folder that does not exist yet")
    for part in ("experts", "mlp", "attention", "lm-head"):
        convert.add_argument(f"--{part}", metavar="F", help=f"one of {', '.join(WEIGHT_FORMATS)}")
    convert.add_argument("--weights", metavar="F", help="for every part not named otherwise")
    convert.add_argument("--quiet", action="store_true", help="no progress bar")
    _add_ignored_keys(convert)
    convert.set_defaults(run=_convert)

    bench = commands.add_parser("bench", help="time of a decode step, beside its floor")
    bench_command.add_arguments(bench)
    bench.add_argument("--device", default="auto", metavar="D", help="auto, cpu or cuda")
    bench.add_argument("--check", action="store_true", help="compare tokens with NumPy's (GPU)")
    bench.add_argument(
        "--nvtx", action="store_true", help="steps in NVTX ranges, without graphs, for a profiler"
    )
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    _add_ignored_keys(bench)
    bench.set_defaults(run=_bench)

    evaluation = commands.add_parser("eval", help="what a format of the KV cache costs in quality")
    eval_command.add_arguments(evaluation)
    _add_ignored_keys(evaluation)
    evaluation.set_defaults(run=_eval)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="PATH", help="folder, or org/name in the local Hugging Face cache"
    )
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cpu or cuda")
    parser.add_argument(
        "--weights", default="native", metavar="F", help="a format, or part=format,part=format"
    )
    parser.add_argument(
        *("--kv-cache",),
        default="bf16",
        metavar="F",
        help=f"one of {', '.join(KV_FORMATS)}, or two: K,V, or k8v4; :rotated, :windows or + may "
        "follow",
    )
    parser.add_argument("--max-seq-len", type=int, metavar="N", help="longest prompt + completion")
    parser.add_argument("--quiet", action="store_true", help="no messages on standard error")
    _add_ignored_keys(parser)


def _add_ignored_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ignore-config-key",
        action="append",
        default=[],
        metavar="K",
        help="a config.json key that you know to have no effect (repeatable)",
    )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of a completion")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    parser.add_argument("--seed", type=int, metavar="S", help="the same seed, the same text")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="S", help="end before this text (repeatable)"
    )


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    names = ("max_tokens", "temperature", "seed", "top_p", "top_k", "stop")
    with _as_usage_errors():
        return SamplingParams(**{name: getattr(args, name) for name in names})


def _load(args: argparse.Namespace) -> LLM:
    with _as_usage_errors():
        return LLM(
            args.model,
            device=args.device,
            weights=formats_by_part(args.weights),
            kv_cache=KVCacheConfig.parse(args.kv_cache),
            max_seq_len=args.max_seq_len,
            ignore_config_keys=args.ignore_config_key,
            progress=not args.quiet,
        )


def _prompt(args: argparse.Namespace) -> str | list[int]:
    if args.prompt_ids is not None:
        if args.prompt is not None:
            raise UsageError("pass PROMPT or --prompt-ids, not both")
        try:
            return [int(word) for word in args.prompt_ids.split(",")]
        except ValueError:
            raise UsageError(
                f"--prompt-ids {args.prompt_ids!r}: expected whole numbers such as 1,2,3"
            ) from None
    if args.prompt is None and sys.stdin.isatty():
        raise PromptError("no prompt: pass it as an argument, in quotes, or on standard input")
    from_input = args.prompt in (None, "-")
    try:
        text = sys.stdin.read().removesuffix("\n") if from_input else args.prompt
        text.encode()
    except UnicodeError as error:
        raise PromptError(f"the prompt is not UTF-8 text: {error}") from None
    if not text:
        raise PromptError("the prompt is empty: pass some text")
    return text


def _generate(args: argparse.Namespace) -> None:
    params, prompt = _sampling_params(args), _prompt(args)
    with _load(args) as llm:
        if llm.tokenizer is None and isinstance(prompt, str):
            raise PromptError("this checkpoint has no tokenizer.json: pass --prompt-ids 1,2,3")
        with _as_usage_errors():
            pieces = llm.stream(prompt, params)
        completion = print_pieces(pieces, show=not args.json)
        if args.json:
            print(json.dumps(_as_json(completion), ensure_ascii=False))
        else:
            text_is_out = llm.tokenizer is not None
            print("" if text_is_out else ",".join(map(str, completion.token_ids)))
        _say_speed(completion, args.quiet)


def _as_json(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "timings": asdict(completion.timings),
        "prompt_token_ids": completion.prompt_token_ids,
    }


def _say_speed(completion: Completion, quiet: bool) -> None:
    count, timings = len(completion.token_ids), completion.timings
    each = timings.time_per_output_token
    speed = f", then {1 / each:.0f} tokens/s" if each else ""
    first = timings.time_to_first_token
    say(f"{count} tokens ({completion.finish_reason}); first after {first:.2f} s{speed}", quiet)


def _chat(args: argparse.Namespace) -> None:
    params = _sampling_params(args)
    opening: list[Message] = []
    if args.system is not None:
        opening.append({"role": "system", "content": args.system})
    with _load(args) as llm:
        if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
            raise TokenizerError("this checkpoint has no chat template; use npmoe generate")
        say(CHAT_HELP, args.quiet)
        messages = list(opening)
        for line in read_lines(CHAT_HELP):
            match line.strip():
                case "":
                    continue
                case "/exit":
                    return
                case "/reset":
                    messages = list(opening)
                    say("new conversation", args.quiet)
                    continue
            _take_turn(llm, messages, line, params)


def _take_turn(llm: LLM, messages: list[Message], line: str, params: SamplingParams) -> None:
    """Adds a line and the reply to the conversation; the reply is printed as it comes.

    Earlier turns are part of the prompt, and the engine finds their pages in its cache. An answer
    that Ctrl-C stops stays as far as it went. PromptError where the conversation outgrows the
    context and nobody is at a terminal to start over.
    """
    messages.append({"role": "user", "content": line})
    answer = []
    try:
        with closing(llm.stream_chat(messages, params)) as pieces:
            for piece in pieces:
                answer.append(piece)
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        say("stopped")
    except PromptError as error:
        if not sys.stdin.isatty():
            raise
        messages.pop()
        say(f"{error}; /reset starts over")
        return
    print(flush=True)
    messages.append({"role": "assistant", "content": "".join(answer)})


def _info(args: argparse.Namespace) -> None:
    if args.memory is None:
        memories = [Memory("free here (CPU)", free_memory("cpu"), cpu=True)]
        memories += [Memory(f"{size:g} GB", size * 1e9) for size in EXAMPLE_MEMORY_GB]
    elif 0 < args.memory < float("inf"):
        memories = [Memory(f"{args.memory:g} GB", args.memory * 1e9)]
    else:
        raise UsageError(f"--memory {args.memory:g}: expected gigabytes above 0")
    opened = open_model(args.path or shipped_model(), tuple(args.ignore_config_key))
    summary = summarize(opened, memories)
    print(json.dumps(asdict(summary)) if args.json else describe(summary))


def _convert(args: argparse.Namespace) -> None:
    chosen = {part: getattr(args, part) for part in WEIGHT_PARTS if getattr(args, part) is not None}
    if not chosen and args.weights is None:
        raise UsageError("nothing to convert: pass --weights F or a part, such as --experts fp4")
    with _as_usage_errors():
        policy = parse_weights(formats_by_part(args.weights or "native") | chosen)
        formats = convert_checkpoint(
            args.source,
            args.target,
            policy,
            ignored=tuple(args.ignore_config_key),
            quiet=args.quiet,
        )
    written = ", ".join(f"{part} {name}" for part, name in formats.items())
    say(f"wrote {args.target}: {written}", args.quiet)


def _bench(args: argparse.Namespace) -> None:
    with _as_usage_errors():
        options = bench_command.read_options(args, args.nvtx, args.check)
        ignored = tuple(args.ignore_config_key)
        subject = bench_command.read_subject(args, shipped_model(), ignored)
        record = measure(subject, options, resolve_device(args.device))
    print(json.dumps(record) if args.json else describe_record(record))


def _eval(args: argparse.Namespace) -> None:
    with _as_usage_errors():
        ignored = tuple(args.ignore_config_key)
        evaluation = Evaluation(eval_command.read_options(args, shipped_model(), ignored))
    with evaluation:
        record = evaluate(evaluation)
    print(json.dumps(record) if args.json else describe_evaluation(record))
    if args.plot is not None:
        _write_plot(args.plot, plot_evaluation(record))
        say(f"wrote {args.plot}", args.quiet)


def _write_plot(path: Path, picture: str) -> None:
    try:
        path.write_text(picture, "utf-8")
    except OSError as error:
        raise UsageError(f"plot = {path}: it cannot be written: {error.strerror}") from None
