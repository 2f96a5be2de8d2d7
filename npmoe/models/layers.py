"""The forward pass on the CPU, put together from ops as the specs say."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from npmoe.batch import Batch
from npmoe.dtypes import Array
from npmoe.errors import NumericalError
from npmoe.kv.states import RecurrentState
from npmoe.models.cache import LayerCache, with_copy_slots
from npmoe.models.delta_net import add_delta_net
from npmoe.models.specs import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    RouterSpec,
)
from npmoe.ops.attention import paged_attention
from npmoe.ops.embed import embed
from npmoe.ops.experts import add_experts, add_mlp
from npmoe.ops.latent import LatentWeights, latent_attention, latent_qkv
from npmoe.ops.lm_head import lm_head
from npmoe.ops.norm import layer_norm, rms_norm
from npmoe.ops.output import add_output
from npmoe.ops.qkv import QKVWeights, gated_qkv, qkv
from npmoe.ops.quantize import KVPages, NotFinite
from npmoe.ops.rope import rope_cos_sin, rope_frequencies
from npmoe.ops.route import route, sigmoid

Route = Callable[..., tuple[Array, Array, Array]]
"""A function that takes and gives what `npmoe.ops.route.route` does."""


class DecoderLayer:
    """One layer: `forward` adds attention and MLP to the residual stream in place."""

    def __init__(
        self, spec: LayerSpec, eps: float, weights: dict[str, Any], route: Route = route
    ) -> None:
        """weights: this layer's parameters by the last part of their names. route: chooses the
        experts of each token."""
        self.spec, self.eps, self.weights, self.route = spec, eps, weights, route

    def forward(self, x: Array, batch: Batch, cos: Array, sin: Array, cache: LayerCache) -> None:
        """x float32 `[T, H]`, changed in place; writes this layer's K and V, or states."""
        attention, added = self.spec.attention, self._added(x)
        if isinstance(attention, DeltaNetSpec):
            assert isinstance(cache, RecurrentState)
            assert self.spec.norm == "before"
            add_delta_net(added, x, attention, self.eps, self.weights, batch, cache)
        else:
            assert not isinstance(cache, RecurrentState)
            self._add_attention(added, x, attention, batch, cos, sin, cache)
        self._join(x, added, "post_attention_layernorm")
        self._add_mlp(x)

    def _add_attention(
        self,
        added: Array,
        x: Array,
        attention: AttentionSpec | LatentSpec,
        batch: Batch,
        cos: Array,
        sin: Array,
        pages: tuple[KVPages, KVPages],
    ) -> None:
        if isinstance(attention, LatentSpec):
            attended = self._attend_latent(x, attention, batch, cos, sin, pages)
        else:
            attended = self._attend(x, attention, batch, cos, sin, pages)
        add_output(added, attended, self.weights["o_proj"], self.weights.get("o_bias"))

    def _add_mlp(self, x: Array) -> None:
        w, mlp, added = self.weights, self.spec.mlp, self._added(x)
        biases = w.get("gate_up_bias"), w.get("down_bias")
        if isinstance(mlp, ExpertSpec):
            normed, topk_weights, topk_ids = self._route(x, mlp.router)
            add_experts(
                added,
                normed,
                w["gate_up_proj"],
                w["down_proj"],
                topk_weights,
                topk_ids,
                *biases,
                mlp.activation,
            )
            if mlp.shared is not None:
                shared = w["shared_gate_up_proj"], w["shared_down_proj"]
                add_mlp(added, normed, *shared, gate=w.get("shared_gate"))
        else:
            name = "post_attention_layernorm"
            is_rms = self.spec.norm == "before"
            normed = rms_norm(x, w[name], self.eps) if is_rms else self._normed(x, name)
            add_mlp(added, normed, w["gate_up_proj"], w["down_proj"], *biases)
        self._join(x, added, "post_feedforward_layernorm")

    def _normed(self, x: Array, name: str) -> Array:
        """What a block reads, but for an RMS norm before it, which is part of its first op."""
        w = self.weights
        if self.spec.norm == "layer":
            return layer_norm(x, w[name], w[f"{name}_bias"], self.eps)
        return x

    def _added(self, x: Array) -> Array:
        """What a block adds its output to: the residual stream itself, or zeros."""
        is_plain = self.spec.residual_scale == 1 and self.spec.norm != "after"
        return x if is_plain else np.zeros_like(x)

    def _join(self, x: Array, added: Array, norm: str) -> None:
        """x += the normed and scaled output of a block that did not add to x itself."""
        if added is x:
            return
        if self.spec.norm == "after":
            added = rms_norm(added, self.weights[norm], self.eps)
        x += np.float32(self.spec.residual_scale) * added

    def _attend(
        self,
        x: Array,
        attention: AttentionSpec,
        batch: Batch,
        cos: Array,
        sin: Array,
        pages: tuple[KVPages, KVPages],
    ) -> Array:
        """What attention makes of x, before the output projection: `[T, heads, D]`."""
        w = self.weights
        weights = QKVWeights(
            w["input_layernorm"] if self.spec.norm == "before" else None,
            w["qkv_proj"],
            w.get("qkv_bias"),
            w.get("q_norm"),
            w.get("k_norm"),
        )
        normed, rotary = self._normed(x, "input_layernorm"), (attention.head_dim, cos, sin)
        arguments = normed, weights, self.eps, *rotary, *pages, batch.slot_mapping
        gates = None
        if attention.output_gate:
            q, gates = gated_qkv(*arguments, copy_slots=batch.copy_slots)
        else:
            norm_after_rotary = attention.qk_norm == "rotated"
            changes = attention.clip, attention.interleaved, norm_after_rotary
            q = qkv(*arguments, *changes, batch.copy_slots)
        attended = paged_attention(
            q,
            *pages,
            batch.block_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            attention.scale,
            attention.window,
            w.get("sinks"),
            batch.state_slots,
        )
        if gates is not None:
            attended *= sigmoid(gates)
        return attended

    def _attend_latent(
        self,
        x: Array,
        attention: LatentSpec,
        batch: Batch,
        cos: Array,
        sin: Array,
        pages: tuple[KVPages, KVPages],
    ) -> Array:
        """The same by multi-head latent attention: `[T, heads, V]`."""
        w = self.weights
        assert self.spec.norm == "before"
        weights = LatentWeights(
            w["input_layernorm"],
            w.get("q_a_proj"),
            w.get("q_a_bias"),
            w.get("q_a_norm"),
            w["q_proj"],
            w["kv_a_proj"],
            w.get("kv_a_bias"),
            w["kv_a_norm"],
        )
        heads, interleaved = attention.num_heads, attention.interleaved
        arguments = x, weights, self.eps, heads, interleaved, cos, sin
        q = latent_qkv(*arguments, *pages, batch.slot_mapping)
        return latent_attention(
            q,
            w["kv_b_proj"],
            attention.value_dim,
            *pages,
            batch.block_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            attention.scale,
        )

    def _route(self, x: Array, router: RouterSpec) -> tuple[Array, Array, Array]:
        """Normed x `[T, H]`, topk_weights and topk_ids `[T, K]`."""
        w, norm = self.weights, "post_attention_layernorm"
        return self.route(
            self._normed(x, norm),
            w[norm] if self.spec.norm == "before" else None,
            self.eps,
            w["router"],
            router.top_k,
            router.renormalize,
            w.get("router_bias"),
            router.rule,
            w.get("selection_bias"),
        )


