"""What a checkpoint says of itself (`ModelConfig`) and what the user asks of the engine.

Field names of `ModelConfig` are Hugging Face's. `ConfigReader` reads a config.json strictly: every
key is either used, known to be without effect on the computation, or an error that names it.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from npmoe.errors import UnsupportedModel

NEUTRAL_KEYS = frozenset(
    """
    architectures attention_dropout attn_implementation auto_map bad_words_ids bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    hidden_dropout id2label initializer_range label2id length_penalty max_length min_length
    model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_router_logits output_scores pad_token_id
    prefix pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty
    resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef router_jitter_noise
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()
)
"""Keys that change training, sampling defaults or file handling, never the forward pass.
`pretraining_tp` splits one matrix product into several with the same result."""


MOST = {
    "num_hidden_layers": 1000,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 10_000),
    "moe_num_experts": 10_000,
}
"""Names of the tensors of each layer and expert are made before it shows that they are absent."""
MOST_OF_OTHERS = 2**31 - 1


def is_number(value: Any, zero: bool = False) -> bool:
    """Whether `value` is a finite number above 0, or 0 where `zero` allows it."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value) and (value > 0 or (zero and value == 0))


class ConfigReader:
    """Hands out the keys of one config dict and remembers which were asked for.

    `ignored` names keys that the user has decided to ignore.
    """

    def __init__(self, raw: dict[str, Any], where: str, ignored: tuple[str, ...] = ()) -> None:
        self.raw = raw
        self.where = where
        self._ignored = ignored
        self._seen = set(NEUTRAL_KEYS) | set(ignored)

    def inner(self, name: str, raw: dict[str, Any]) -> "ConfigReader":
        """A reader of an object inside this config, under the same name and with what the user
        ignores."""
        return ConfigReader(raw, f"{self.where}: {name}", self._ignored)

    def take(self, *names: str, default: Any = ...) -> Any:
        """The value of the first of `names` that is present and not null, else `default`."""
        self._seen.update(names)
        for name in names:
            if self.raw.get(name) is not None:
                return self.raw[name]
        if default is ...:
            raise UnsupportedModel(f"{self.where}: the key {names[0]!r} is missing")
        return default

    def take_int(self, *names: str, default: Any = ..., least: int = 1) -> Any:
        """Like `take`, for a whole number of at least `least` and within reason."""
        value = self.take(*names, default=default)
        if value is None or value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UnsupportedModel(
                f"{self.where}: {names[0]} = {value!r}, expected a whole number >= {least}"
            )
        if value > MOST.get(names[0], MOST_OF_OTHERS):
            raise UnsupportedModel(
                f"{self.where}: {names[0]} = {value}, expected at most "
                f"{MOST.get(names[0], MOST_OF_OTHERS):,}"
            )
        return value

    def take_number(self, name: str, default: float | None) -> Any:
        """Like `take`, for a number above 0."""
        value = self.take(name, default=default)
        if value is not None and not is_number(value):
            raise UnsupportedModel(f"{self.where}: {name} = {value!r}, expected a number > 0")
        return value

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuses a key whose value asks for something that is not implemented."""
        value = self.take(name, default=None)
        if value is not None and value not in allowed:
            implemented = f" (npmoe implements {', '.join(map(repr, allowed))})" if allowed else ""
            raise UnsupportedModel(
                f"{self.where}: {name} = {value!r} is not implemented{implemented}"
            )

    def ignore(self, *names: str) -> None:
        """Declares keys that this family carries without using them."""
        self._seen.update(names)

    def finish(self) -> None:
        """Raises UnsupportedModel for a key that nobody asked for and that is switched on."""
        for name, value in self.raw.items():
            off = value is None or value is False or value == [] or value == {}
            if name not in self._seen and not name.startswith("_") and not off:
                raise UnsupportedModel(
                    f"{self.where}: the key {name!r} (= {value!r}) is not known to npmoe and may "
                    f"change the computation. If it does not, pass "
                    f"ignore_config_keys=({name!r},) to LLM or --ignore-config-key {name}."
                )


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; the fields are those of Hugging Face's `rope_parameters`."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ("factor", "short_factor", "long_factor", "attention_factor"),
}
"""Rope type -> the keys that it reads besides rope_theta and original_max_position_embeddings."""

