"""The decode step on the GPU: one token each of up to 8 sequences, as launches for a graph.

Six kernels a layer: qkv, attention (with q/k norm, rotary and the KV write), output, route,
gate_up, down; qk_norm before attention where a norm is over a whole projection. Large experts of
one sequence run in one kernel, which goes on with the next layer's qkv; of several sequences they
are grouped instead (npmoe/models/grouped.py). Then lm_head with the greedy choice, or sample after
it. `embed` of the next step reads the token on the device.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from npmoe.config import KVCacheConfig
from npmoe.dtypes import Array
from npmoe.errors import NumericalError
from npmoe.formats.fragments import COLUMNS, ROWS, padded
from npmoe.formats.quant_tensor import CODES_PER_BYTE, QuantTensor
from npmoe.models.attention_split import AttentionSplit, head_groups
from npmoe.models.decode_spec import check_decode_spec
from npmoe.models.grouped import GroupedExperts, activation_arguments, expert_macros
from npmoe.models.specs import AttentionSpec, ExpertSpec, ModelSpec
from npmoe.models.stream import BLOCK_BYTES, W_CODES, ExpertStream, Stream
from npmoe.ops.quantize import KVPages
from npmoe.ops.rope import rope_cos_sin, rope_frequencies
from npmoe.ops.sampler import Sampler
from npmoe.runtime import nvtx
from npmoe.runtime.device import cupy, to_host
from npmoe.runtime.launch import launch
from npmoe.runtime.nvrtc import bulk, kernel, named_codes

KV_CODES = named_codes(
    {
        name: i
        for i, name in enumerate(
            ("bf16", "fp4", "mxfp4", "nvfp4", "int4", "int4_asym", "int8", "fp8")
        )
    }
)
"""K_FORMAT and V_FORMAT of cuda_src/attention.cu."""


@dataclass(frozen=True)
class Tuning:
    """Launch shapes that change results by rounding only. splits: parts of the context that an
    attention head is spread over, rounded down to whole clusters; None fills the GPU. blocks:
    thread blocks of a weight kernel, at most one a multiprocessor, which is what None takes.
    one_kernel: a single token's experts run in one kernel where that exists. qkv_with_experts: that
    kernel runs the next layer's qkv too, where formats agree. grouped: experts of several tokens
    are read once, whoever chose them; None leaves it to their size. pairs_at_once: of the tokens
    that chose an expert, those for which it is then read once, 1 to 4."""

    splits: int | None = None
    blocks: int | None = None
    one_kernel: bool = True
    qkv_with_experts: bool = True
    grouped: bool | None = None
    pairs_at_once: int = 4


class DecodeStep:
    """Owns every buffer of the step, since a captured graph replays addresses."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: dict[str, Any],
        cache: list[tuple[KVPages, KVPages]],
        block_table: Array,
        history: int = 4096,
        tuning: Tuning | None = None,
        sampled: bool = False,
        cos_sin: Array | None = None,
    ) -> None:
        """weights: as `prepare_for_gpu` and `prepare_vector` give them. cache: KV pages per layer.
        block_table int32 `[S, max_pages]` on the device, S <= 8. sampled: `sampler` chooses, as its
        rows say, after lm_head's greedy choice. cos_sin: a `rotary_table` that several steps share.
        Raises UnsupportedModel for what has no kernel, and ValueError for more blocks than the GPU
        has multiprocessors.
        """
        self.tuning = tuning or Tuning()
        xp = cupy()
        self.spec, self.weights, self.cache, self.block_table = spec, weights, cache, block_table
        self.num_seqs = seqs = block_table.shape[0]
        check_decode_spec(spec)
        a = spec.layers[0].attention
        assert isinstance(a, AttentionSpec)
        gpu = xp.cuda.Device().attributes
        self.blocks = self.tuning.blocks or gpu["MultiProcessorCount"]
        if not 1 <= self.blocks <= gpu["MultiProcessorCount"]:  # they wait for each other
            raise ValueError(
                f"blocks = {self.blocks}: legal values are 1 to {gpu['MultiProcessorCount']}, the "
                "multiprocessors of this GPU"
            )
        self.bulk, self.shared_bytes = bulk(), gpu["MaxSharedMemoryPerBlockOptin"]
        rows = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
        mlp = spec.layers[0].mlp
        assert isinstance(mlp, ExpertSpec)
        experts, top_k = mlp.router.num_experts, mlp.router.top_k
        width = weights["layers.0.down_proj"].shape[-1]  # padded
        self.hidden_size = padded(spec.hidden_size)
        self.x = xp.zeros((seqs, self.hidden_size), xp.float32)
        self.projected = xp.zeros((seqs, rows), xp.float32)
        self.attended = xp.zeros((seqs, a.num_heads * a.head_dim), xp.float32)
        self.router_logits = xp.zeros((seqs, experts), xp.float32)
        self.grouped = None
        if seqs > 1 and self._groups(weights):
            sizes = seqs, self.hidden_size, width, mlp, self.blocks
            limits = self.bulk, self.shared_bytes, self.tuning.pairs_at_once
            self.grouped = GroupedExperts(*sizes, *limits, self._norm_size)
        pairs = 0 if self.grouped else seqs * top_k
        self.hidden = xp.zeros((pairs, width), xp.float32)
        # What blocks tell others that run already: ids, or, of one token, hidden and the residual.
        words = pairs if seqs > 1 else pairs * width + self.hidden_size
        self.handed_over = xp.zeros(words, xp.uint32)
        self.chosen_weights = xp.zeros(pairs, xp.float32)
        self.logits = xp.zeros((seqs, spec.vocab_size), xp.float32)
        self.best = xp.zeros(seqs, xp.uint64)
        self.tokens, self.steps = xp.zeros(seqs, xp.int32), xp.zeros(seqs, xp.uint32)
        self.seq_lens = xp.zeros(seqs, xp.int32)
        self.history = xp.zeros((seqs, history), xp.int32)
        self.head_groups = head_groups(a.num_heads, a.num_kv_heads)
        k, v = cache[0]
        self._split = AttentionSplit.fit(
            a.head_dim, k.token_bytes + v.token_bytes, v.num_groups, self.shared_bytes
        )
        self.fused, self.with_logits, self.checked_rows = True, True, 0
        self.cluster, self.one_cluster = CLUSTER if self.bulk else 1, False
        shares = 2 * seqs * a.num_heads * a.head_dim * MAX_CLUSTERS
        self.partial = xp.full(shares, EMPTY, xp.uint32)
        self.arrived = xp.zeros(seqs * self.head_groups * CLUSTER, xp.uint32)
        self.sampler = Sampler(seqs, spec.vocab_size) if sampled else None
        self._expert_streams = [self._expert_stream(i) for i in range(len(spec.layers))]
        if cos_sin is None:
            cos_sin = rotary_table(spec, block_table.shape[1] * cache[0][0].page_size)
        self.cos_sin = cos_sin

    @property
    def _norm_size(self) -> dict[str, int]:
        """Of the kernels with a norm: the columns that count, where not all of them do."""
        all_count = self.hidden_size == self.spec.hidden_size
        return {} if all_count else {"NORM_SIZE": self.spec.hidden_size}

    def _groups(self, weights: dict[str, Any]) -> bool:
        """Whether several tokens are grouped by expert: if so told, or by an expert's size."""
        if self.tuning.grouped is not None:
            return self.tuning.grouped
        projections = weights["layers.0.gate_up_proj"], weights["layers.0.down_proj"]
        return sum(p.codes[0].nbytes for p in projections) >= GROUPED_BYTES

    def for_prompts(self, with_logits: bool = True) -> "DecodeStep":
        """The same step on the same buffers, whose rows may be tokens of one sequence, each with
        the length that it ends: keys and values are stored before any row attends.

        with_logits: or else the step ends behind the last layer.
        """
        step = copy(self)
        step.fused, step.with_logits = False, with_logits
        return step

    def for_context(self, length: int) -> "DecodeStep":
        """The same step on the same buffers, for sequences of up to about `length` tokens: up to
        `short_context` attention begins no blocks that would find nothing to do, and from
        `long_context` on it spreads more evenly, in smaller clusters."""
        step = copy(self)
        if self.bulk:
            long = length >= self.long_context
            step.cluster = LONG_CLUSTER if long else CLUSTER
            step.one_cluster = not long and length <= self.short_context
        return step

    @property
    def short_context(self) -> int:
        """Most tokens that one cluster of attention takes, whatever it could be spread over."""
        return CLUSTER * self._split.least if self.bulk else 0

    @property
    def long_context(self) -> int:
        """Least tokens for which attention is spread in smaller clusters: any, where one of the
        larger ones for each head would be more than run at once."""
        blocks = CLUSTER * self.head_groups * self.num_seqs
        crowded = blocks > self.blocks * self._split.beside
        return 1 if crowded else max(1, LONG_CONTEXT // self.num_seqs)

    @property
    def contexts(self) -> list[int]:
        """Least lengths from which `for_context` gives another step, from 1 on."""
        changes = {self.short_context + 1, self.long_context} if self.bulk else set()
        return sorted({1, *(c for c in changes if c <= self.long_context)})

    @property
    def splits(self) -> int:
        """Parts of the context that an attention head is spread over: by the model, the GPU, and
        whether a sequence of the batch is long; results differ by rounding only. Where one cluster
        takes all of it, by the blocks of that cluster, and results do not differ. Of several
        sequences no more blocks than run at once."""
        wanted = self.blocks // self.head_groups
        if self.num_seqs > 1:
            heads = self.head_groups * self.num_seqs
            wanted = self.blocks * self._split.beside // heads
        elif self.cluster == LONG_CLUSTER:
            stream = self._expert_streams[0]
            # Behind experts_qkv, which leaves no room beside it, both blocks of a cluster may come
            # to lie on the first multiprocessor that is free; then all shall be full.
            full = stream is not None and stream.qkv is not None
            both = self._split.beside * wanted
            wanted = both if full else max(wanted, min(both, LONG_SPLITS))
        wanted = self.tuning.splits or (self.cluster if self.one_cluster else wanted)
        return self.cluster * min(max(1, wanted // self.cluster), MAX_CLUSTERS)

    def with_sampler(self, sampler: Sampler) -> "DecodeStep":
        """The same step on the same buffers, with a sampler's choice at its end."""
        step = copy(self)
        step.sampler = sampler
        return step

    def enqueue(self) -> None:
        """Puts one step of all sequences on the current stream."""
        w = self.weights
        launch(
            kernel("embed", "embed", K=self.hidden_size),
            (self.num_seqs,),
            256,
            self.x,
            self.best,
            self.tokens,
            self.history,
            self.steps,
            self.seq_lens,
            w["embed_tokens"],
            self.history.shape[1],
        )
        for i in range(len(self.spec.layers)):
            with nvtx.annotate(f"layer {i}"):
                self._layer(i)
        if self.with_logits:
            self._lm_head()
        if self.sampler is not None:
            self.sampler.enqueue(self.best, self.logits, self.seq_lens)

    def _layer(self, i: int) -> None:
        w, mlp = self._weights(i), self.spec.layers[i].mlp
        assert isinstance(mlp, ExpertSpec)
        before = self._expert_streams[i - 1] if i else None
        if before is None or before.qkv is None:
            self._qkv(w, before)
        a = self.spec.layers[i].attention
        assert isinstance(a, AttentionSpec)
        if a.qk_norm == "projection" or a.clip is not None:
            self._norm_projections(a, w)
        if self.checked_rows:
            self._check_finite(i, a)
        self._attention(i, w)
        o = w["o_proj"]
        rotated = a.head_dim if self.cache[i][0].rotated else 0
        function, threads, shared = self._gemv("output", o, rotated=rotated)
        launch(
            function,
            (self.blocks,),
            threads,
            self.x,
            self.handed_over,
            o.codes,
            w["o_bias"],
            self.attended,
            o.shape[0],
            self.handed_over.size,
            self.num_seqs,
            shared=shared,
        )
        self._route(w, mlp)
        if self.grouped is not None:
            norm = w["post_attention_layernorm"]
            weights = w["gate_up_proj"], w["gate_up_bias"], w["down_proj"], w["down_bias"]
            self.grouped.enqueue(self.x, self.router_logits, norm, self.spec.eps, *weights)
            return
        macros, together = self._expert_macros(w, mlp), self._expert_streams[i]
        if together is None:
            self._experts(w, mlp, macros)
        else:
            self._experts_in_one(i, macros, together)

    def _lm_head(self) -> None:
        head = self.weights["lm_head"]
        function, threads, shared = self._gemv("lm_head", head)
        launch(
            function,
            (self.blocks,),
            threads,
            self.logits,
            self.best,
            head.codes,
            self.x,
            self.weights["norm"],
            head.codes.shape[0] * ROWS,
            self.spec.vocab_size,
            self.num_seqs,
            self.spec.eps,
            shared=shared,
        )

    def _weights(self, i: int) -> dict[str, Any]:
        """Of layer i by name; None for what it has not."""
        return {n: self.weights.get(f"layers.{i}.{n}") for n in _LAYER_WEIGHTS}

    def _qkv(self, w: dict[str, Any], before: ExpertStream | None) -> None:
        """before: the kernel that runs before it, if that is one for the experts."""
        qkv = w["qkv_proj"]
        function, threads, shared = self._gemv("qkv", qkv, before)
        launch(
            function,
            (self.blocks,),
            threads,
            self.projected,
            qkv.codes,
            w["qkv_bias"],
            self.x,
            w["input_layernorm"],
            qkv.shape[0],
            self.num_seqs,
            self.spec.eps,
            shared=shared,
        )

    def _norm_projections(self, a: AttentionSpec, w: dict[str, Any]) -> None:
        """Norms that need all of q or of k, and bounds of q, k and v."""
        norms = (w["q_norm"], w["k_norm"]) if a.qk_norm == "projection" else (None, None)
        rows = {"Q_ROWS": a.num_heads * a.head_dim, "K_ROWS": a.num_kv_heads * a.head_dim}
        launch(
            kernel("qk_norm", "qk_norm", **rows),
            (2 if a.clip is None else 3, self.num_seqs),
            256,
            self.projected,
            *norms,
            self.spec.eps,
            np.inf if a.clip is None else float(a.clip),
        )

    def _check_finite(self, i: int, a: AttentionSpec) -> None:
        """Waits; raises NumericalError if one of layer i, of the first `checked_rows` rows, is NaN
        or infinite."""
        keys_and_values = self.projected[: self.checked_rows, a.num_heads * a.head_dim :]
        finite = cupy().isfinite(keys_and_values).all(axis=1)
        rows = np.flatnonzero(~to_host(finite))
        if len(rows):
            raise NumericalError.at(i, int(to_host(self.seq_lens)[rows[0]]) - 1)

    def _route(self, w: dict[str, Any], mlp: ExpertSpec) -> None:
        experts, warps = mlp.router.num_experts, 4 if self.hidden_size < WIDE else 8
        macros = {"K": self.hidden_size, "EXPERTS": experts, "WARPS": warps, **self._norm_size}
        launch(
            kernel("route", "route", **macros),
            (experts,),
            32 * warps,
            self.router_logits,
            w["router"],
            w["router_bias"],
            self.x,
            w["post_attention_layernorm"],
            self.num_seqs,
            self.spec.eps,
        )

    def _attention(self, i: int, w: dict[str, Any]) -> None:
        a = self.spec.layers[i].attention
        assert isinstance(a, AttentionSpec)
        k, v = self.cache[i]
        split = self._split
        macros = {
            "HEADS": a.num_heads,
            "KV_HEADS": a.num_kv_heads,
            "HEAD_DIM": a.head_dim,
            "PAGE": k.page_size,
            "CLUSTER": self.cluster,
            "K_FORMAT": KV_CODES[k.format],
            "V_FORMAT": KV_CODES[v.format],
            "KV_GROUP": _group_size(a.head_dim, k, v),
            "ROTATED": int(k.rotated),
            "WINDOWED": int(a.window is not None),
            **split.macros(),
            "FUSED": int(self.fused),
            "SCATTERED": int(self._all_at_once),
        }
        q_norm, k_norm = (w["q_norm"], w["k_norm"]) if a.qk_norm == "head" else (None, None)
        pages = k.codes, k.scales, k.zeros, v.codes, v.scales, v.zeros
        cache = *pages, self.block_table, self.seq_lens
        if not self.fused:
            launch(
                kernel("attention", "store_kv", **macros),
                (2 * a.num_kv_heads, self.num_seqs),
                a.head_dim // 2,
                *(self.projected, k_norm, self.cos_sin, *cache),
                *(self.block_table.shape[1], self.spec.eps),
            )
        launch(
            kernel("attention", "attention", **macros),
            (self.splits, self.head_groups, self.num_seqs),
            32 * split.warps,
            *(self.attended, self.projected, q_norm, k_norm, self.cos_sin, *cache, w["sinks"]),
            *(self.partial, self.arrived, self.block_table.shape[1], a.window or 0),
            *(self.spec.eps, a.scale),
            shared=split.shared,
        )

    @property
    def _all_at_once(self) -> bool:
        """Whether all blocks of attention are sure to run at the same time; two neighbouring
        multiprocessors hold clusters of 2, but larger ones may find no place."""
        blocks = self.splits * self.head_groups * self.num_seqs
        return self.cluster == LONG_CLUSTER and blocks <= self.blocks * self._split.beside

    def _expert_stream(self, i: int) -> ExpertStream | None:
        """How one kernel runs the experts of layer i, or None where two do: of small experts, and
        where the next layer's qkv has another format, since it would wait for that kernel, which
        leaves no room beside it, to ask for its weights."""
        w, mlp = self._weights(i), self.spec.layers[i].mlp
        assert isinstance(mlp, ExpertSpec)
        gate_up, down = w["gate_up_proj"], w["down_proj"]
        wanted = self.tuning.one_kernel and self.bulk and self.num_seqs == 1
        if not wanted or gate_up.format != down.format:
            return None
        streams = self._gate_up_stream(w, mlp), self._down_stream(w, mlp)
        if all(stream.resident for stream in streams):
            return None  # down asks for its weights beside gate_up
        sizes = self.hidden_size, down.shape[-1], mlp.router.top_k
        follows = i + 1 < len(self.spec.layers) and self.tuning.qkv_with_experts
        qkv = self.weights[f"layers.{i + follows}.qkv_proj"]
        if qkv.format != down.format and self.tuning.qkv_with_experts:
            return None
        rows = qkv.shape[0] if follows else 0
        limits = self.blocks, self.shared_bytes
        found = ExpertStream.fit(gate_up.format, *sizes, *limits, rows)
        return found or ExpertStream.fit(gate_up.format, *sizes, *limits)

    def _gate_up_stream(self, w: dict[str, Any], mlp: ExpertSpec) -> Stream:
        form, top_k = w["gate_up_proj"].format, mlp.router.top_k
        tiles = top_k * 2 * w["down_proj"].shape[-1] // ROWS
        return self._stream(form, self.hidden_size // COLUMNS, 1, 1, tiles)

    def _down_stream(self, w: dict[str, Any], mlp: ExpertSpec) -> Stream:
        down, tiles = w["down_proj"], self.hidden_size // ROWS
        return self._stream(down.format, down.shape[-1] // COLUMNS, mlp.router.top_k, 1, tiles)

    def _expert_macros(self, w: dict[str, Any], mlp: ExpertSpec) -> dict[str, int]:
        return {
            "HIDDEN": self.hidden_size,
            "WIDTH": w["down_proj"].shape[-1],
            "EXPERTS": mlp.router.num_experts,
            "TOP_K": mlp.router.top_k,
            "RENORMALIZE": int(mlp.router.renormalize),
            **expert_macros(mlp),
            **self._norm_size,
        }

    def _experts_in_one(self, i: int, macros: dict[str, int], stream: ExpertStream) -> None:
        w, mlp = self._weights(i), self.spec.layers[i].mlp
        assert isinstance(mlp, ExpertSpec)
        qkv: tuple[Any, ...] = ()
        if stream.qkv is not None:
            after = self._weights(i + 1)
            projection, bias = after["qkv_proj"], after["qkv_bias"]
            norm, rows = after["input_layernorm"], projection.shape[0]
            qkv = self.projected, projection.codes, bias, norm, rows
        gate_up, down = w["gate_up_proj"], w["down_proj"]
        macros = macros | stream.macros() | {"W_FORMAT": W_CODES[down.format]}
        launch(
            kernel("experts", "experts_qkv" if qkv else "experts", **macros),
            (self.blocks,),
            stream.threads,
            self.x,
            self.handed_over,
            gate_up.codes,
            w["gate_up_bias"],
            down.codes,
            w["down_bias"],
            self.router_logits,
            w["post_attention_layernorm"],
            self.spec.eps,
            *activation_arguments(mlp.activation),
            *qkv,
            shared=stream.shared,
        )

    def _experts(self, w: dict[str, Any], mlp: ExpertSpec, macros: dict[str, int]) -> None:
        gate_up, down = w["gate_up_proj"], w["down_proj"]
        stream = self._gate_up_stream(w, mlp)
        form = {"W_FORMAT": W_CODES[gate_up.format]}
        launch(
            kernel("experts", "gate_up", **macros, **form, **stream.macros()),
            (self.blocks, self.num_seqs),
            stream.threads,
            self.hidden,
            self.handed_over,
            self.chosen_weights,
            gate_up.codes,
            w["gate_up_bias"],
            self.router_logits,
            self.x,
            w["post_attention_layernorm"],
            self.spec.eps,
            *activation_arguments(mlp.activation),
            shared=stream.shared,
        )
        stream = self._down_stream(w, mlp)
        form = {"W_FORMAT": W_CODES[down.format]}
        launch(
            kernel("experts", "down", **macros, **form, **stream.macros()),
            (self.blocks, self.num_seqs),
            stream.threads,
            self.x,
            down.codes,
            w["down_bias"],
            self.handed_over,
            self.chosen_weights,
            self.hidden,
            shared=stream.shared,
        )

    def _gemv(
        self, stem: str, w: QuantTensor, before: ExpertStream | None = None, rotated: int = 0
    ) -> tuple[Any, int, int]:
        """The kernel for a dense weight, its threads a block and its dynamic shared memory.

        before: a kernel beside which it shall fit on a multiprocessor; with 4-bit codes there are
        no registers for both. rotated: elements of the heads that it reads and rotates, or 0.
        """
        beside = 0 if before is None or w.format in CODES_PER_BYTE else before.shared
        work = w.format, w.shape[1] // COLUMNS, 1, self.num_seqs, w.codes.shape[0]
        stream = self._stream(*work, beside=beside)
        macros = {"K": w.shape[1], "TOKENS": self.num_seqs, "W_FORMAT": W_CODES[w.format]}
        if rotated:
            macros["ROTATED"] = rotated
        if stem != "output":
            macros |= self._norm_size
        shared = stream.shared
        if stem == "output":  # attention leaves multiprocessors unevenly: one block on each
            shared = max(shared, self.shared_bytes // 2)
        return kernel(stem, stem, **macros, **stream.macros()), stream.threads, shared

    def _stream(
        self, form: str, slices: int, stacked: int, tokens: int, tiles: int, beside: int = 0
    ) -> Stream:
        room = self.shared_bytes - (beside + 2 * BLOCK_BYTES if beside else 0)
        work = form, slices, stacked, tokens, tiles, self.blocks, self.bulk
        return Stream.fit(*work, room)


CLUSTER, LONG_CLUSTER, MAX_CLUSTERS, LONG_CONTEXT = 8, 2, 64, 8192
LONG_SPLITS, WIDE, GROUPED_BYTES = 32, 4096, 4 << 20
"""Blocks of an attention cluster, the same in long contexts, most clusters a head, tokens of all
sequences together from which a context is long; parts of such a context where two blocks a
multiprocessor would make more; hidden size from which the router takes more warps; bytes of an
expert from which reading it once is worth the grouping."""
EMPTY = 0xFFFFFFFF
"""A word that a block waits for, as cuda_src/ptx.cuh has it, until another has written it."""
_LAYER_WEIGHTS = (
    *("input_layernorm", "qkv_proj", "qkv_bias", "q_norm", "k_norm", "sinks", "o_proj", "o_bias"),
    *("post_attention_layernorm", "router", "router_bias"),
    *("gate_up_proj", "gate_up_bias", "down_proj", "down_bias"),
)


def _group_size(head_dim: int, *pages: KVPages) -> int:
    """Elements that share a scale; where there are none, any that attention takes."""
    sizes = (head_dim // p.num_groups for p in pages if p.num_groups)
    return next(sizes, KVCacheConfig.group_size)


def rotary_table(spec: ModelSpec, num_positions: int) -> Array:
    """Cosine and sine of positions from 0 on the device, float32 `[positions, head_dim / 2, 2]`."""
    frequencies, factor = rope_frequencies(spec.rope, spec.rope_dim, spec.max_positions)
    cos, sin = rope_cos_sin(np.arange(num_positions, dtype=np.int32), frequencies, factor)
    return cupy().asarray(np.stack([cos, sin], axis=-1))
