"""The list of a model's parameters: our names, shapes, and the checkpoint tensors behind each."""

from dataclasses import dataclass, replace

from npmoe.models.specs import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertSpec,
    LatentSpec,
    MLPSpec,
    ModelSpec,
    SharedSpec,
)

VECTOR, TABLE, ROUTER = "vector", "table", "router"


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model.

    part: "experts", "mlp", "attention" or "lm_head" (matrices whose format the user chooses),
    "vector" (norms and biases, float32), "table" (the embedding) or "router" (routers and gates of
    few rows), which are kept as they are.
    sources: checkpoint names; the inner tuple is joined along rows, the outer stacked (experts).
    fused: one tensor that may stand in the checkpoint instead of all sources, with the same shape.
    Where there are no sources it must, in fused_layout: "rows" (as here), "columns" (the last two
    axes swapped) or "mxfp4" (two tensors, `_blocks` and `_scales`).
    interleaved: rows of fused alternate between gate and up; here gate rows come first.
    stored_shape: of a vector's one tensor, where it differs from shape.
    offset: is added to a vector's stored values.
    group_rows: rows of the source come in groups, each with so many rows of every part; here all
    rows of the first part come first, then those of the next.
    """

    name: str
    part: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, ...], ...]
    rows: tuple[int, ...]
    fused: str | None = None
    fused_layout: str = "rows"
    interleaved: bool = False
    stored_shape: tuple[int, ...] | None = None
    offset: float = 0.0
    group_rows: tuple[int, ...] = ()

    @property
    def stacked(self) -> bool:
        """Whether the leading axis counts experts."""
        return len(self.shape) == (2 if self.part == VECTOR else 3)


@dataclass(frozen=True)
class TensorNames:
    """How a family spells the tensors that differ between families.

    `model` is the beginning of all names but the head's. `moe` is the block's prefix in the layer;
    in the block, `router` is the router, `expert` the gate, up and down matrices of an expert,
    `selection_bias` that tensor (`[1, E]` where it is a `selection_bias_row`), `shared` the shared
    expert and `shared_gate` its gate.

    `fused` are tensors, in the layer, that hold all experts' gate_up and down, in `fused_layout`
    and with gate and up rows alternating where `interleaved`; `expert` is None where there are no
    others. `shared_fused` are the same for the shared expert. `qk_norms` are in the attention.

    `delta_grouped`: a linear attention layer has its projections in two tensors, grouped by key
    heads, and not in four.
    """

    moe: str = "mlp"
    expert: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    fused: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    fused_layout: str = "rows"
    interleaved: bool = False
    shared_fused: tuple[str, str] | None = None
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    selection_bias: str = "gate.e_score_correction_bias"
    selection_bias_row: bool = False
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    model: str = "model"
    delta_grouped: bool = False


def decoder_parameters(spec: ModelSpec, names: TensorNames) -> list[Parameter]:
    """Every parameter of a decoder in Hugging Face layout."""
    hidden = spec.hidden_size
    table = f"{names.model}.embed_tokens.weight"
    found = [
        Parameter("embed_tokens", TABLE, (spec.vocab_size, hidden), ((table,),), (spec.vocab_size,))
    ]
    for i in range(len(spec.layers)):
        found += _layer_parameters(spec, i, names)
    found.append(_single("norm", VECTOR, (hidden,), f"{names.model}.norm.weight"))
    if spec.layer_norm:
        found.append(_single("norm_bias", VECTOR, (hidden,), f"{names.model}.norm.bias"))
    head = table if spec.tied else "lm_head.weight"
    found.append(_single("lm_head", "lm_head", (spec.vocab_size, hidden), head))
    if spec.head_bias:
        found.append(_single("lm_head_bias", VECTOR, (spec.vocab_size,), "lm_head.bias"))
    return found


NORMS = {
    "before": ("input_layernorm", "post_attention_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "layer": ("input_layernorm", "post_attention_layernorm"),
}
"""LayerSpec.norm -> the norms of attention and MLP."""


def _norm_parameters(norm: str, hidden: int, ours: str, theirs: str) -> list[Parameter]:
    found = []
    for name in NORMS[norm]:
        found.append(_single(f"{ours}{name}", VECTOR, (hidden,), f"{theirs}{name}.weight"))
        if norm == "layer":
            bias = f"{theirs}{name}.bias"
            found.append(_single(f"{ours}{name}_bias", VECTOR, (hidden,), bias))
    return found


def _single(name: str, part: str, shape: tuple[int, ...], source: str) -> Parameter:
    return Parameter(name, part, shape, ((source,),), (shape[0],))


def _layer_parameters(spec: ModelSpec, i: int, names: TensorNames) -> list[Parameter]:
    attention, mlp, hidden = spec.layers[i].attention, spec.layers[i].mlp, spec.hidden_size
    ours, theirs = f"layers.{i}.", f"{names.model}.layers.{i}."
    found = _norm_parameters(spec.layers[i].norm, hidden, ours, theirs)
    if isinstance(attention, DeltaNetSpec):
        found += _delta_parameters(attention, hidden, ours, f"{theirs}linear_attn.", names)
    elif isinstance(attention, LatentSpec):
        found += _latent_parameters(attention, hidden, ours, f"{theirs}self_attn.")
    else:
        found += _attention_parameters(attention, hidden, ours, theirs, names)
    if isinstance(mlp, ExpertSpec):
        block = f"{theirs}{names.moe}."
        return found + _expert_parameters(mlp, hidden, ours, block, theirs, names)
    return found + _mlp_parameters(mlp, hidden, ours, f"{theirs}mlp.")


def _latent_parameters(
    attention: LatentSpec, hidden: int, ours: str, block: str
) -> list[Parameter]:
    heads, rank, q_rank = attention.num_heads, attention.kv_rank, attention.q_rank
    query = heads * (attention.nope_dim + attention.rope_dim)
    up = heads * (attention.nope_dim + attention.value_dim)
    matrices = [
        ("kv_a_proj", (rank + attention.rope_dim, hidden), "kv_a_proj_with_mqa"),
        ("kv_b_proj", (up, rank), "kv_b_proj"),
        ("o_proj", (hidden, heads * attention.value_dim), "o_proj"),
    ]
    vectors = [("kv_a_norm", rank, "kv_a_layernorm.weight")]
    if q_rank is None:
        matrices.append(("q_proj", (query, hidden), "q_proj"))
    else:
        matrices.append(("q_a_proj", (q_rank, hidden), "q_a_proj"))
        matrices.append(("q_proj", (query, q_rank), "q_b_proj"))
        vectors.append(("q_a_norm", q_rank, "q_a_layernorm.weight"))
    if attention.bias:
        vectors.append(("kv_a_bias", rank + attention.rope_dim, "kv_a_proj_with_mqa.bias"))
        vectors.append(("o_bias", hidden, "o_proj.bias"))
        if q_rank is not None:
            vectors.append(("q_a_bias", q_rank, "q_a_proj.bias"))
    return [
        *(_single(f"{ours}{n}", "attention", s, f"{block}{t}.weight") for n, s, t in matrices),
        *(_single(f"{ours}{n}", VECTOR, (size,), f"{block}{t}") for n, size, t in vectors),
    ]


def _attention_parameters(
    attention: AttentionSpec, hidden: int, ours: str, theirs: str, names: TensorNames
) -> list[Parameter]:
    q = attention.num_heads * attention.head_dim
    q_rows = 2 * q if attention.output_gate else q
    kv = attention.num_kv_heads * attention.head_dim
    rows = q_rows, kv, kv
    qkv = tuple(f"{theirs}self_attn.{p}_proj" for p in "qkv")
    weights = tuple(f"{p}.weight" for p in qkv)
    o_proj = f"{theirs}self_attn.o_proj"
    found = [
        Parameter(f"{ours}qkv_proj", "attention", (sum(rows), hidden), (weights,), rows),
        _single(f"{ours}o_proj", "attention", (hidden, q), f"{o_proj}.weight"),
    ]
    if attention.qkv_bias:
        biases = tuple(f"{p}.bias" for p in qkv)
        found.append(Parameter(f"{ours}qkv_bias", VECTOR, (sum(rows),), (biases,), rows))
    if attention.output_bias:
        found.append(_single(f"{ours}o_bias", VECTOR, (hidden,), f"{o_proj}.bias"))
    if attention.qk_norm != "none":
        per_head = attention.qk_norm != "projection"
        for which, width, name in (("q", q, names.qk_norms[0]), ("k", kv, names.qk_norms[1])):
            shape = (attention.head_dim if per_head else width,)
            source = f"{theirs}self_attn.{name}.weight"
            found.append(_single(f"{ours}{which}_norm", VECTOR, shape, source))
    if attention.sinks:
        sinks = f"{theirs}self_attn.sinks"
        found.append(_single(f"{ours}sinks", VECTOR, (attention.num_heads,), sinks))
    return found


def _delta_parameters(
    delta: DeltaNetSpec, hidden: int, ours: str, block: str, names: TensorNames
) -> list[Parameter]:
    heads, channels = delta.num_value_heads, delta.conv_channels
    values, ratio = delta.value_width, delta.num_value_heads // delta.num_key_heads
    qkvz, ba = (channels + values, hidden), (2 * heads, hidden)
    if names.delta_grouped:
        key, value = delta.key_head_dim, ratio * delta.value_head_dim
        found = [
            replace(
                _single(f"{ours}qkvz_proj", "attention", qkvz, f"{block}in_proj_qkvz.weight"),
                group_rows=(key, key, value, value),
            ),
            replace(
                _single(f"{ours}ba_proj", ROUTER, ba, f"{block}in_proj_ba.weight"),
                group_rows=(ratio, ratio),
            ),
        ]
    else:
        wide = (f"{block}in_proj_qkv.weight", f"{block}in_proj_z.weight")
        narrow = (f"{block}in_proj_b.weight", f"{block}in_proj_a.weight")
        found = [
            Parameter(f"{ours}qkvz_proj", "attention", qkvz, (wide,), (channels, values)),
            Parameter(f"{ours}ba_proj", ROUTER, ba, (narrow,), (heads, heads)),
        ]
    conv = _single(f"{ours}conv", VECTOR, (channels * delta.conv_width,), f"{block}conv1d.weight")
    return [
        *found,
        replace(conv, stored_shape=(channels, 1, delta.conv_width)),
        _single(f"{ours}a_log", VECTOR, (heads,), f"{block}A_log"),
        _single(f"{ours}dt_bias", VECTOR, (heads,), f"{block}dt_bias"),
        _single(f"{ours}delta_norm", VECTOR, (delta.value_head_dim,), f"{block}norm.weight"),
        _single(f"{ours}out_proj", "attention", (hidden, values), f"{block}out_proj.weight"),
    ]


def _mlp_parameters(mlp: MLPSpec, hidden: int, ours: str, block: str) -> list[Parameter]:
    width = mlp.intermediate_size
    found: list[Parameter] = []
    for suffix, part in (("weight", "mlp"), ("bias", VECTOR)) if mlp.bias else (("weight", "mlp"),):
        ending = "_proj" if suffix == "weight" else "_bias"
        columns = ((hidden,), (width,)) if suffix == "weight" else ((), ())
        both = (f"{block}gate_proj.{suffix}", f"{block}up_proj.{suffix}")
        shape = (2 * width, *columns[0])
        found += [
            Parameter(f"{ours}gate_up{ending}", part, shape, (both,), (width, width)),
            _single(
                f"{ours}down{ending}", part, (hidden, *columns[1]), f"{block}down_proj.{suffix}"
            ),
        ]
    return found


def _expert_parameters(
    mlp: ExpertSpec, hidden: int, ours: str, block: str, theirs: str, names: TensorNames
) -> list[Parameter]:
    count, width = mlp.router.num_experts, mlp.intermediate_size
    gate_up: tuple[tuple[str, ...], ...] = ()
    down: tuple[tuple[str, ...], ...] = ()
    if names.expert is not None:
        experts = [f"{block}experts.{e}." for e in range(count)]
        gate_up = tuple(tuple(f"{e}{n}.weight" for n in names.expert[:2]) for e in experts)
        down = tuple((f"{e}{names.expert[2]}.weight",) for e in experts)
    router = f"{block}{names.router}"
    found = [_single(f"{ours}router", ROUTER, (count, hidden), f"{router}.weight")]
    if mlp.router.bias:
        found.append(_single(f"{ours}router_bias", VECTOR, (count,), f"{router}.bias"))
    if mlp.router.selection_bias:
        source = f"{block}{names.selection_bias}"
        stored_shape = (1, count) if names.selection_bias_row else None
        found.append(
            replace(
                _single(f"{ours}selection_bias", VECTOR, (count,), source),
                stored_shape=stored_shape,
            )
        )
    if mlp.shared is not None:
        found += _shared_parameters(mlp.shared, hidden, ours, theirs, names)
    for name, rows, columns, sources, fused in (
        ("gate_up", (width, width), hidden, gate_up, names.fused[0]),
        ("down", (hidden,), width, down, names.fused[1]),
    ):
        shape = (count, sum(rows), columns)
        interleaved = name == "gate_up" and names.interleaved
        found.append(
            Parameter(
                f"{ours}{name}_proj",
                "experts",
                shape,
                sources,
                rows,
                f"{theirs}{fused}",
                names.fused_layout,
                interleaved,
            )
        )
        if mlp.bias:
            bias = f"{theirs}{fused}_bias"
            found.append(
                Parameter(
                    f"{ours}{name}_bias",
                    VECTOR,
                    shape[:2],
                    (),
                    rows,
                    fused=bias,
                    interleaved=interleaved,
                )
            )
    return found


def _shared_parameters(
    shared: SharedSpec, hidden: int, ours: str, theirs: str, names: TensorNames
) -> list[Parameter]:
    width, block = shared.intermediate_size, f"{theirs}{names.moe}."
    gate_up = f"{ours}shared_gate_up_proj"
    rows: tuple[int, ...] = (width, width)
    both = tuple(f"{block}{names.shared}.{which}_proj.weight" for which in ("gate", "up"))
    down = f"{block}{names.shared}.down_proj.weight"
    if names.shared_fused is not None:
        both, down = (f"{theirs}{names.shared_fused[0]}",), f"{theirs}{names.shared_fused[1]}"
        rows = (2 * width,)
    found = [
        Parameter(gate_up, "mlp", (2 * width, hidden), (both,), rows),
        _single(f"{ours}shared_down_proj", "mlp", (hidden, width), down),
    ]
    if shared.gated:
        gate = f"{block}{names.shared_gate}.weight"
        found.append(_single(f"{ours}shared_gate", ROUTER, (1, hidden), gate))
    return found
