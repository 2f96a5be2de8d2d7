"""What `npmoe info` says of a checkpoint, from headers alone: sizes, bytes per token, what fits."""

import math
from dataclasses import dataclass

from npmoe.config import KV_FORMATS, WEIGHT_PARTS, EngineConfig, KVCacheConfig
from npmoe.dtypes import gigabytes
from npmoe.errors import UnsupportedModel
from npmoe.formats.fragments import RECORDS
from npmoe.kv.storage import check_kv_format
from npmoe.models.cache import token_bytes, window_bytes
from npmoe.models.conversion import format_bytes, group_as, running_bytes
from npmoe.models.kernel_layout import prepared_bytes
from npmoe.models.parameters import TABLE, VECTOR, Parameter
from npmoe.models.specs import LatentSpec, ModelSpec
from npmoe.models.stored import OpenModel, Storage, expected_tensors, stored_words

STORED = "stored"
COMPARED_FORMATS = ("bf16", "fp8", "fp4")
EXAMPLE_MEMORY_GB = (24.0, 80.0, 141.0)


@dataclass(frozen=True)
class Memory:
    """A memory to fit into, in bytes. cpu: 4-bit codes take a whole byte there."""

    name: str
    num_bytes: float
    cpu: bool = False


@dataclass(frozen=True)
class Fit:
    """One weight format in one memory.

    kv_tokens: cache format -> tokens that fit beside the weights, over all sequences together;
    negative where the weights alone are too large. Activations are not counted.
    """

    memory: str
    memory_bytes: float
    weights: str
    weight_bytes: float
    kv_tokens: dict[str, int]


@dataclass(frozen=True)
class ModelSummary:
    """Sizes of one model.

    parameters_active: what one token passes through; num_experts_per_tok of the experts and, as
    model cards count, the whole embedding. A tied head counts once.
    latent_dims: with multi-head latent attention, elements of the latent and of the rope key that
    the cache holds of a token for all heads. formats (for people), stored_bytes: by part.
    read_bytes: weight format -> bytes that one decoded token reads (one row of the embedding);
    "stored" is the checkpoint's own. kv_bytes: cache format -> bytes of one token in all layers.
    state_bytes: recurrent states of one sequence. window_bytes: copies of one sequence in the
    cache "fp4+", with prompts in chunks of the usual size. A format that the model's shapes cannot
    take is left out; window_bytes is 0 then.
    """

    path: str
    model_type: str
    num_layers: int
    num_moe_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent_dims: tuple[int, int] | None
    num_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int
    tied: bool
    parameters_total: int
    parameters_active: int
    formats: dict[str, str]
    stored_bytes: dict[str, int]
    read_bytes: dict[str, float]
    kv_bytes: dict[str, float]
    state_bytes: int
    window_bytes: float
    fits: list[Fit]


def summarize(opened: OpenModel, memories: list[Memory]) -> ModelSummary:
    """Everything that the headers of a checkpoint tell; no weight is read."""
    config, spec = opened.config, opened.spec
    counted = [p for p in opened.parameters if not (spec.tied and p.part == "lm_head")]
    counts = {p.name: math.prod(p.shape) for p in counted}
    routed = sum(counts[p.name] for p in counted if p.stacked)
    active = routed * config.num_experts_per_tok // config.num_experts if routed else 0
    kv_bytes = _kv_bytes(opened)
    return ModelSummary(
        path=str(opened.checkpoint.folder),
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        num_moe_layers=sum(config.layer_is_moe),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=config.head_dim,
        latent_dims=_latent_dims(spec),
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        max_position_embeddings=config.max_position_embeddings,
        tied=spec.tied,
        parameters_total=sum(counts.values()),
        parameters_active=sum(counts.values()) - routed + active,
        formats=stored_words(opened),
        stored_bytes=_stored_bytes(opened),
        read_bytes=_present({w: read_bytes(opened, w) for w in (STORED, *COMPARED_FORMATS)}),
        kv_bytes=kv_bytes,
        state_bytes=spec.state_bytes,
        window_bytes=_window_bytes(spec),
        fits=_fits(opened, memories, kv_bytes),
    )


def _latent_dims(spec: ModelSpec) -> tuple[int, int] | None:
    attention = spec.layers[0].attention
    if isinstance(attention, LatentSpec):
        return attention.kv_rank, attention.rope_dim
    return None


