"""`npmoe eval`: from a checkpoint and a text to what each cache format costs."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npmoe.config import KV_FORMATS, EngineConfig, KVCacheConfig, WeightsPolicy
from npmoe.errors import TokenizerError
from npmoe.eval.distributions import Tally, bucket_edges, summary
from npmoe.eval.losses import measure_losses
from npmoe.eval.passkey import measure_passkey
from npmoe.eval.text import TokenizedText, decoded_bytes, read_text
from npmoe.kv.storage import check_kv_format
from npmoe.llm import LLM
from npmoe.models.cache import token_bytes, window_bytes
from npmoe.models.stored import OpenModel, open_model
from npmoe.tokenizer import Tokenizer

REFERENCE = "bf16"
LONGEST_CONTEXT = 32768
"""Of windows, where the user does not say: prompts grow with the square of it."""


@dataclass(frozen=True)
class EvalOptions:
    """What to evaluate. kv_caches: what the user calls each cache -> what it is. context: tokens a
    window; None takes the model's, at most 32,768. tokens: predictions, None for the whole text.
    trials: passkeys at each context.

    Raises ValueError with the field's name and legal range.
    """

    model: str
    text: Path
    kv_caches: Mapping[str, KVCacheConfig] = field(
        default_factory=lambda: {name: KVCacheConfig.parse(name) for name in KV_FORMATS}
    )
    weights: WeightsPolicy = field(default_factory=dict)
    context: int | None = None
    tokens: int | None = None
    trials: int = 5
    device: str = "cpu"
    ignored: tuple[str, ...] = ()
    quiet: bool = False

    def __post_init__(self) -> None:
        for name in ("context", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: expected a whole number >= 1")
        if self.trials < 0:
            raise ValueError(f"trials = {self.trials}: expected a whole number >= 0")


class Evaluation:
    """The text, and an LLM for each cache, the reference first, all with the same weights."""

    def __init__(self, options: EvalOptions) -> None:
        """Reads the text, then loads the model once; on a GPU, once for each cache.

        Raises ValueError for a bad text, an option out of range and a context beyond the model's;
        TokenizerError without a tokenizer; what `LLM` raises.
        """
        opened = open_model(options.model, options.ignored)
        caches = {REFERENCE: KVCacheConfig.parse(REFERENCE), **options.kv_caches}
        for config in caches.values():
            check_kv_format(config, opened.spec.head_dim)
        self.options, self.caches = options, caches
        self.name = opened.checkpoint.folder.name
        self.tokenizer = _tokenizer(opened)
        self.text = read_text(options.text, self.tokenizer, opened.config.eos_token_ids)
        self.context = _context(opened, options, self.text)
        with ExitStack() as stack:
            self.llms = self._load(stack)
            self._stack = stack.pop_all()

    def _load(self, stack: ExitStack) -> list[LLM]:
        options, (reference, *others) = self.options, self.caches.values()

        def load(config: KVCacheConfig) -> LLM:
            return LLM(
                options.model,
                device=options.device,
                weights=options.weights,
                kv_cache=config,
                max_seq_len=self.context,
                max_num_seqs=1,
                ignore_config_keys=options.ignored,
                progress=not options.quiet,
            )

        first = stack.enter_context(load(reference))
        again = first.with_kv_cache if first.device == "cpu" else load
        return [first, *(stack.enter_context(again(config)) for config in others)]

    def __enter__(self) -> "Evaluation":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _tokenizer(opened: OpenModel) -> Tokenizer:
    folder = opened.checkpoint.folder
    tokenizer = Tokenizer.find(folder)
    if tokenizer is None:
        raise TokenizerError(f"{folder} has no tokenizer.json: a text cannot be evaluated")
    return tokenizer


def _context(opened: OpenModel, options: EvalOptions, text: TokenizedText) -> int:
    """Tokens a window: no longer than the text."""
    limit = opened.config.max_position_embeddings
    if options.context is not None and options.context > limit:
        raise ValueError(
            f"context = {options.context}: the model's max_position_embeddings is {limit}"
        )
    return min(options.context or min(limit, LONGEST_CONTEXT), text.num_targets)


def evaluate(evaluation: Evaluation) -> dict[str, Any]:
    """The record: what was read, and for each cache its size, its losses and its passkeys."""
    options, text, context = evaluation.options, evaluation.text, evaluation.context
    count = min(options.tokens or text.num_targets, text.num_targets)
    edges = bucket_edges(min(context, count))
    windows = list(text.windows(context, count))
    tallies = measure_losses(evaluation.llms, windows, edges, options.quiet)
    keys = measure_passkey(
        evaluation.llms, text, bucket_edges(context)[1:], options.trials, options.quiet
    )
    total = text.num_bytes(evaluation.tokenizer, count)
    bytes_by_bucket = [
        sum(decoded_bytes(evaluation.tokenizer, w.targets[low:high]) for w in windows)
        for low, high in zip(edges, edges[1:], strict=False)
    ]
    spec = evaluation.llms[0].spec
    rows = zip(evaluation.caches.items(), tallies, keys, strict=True)
    return {
        "model": evaluation.name,
        "text": text.name,
        "weights": options.weights or "native",
        "device": evaluation.llms[0].device,
        "reference": REFERENCE,
        "window": context,
        "tokens": count,
        "bytes": total,
        "caches": [
            {
                "kv_cache": name,
                "bytes_per_token": token_bytes(spec, config),
                "bytes_per_sequence": window_bytes(spec, config, EngineConfig.prefill_chunk),
                "overall": summary(tally.sums.sum(axis=0), total),
                "buckets": _buckets(tally, bytes_by_bucket),
                "passkey": found,
            }
            for (name, config), tally, found in rows
        ],
    }


def _buckets(tally: Tally, num_bytes: list[int]) -> list[dict[str, Any]]:
    edges = tally.edges
    return [
        {"from": low, "to": high} | summary(sums, size)
        for low, high, sums, size in zip(edges, edges[1:], tally.sums, num_bytes, strict=False)
    ]