ROPE_REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ROPE_KEYS["llama3"],
    "longrope": ("short_factor", "long_factor"),
}


def read_rope(
    reader: ConfigReader, default_theta: float = 10000.0, default_partial: float = 1.0
) -> RopeConfig:
    """Reads both spellings: `rope_theta` + `rope_scaling`, and `rope_parameters`.

    Raises UnsupportedModel for other rope types (`dynamic` too: its frequencies change with the
    length of the sequence) and for keys that the type does not know.
    """
    theta = reader.take_number("rope_theta", default=None)
    partial = reader.take_number("partial_rotary_factor", default=None)
    top_level_original = reader.take_int("original_max_position_embeddings", default=None)
    parameters = reader.take("rope_parameters", default=None)
    scaling = reader.take("rope_scaling", default=None) or parameters or {}
    if not isinstance(scaling, dict):
        raise UnsupportedModel(f"{reader.where}: rope_scaling = {scaling!r}, expected an object")
    scaling = dict(scaling)
    rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if not isinstance(rope_type, str) or rope_type not in ROPE_KEYS:
        raise UnsupportedModel(
            f"{reader.where}: rope_type {rope_type!r} is not implemented "
            f"(npmoe implements {', '.join(ROPE_KEYS)})"
        )
    values: dict[str, Any] = {"rope_type": rope_type}
    for key, fallback in (
        ("rope_theta", theta or default_theta),
        ("partial_rotary_factor", partial or default_partial),
    ):
        value = scaling.pop(key, None)
        values[key] = fallback if value is None else value
    values["original_max_position_embeddings"] = top_level_original or scaling.get(
        "original_max_position_embeddings"
    )
    scaling.pop("original_max_position_embeddings", None)
    for key in ROPE_REQUIRED.get(rope_type, ()):
        if scaling.get(key) is None:
            raise UnsupportedModel(f"{reader.where}: rope_type {rope_type!r} needs {key!r}")
    for key in ROPE_KEYS[rope_type]:
        value = scaling.pop(key, None)
        if value is not None:
            values[key] = tuple(value) if isinstance(value, list) else value
    scaling.pop("finetuned", None)
    for key, value in scaling.items():
        if value is not None:
            raise UnsupportedModel(
                f"{reader.where}: rope_type {rope_type!r} with {key} = {value!r} is not implemented"
            )
    _check_rope_values(values, reader.where)
    return RopeConfig(**values)