class CausalLM:
    """A decoder-only language model with prepared weights."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Any], route: Route = route) -> None:
        """weights: parameter name -> float32 vector or prepared QuantTensor. route: chooses the
        experts of each token, called once a layer, in order."""
        self.spec, self.weights = spec, weights
        self.frequencies, self.rope_factor = rope_frequencies(
            spec.rope, spec.rope_dim, spec.max_positions
        )
        self.layers = []
        for i, layer in enumerate(spec.layers):
            prefix = f"layers.{i}."
            own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
            self.layers.append(DecoderLayer(layer, spec.eps, own, route))

    @property
    def nbytes(self) -> int:
        """Bytes of all prepared weights."""
        return sum(w.nbytes for w in self.weights.values())

    def forward(self, batch: Batch, cache: Sequence[LayerCache]) -> Array:
        """Logits float32 `[R, vocab]` of batch.logits_rows; writes K and V of every token, and
        brings recurrent states up to it.

        Raises NumericalError where one of them is NaN or infinite.
        """
        batch = with_copy_slots(batch, cache)
        x = embed(self.weights["embed_tokens"], batch.input_ids)
        x *= np.float32(self.spec.embedding_scale)
        cos, sin = rope_cos_sin(
            batch.positions, self.frequencies, self.rope_factor, batch.rope_variant
        )
        for i, (layer, own) in enumerate(zip(self.layers, cache, strict=True)):
            try:
                layer.forward(x, batch, cos, sin, own)
            except NotFinite as error:
                raise NumericalError.at(i, int(batch.positions[error.row])) from None
        rows = np.ascontiguousarray(x[batch.logits_rows])
        w, eps = self.weights, self.spec.eps
        norm = w["norm"]
        if self.spec.layer_norm:
            rows, norm = layer_norm(rows, norm, w["norm_bias"], eps), None
        logits = lm_head(rows, norm, eps, w["lm_head"], w.get("lm_head_bias"))
        logits *= np.float32(self.spec.logits_scale)
        return logits