def _present(values: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _stored_bytes(opened: OpenModel) -> dict[str, int]:
    """Part -> bytes in the files; a tensor that two parameters share counts for the first."""
    found: dict[str, int] = {}
    seen = set()
    for parameter in opened.parameters:
        for name, *_ in expected_tensors(opened, parameter):
            if name not in seen:
                seen.add(name)
                info = opened.checkpoint.tensors[name]
                found[parameter.part] = found.get(parameter.part, 0) + info.stop - info.start
    return found


def _running_sizes(
    opened: OpenModel, weights: str, cpu: bool, padded: bool = False
) -> list[tuple[Parameter, float]]:
    """Every parameter with its bytes while it runs; empty where the format cannot hold one.

    padded: with what a GPU's layout adds, where it has one for the format.
    """
    sizes = []
    for parameter in opened.parameters:
        chosen = weights != STORED and parameter.part in WEIGHT_PARTS
        storage = opened.storages.get(parameter.name, Storage("fp32"))  # vectors are float32
        name = weights if chosen else storage.format
        measure = running_bytes if cpu and parameter.part != TABLE else format_bytes
        try:
            size = measure(name, parameter.shape, group_as(storage, name))
            if padded and name in RECORDS:
                size = prepared_bytes(parameter, name)
        except ValueError:
            return []
        sizes.append((parameter, size))
    return sizes


def read_bytes(opened: OpenModel, weights: str = STORED, cpu: bool = False) -> float | None:
    """Bytes of weights that one decoded token reads with all parts in one format, or as stored.

    cpu: with 4-bit codes in a byte each. None where the format cannot hold a matrix.
    """
    sizes = _running_sizes(opened, weights, cpu)
    total = 0.0
    for parameter, size in sizes:
        share = 1.0
        if parameter.part == TABLE:
            share = 1 / parameter.shape[0]
        elif parameter.stacked:
            share = opened.config.num_experts_per_tok / opened.config.num_experts
        total += share * size
    return total if sizes else None


def _kv_bytes(opened: OpenModel) -> dict[str, float]:
    spec = opened.spec
    found = {}
    for name in KV_FORMATS:
        config = KVCacheConfig(name, name)
        try:
            check_kv_format(config, spec.head_dim)
        except UnsupportedModel:
            continue
        found[name] = token_bytes(spec, config)
    return found


def _window_bytes(spec: ModelSpec) -> float:
    plus = KVCacheConfig.parse("fp4+")
    try:
        check_kv_format(plus, spec.head_dim)
    except UnsupportedModel:
        return 0
    return window_bytes(spec, plus, EngineConfig.prefill_chunk)


def _fits(opened: OpenModel, memories: list[Memory], kv_bytes: dict[str, float]) -> list[Fit]:
    taken = {}
    for cpu in {memory.cpu for memory in memories}:
        for weights in (STORED, *COMPARED_FORMATS):
            sizes = _running_sizes(opened, weights, cpu, padded=not cpu)
            if sizes:
                taken[cpu, weights] = float(sum(size for _, size in sizes))
    fits = []
    for memory in memories:
        for (cpu, weights), size in taken.items():
            if cpu == memory.cpu:
                rest = memory.num_bytes - size
                kv = {n: math.floor(rest / kv_bytes[n]) for n in COMPARED_FORMATS if n in kv_bytes}
                fits.append(Fit(memory.name, memory.num_bytes, weights, size, kv))
    return fits


PART_WORDS = {TABLE: "embedding", VECTOR: "norms, biases"}


def describe(summary: ModelSummary) -> str:
    """The summary as text for a terminal."""
    s = summary
    lines = [
        f"{s.path}",
        f"{s.model_type}: {s.num_layers} layers, hidden size {s.hidden_size:,}, "
        f"vocabulary {s.vocab_size:,}, context {s.max_position_embeddings:,} tokens",
        f"attention: {s.num_heads} heads{_cached(s)}",
    ]
    if s.num_experts:
        lines.append(
            f"experts: {s.num_experts} in each of {s.num_moe_layers} layers, "
            f"{s.num_experts_per_tok} a token"
        )
    lines += [
        f"parameters: {_count(s.parameters_total)} in all, {_count(s.parameters_active)} a token"
        + (" (the head is the embedding)" if s.tied else ""),
        "",
        f"stored: {gigabytes(sum(s.stored_bytes.values()))}",
        *_table(
            [
                [PART_WORDS.get(part, part), s.formats.get(part, ""), gigabytes(size)]
                for part, size in s.stored_bytes.items()
            ]
        ),
        "",
        "weights read for each decoded token, by weight format:",
        *_table([[name, gigabytes(size)] for name, size in s.read_bytes.items()]),
        "",
        "KV cache for each token, by cache format:",
        *_table([[name, gigabytes(size)] for name, size in s.kv_bytes.items()]),
        *(
            [f"recurrent states for each sequence: {gigabytes(s.state_bytes)}"]
            if s.state_bytes
            else []
        ),
        *(
            [f"copies for each sequence in a cache of fp4+: {gigabytes(s.window_bytes)}"]
            if s.window_bytes
            else []
        ),
        "",
        "tokens of context that fit beside the weights, over all sequences:",
    ]
    shown = [kv for kv in COMPARED_FORMATS if kv in s.kv_bytes]
    rows = [["memory", "weights", "take", *(f"KV {kv}" for kv in shown)]]
    seen = set()
    for fit in s.fits:
        if (fit.memory, fit.weight_bytes) in seen:
            continue  # the format in which they are stored
        seen.add((fit.memory, fit.weight_bytes))
        tokens = [f"{n:,}" if n > 0 else "-" for n in fit.kv_tokens.values()]
        rows.append([fit.memory, fit.weights, gigabytes(fit.weight_bytes), *tokens])
    return "\n".join([*lines, *_table(rows)])


def _cached(s: ModelSummary) -> str:
    """What of keys and values the cache holds."""
    if s.latent_dims is None:
        return f", {s.num_kv_heads} KV heads of {s.head_dim}"
    latent, rope_key = s.latent_dims
    return f" of {s.head_dim}, a latent of {latent} and a rope key of {rope_key} for all"


def _count(number: int) -> str:
    for word, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"


def _table(rows: list[list[str]]) -> list[str]:
    """Rows as aligned lines: the first two columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