def _check_rope_values(values: dict[str, Any], where: str) -> None:
    for key, value in values.items():
        if key in ("short_factor", "long_factor"):
            legal = isinstance(value, tuple) and all(is_number(n) for n in value)
        elif key in ("rope_type", "truncate") or value is None:
            continue
        else:
            legal = is_number(value, zero=key.startswith("mscale"))
        if not legal:
            raise UnsupportedModel(f"{where}: rope {key} = {value!r}, expected numbers > 0")


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Tuples have one entry a layer."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    clip_qkv: float | None = None
    use_qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "best"
    routed_scaling_factor: float = 1.0
    selection_bias: bool = False
    shared_expert_intermediate_size: int = 0
    shared_expert_gate: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    rope_interleave: bool = False
    swiglu_alpha: float = 1.0
    swiglu_limit: float | None = None
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    quant_method: str | None = None
    router_jitter_noise: float = 0.0
    lm_head_bias: bool = False
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    layer_is_linear: tuple[bool, ...] = ()
    layer_is_moe: tuple[bool, ...] = ()
    layer_windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """`eos_token_id` of a config: null, one id or a list of ids, as a tuple.

    Raises UnsupportedModel for anything else.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise UnsupportedModel(f"{where}: token id {value!r}, expected a whole number or a list")
    return tuple(ids)


def read_common(reader: ConfigReader, **family: Any) -> ModelConfig:
    """Reads the keys that every family shares; `family` holds the fields that it reads itself.

    A value in `family` wins, so that a family can give its own default.
    """
    hidden = reader.take_int("hidden_size")
    heads = reader.take_int("num_attention_heads")
    layers = reader.take_int("num_hidden_layers")
    bos = reader.raw.get("bos_token_id")
    values: dict[str, Any] = {
        "model_type": reader.raw["model_type"],
        "vocab_size": reader.take_int("vocab_size"),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": reader.take_int("num_key_value_heads", default=heads),
        "head_dim": reader.take_int("head_dim", default=hidden // heads),
        "max_position_embeddings": reader.take_int("max_position_embeddings"),
        "tie_word_embeddings": bool(reader.take("tie_word_embeddings", default=False)),
        "layer_is_linear": (False,) * layers,
        "layer_is_moe": (False,) * layers,
        "layer_windows": (None,) * layers,
        "bos_token_id": next(iter(token_ids(bos, reader.where)), None),
        "eos_token_ids": token_ids(reader.raw.get("eos_token_id"), reader.where),
    }
    reader.expect("hidden_act", "silu", "swish")
    if "quant_method" not in family:
        reader.expect("quantization_config")
    values.update(family)
    config = ModelConfig(**values)
    _check_config(config, reader.where)
    return config


def read_window(reader: ConfigReader, absent: int | None, least: int = 1) -> int | None:
    """`sliding_window`: null means none, a config without the key means `absent`."""
    window = reader.take_int("sliding_window", default=None, least=least)
    return window if "sliding_window" in reader.raw else absent


def read_layer_windows(
    reader: ConfigReader, window: int | None, default: list[str]
) -> tuple[int | None, ...]:
    """The window of each layer by `layer_types`; `default` has the types where the key is absent.

    Raises UnsupportedModel for other types and where they are not as many as the layers.
    """
    types = reader.take("layer_types", default=default)
    legal = ("sliding_attention", "full_attention")
    if (
        not isinstance(types, list)
        or len(types) != len(default)
        or any(kind not in legal for kind in types)
    ):
        raise UnsupportedModel(
            f"{reader.where}: layer_types = {types!r} is not implemented for {len(default)} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _check_config(config: ModelConfig, where: str) -> None:
    if config.num_attention_heads % config.num_key_value_heads:
        raise UnsupportedModel(
            f"{where}: num_attention_heads = {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads = {config.num_key_value_heads}"
        )
    if config.head_dim < 2 or config.head_dim % 2:
        raise UnsupportedModel(f"{where}: head_dim = {config.head_dim}, expected an even number")
    rotary_dim = int(config.head_dim * config.rope.partial_rotary_factor)
    if not 2 <= rotary_dim <= config.head_dim or rotary_dim % 2:
        raise UnsupportedModel(
            f"{where}: partial_rotary_factor = {config.rope.partial_rotary_factor} turns "
            f"{rotary_dim} elements of a head of {config.head_dim}, expected an even number"
        )
    pairs = rotary_dim // 2
    for name in ("short_factor", "long_factor"):
        factors = getattr(config.rope, name)
        if config.rope.rope_type == "longrope" and len(factors) != pairs:
            raise UnsupportedModel(
                f"{where}: rope {name} has {len(factors)} numbers, head_dim asks for {pairs}"
            )
    if any(config.layer_is_moe) and not 1 <= config.num_experts_per_tok <= config.num_experts:
        raise UnsupportedModel(
            f"{where}: num_experts_per_tok = {config.num_experts_per_tok} with "
            f"num_experts = {config.num_experts}"
        )
    if any(config.layer_is_moe):
        _check_groups(config, where)
    if any(config.layer_is_linear):
        _check_linear_layers(config, where)


def _check_linear_layers(config: ModelConfig, where: str) -> None:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise UnsupportedModel(
            f"{where}: linear_num_value_heads = {values} is not a multiple of "
            f"linear_num_key_heads = {keys}"
        )
    if all(config.layer_is_linear):
        raise UnsupportedModel(f"{where}: layer_types has no 'full_attention' layer")


def _check_groups(config: ModelConfig, where: str) -> None:
    groups, chosen, experts = config.n_group, config.topk_group, config.num_experts
    group_size = experts // groups
    if experts % groups or not 1 <= chosen <= groups:
        raise UnsupportedModel(
            f"{where}: n_group = {groups}, topk_group = {chosen} with num_experts = {experts}"
        )
    if config.num_experts_per_tok > chosen * group_size or (
        groups > 1 and config.group_score == "sum_of_two" and group_size < 2
    ):
        raise UnsupportedModel(
            f"{where}: num_experts_per_tok = {config.num_experts_per_tok} from {chosen} groups "
            f"of {group_size} experts"
        )


HeadDims = int | tuple[int, int]
"""Elements of a head of the cache: of keys and values, or of each where they differ."""

KV_FORMATS = ("fp32", "bf16", "fp8", "int8", "int4", "int4_asym", "fp4", "mxfp4", "nvfp4")
WEIGHT_FORMATS = (
    *("fp32", "bf16", "fp16", "fp8", "int8"),
    *("int4", "int4_asym", "fp4", "mxfp4", "nvfp4"),
)
WEIGHT_PARTS = ("experts", "mlp", "attention", "lm_head")


KV_PRESETS = {"k8v4": "int8,fp4"}
ROTATED, WINDOWS = "rotated", "windows"
WINDOW_SIZES = re.compile(rf"{WINDOWS}=(\d+),(\d+)(?:,(\w+))?")
WINDOW_FORMATS = ("fp32", "bf16", "fp8")


@dataclass(frozen=True)
class KVWindows:
    """What a query reads at higher precision, whatever the cache's formats: the keys and values of
    the `first` tokens of its sequence and of the `recent` ones, itself included.

    Every token is quantised all the same; `format` is that of the copies beside it.
    """

    first: int = 16
    recent: int = 128
    format: str = "bf16"

    def __post_init__(self) -> None:
        for name, least in (("first", 0), ("recent", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} = {value!r}: expected a whole number >= {least}")
        if self.format not in WINDOW_FORMATS:
            raise ValueError(f"format = {self.format!r}: legal are {', '.join(WINDOW_FORMATS)}")

    @classmethod
    def parse(cls, option: str) -> "KVWindows | None":
        """ "windows", or windows=FIRST,RECENT with ,FORMAT behind it or not; None: neither."""
        sizes = WINDOW_SIZES.fullmatch(option)
        if sizes is None:
            return cls() if option == WINDOWS else None
        return cls(int(sizes[1]), int(sizes[2]), sizes[3] or cls.format)

    def __str__(self) -> str:
        """As `parse` reads it."""
        if self == KVWindows():
            return WINDOWS
        name = "" if self.format == KVWindows.format else f",{self.format}"
        return f"{WINDOWS}={self.first},{self.recent}{name}"

    def tokens(self, prefill_chunk: int) -> int:
        """Tokens of a sequence that have a copy at the same time: the next queries, of which there
        are a chunk at most, reach no others."""
        return self.first + self.recent + prefill_chunk


@dataclass(frozen=True)
class KVCacheConfig:
    """Formats of the paged cache. Keys and values are independent.

    `group_size` elements along head_dim share one scale (8- and 4-bit formats only): fp16, in mxfp4
    E8M0 and in nvfp4 E4M3. rotated: heads are multiplied by a Hadamard matrix before they are
    quantised, and results back. windows: what is read at higher precision; None: nothing.
    """

    key_format: str = "bf16"
    value_format: str = "bf16"
    group_size: int = 32
    rotated: bool = False
    windows: KVWindows | None = None

    def __post_init__(self) -> None:
        for name in (self.key_format, self.value_format):
            if name not in KV_FORMATS:
                raise ValueError(f"kv_cache = {name!r}: legal formats are {', '.join(KV_FORMATS)}")
        if self.group_size not in (16, 32, 64, 128):
            raise ValueError(f"group_size = {self.group_size!r}: legal values are 16, 32, 64, 128")

    @classmethod
    def parse(cls, value: "str | tuple[str, str] | KVCacheConfig") -> "KVCacheConfig":
        """A word for both, "k8v4", a pair (keys, values) or "K,V"; any word with ":rotated" behind
        it, then ":windows" as `KVWindows.parse` reads it, or with "+", which is both; or a
        KVCacheConfig as it is."""
        if isinstance(value, KVCacheConfig):
            return value
        if isinstance(value, str):
            formats, *options = value.split(":")
            if formats.endswith("+") and not options:
                formats, options = formats[:-1], [ROTATED, WINDOWS]
            keys, comma, values = KV_PRESETS.get(formats, formats).partition(",")
            rotated = options[:1] == [ROTATED]
            windows = KVWindows.parse(options[-1]) if options else None
            if len(options) == rotated + (windows is not None):
                return cls(keys, values if comma else keys, rotated=rotated, windows=windows)
        elif isinstance(value, tuple | list) and len(value) == 2:
            return cls(*value)
        raise ValueError(
            f"kv_cache = {value!r}: pass a format ({', '.join((*KV_FORMATS, *KV_PRESETS))}), "
            f"with :{ROTATED}, :{WINDOWS}, :{ROTATED}:{WINDOWS} or + (which is both) behind it or "
            "not, a pair (keys, values), or a KVCacheConfig"
        )

    def __str__(self) -> str:
        """As `parse` reads it, but for group_size."""
        keys, values = self.key_format, self.value_format
        formats = keys if keys == values else f"{keys},{values}"
        if self.rotated and self.windows == KVWindows():
            return f"{formats}+"
        options = [ROTATED] * self.rotated + ([str(self.windows)] if self.windows else [])
        return ":".join([formats, *options])


WeightsPolicy = dict[str, str]
"""Part -> weight format; a part that is not named keeps what the checkpoint has."""


def parse_weights(value: str | dict[str, str]) -> WeightsPolicy:
    """`"native"`, a format for every part, or a dict part -> format."""
    if isinstance(value, str):
        value = dict.fromkeys(WEIGHT_PARTS, value)
    if not isinstance(value, dict):
        raise ValueError(f"weights = {value!r}: pass a format, or a dict part -> format")
    legal = ("native", *WEIGHT_FORMATS)
    for part, name in value.items():
        if part not in WEIGHT_PARTS:
            raise ValueError(f"weights: no part {part!r}; parts are {', '.join(WEIGHT_PARTS)}")
        if name not in legal:
            raise ValueError(f"weights[{part!r}] = {name!r}: legal formats are {', '.join(legal)}")
    return {part: name for part, name in value.items() if name != "native"}


def formats_by_part(text: str) -> dict[str, str]:
    """What a command line says of weights: a format for every part, or part=format,part=format."""
    if "=" not in text:
        return dict.fromkeys(WEIGHT_PARTS, text)
    pairs = [pair.partition("=") for pair in text.split(",")]
    return {part.strip().replace("-", "_"): name.strip() for part, _, name in pairs}


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs; lengths and budgets in tokens.

    max_seq_len: longest prompt + completion; None takes the model's length, bounded by memory.
    max_num_seqs: sequences that run at the same time; more wait their turn.
    prefill_chunk: most prompt tokens of one step.
    memory_fraction: part of the free memory that the KV cache may take.
    """

    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    max_seq_len: int | None = None
    max_num_seqs: int = 16
    page_size: int = 32
    prefill_chunk: int = 512
    memory_fraction: float = 0.5

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "max_num_seqs", "page_size", "prefill_chunk"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if (value is not None or name != "max_seq_len") and (not whole or value < 1):
                raise ValueError(f"{name} = {value!r}: expected a whole number >= 1")
        if not isinstance(self.memory_fraction, int | float) or not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction = {self.memory_fraction!r}: legal range is (0, 1]")
