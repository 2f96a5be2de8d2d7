"""What a decoder layer is made of, as frozen data; families fill these in, layers.py and
decode.py obey or refuse."""

import math
from dataclasses import dataclass, replace
from typing import Any

from npmoe.config import HeadDims, RopeConfig
from npmoe.ops.experts import PLAIN, SwiGLU
from npmoe.ops.route import BEST_OF_ALL, TopKRule


@dataclass(frozen=True)
class AttentionSpec:
    """qk_norm: "none", "head" (one norm per head), "rotated" (the same, after rotary) or
    "projection" (one over all heads).

    window: keys a query sees, itself included; None = all. clip bounds q, k and v.
    scale multiplies q . k. qkv_bias: of q, k and v; output_bias: of the output projection.
    sinks: one more score a query head in the softmax. interleaved: rotary turns pairs of
    neighbours, not of halves. output_gate: what a head attends to is multiplied by the sigmoid of
    as many gates, which follow each head of q in the projection.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qk_norm: str = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    window: int | None = None
    clip: float | None = None
    sinks: bool = False
    interleaved: bool = False
    output_gate: bool = False


@dataclass(frozen=True)
class DeltaNetSpec:
    """Linear attention by the gated delta rule, after a causal convolution over q, k and v."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int

    @property
    def key_width(self) -> int:
        """All key heads together, which is also the width of q."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """All value heads together."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """q, k and v together."""
        return 2 * self.key_width + self.value_width

    @property
    def conv_state_shape(self) -> tuple[int, int]:
        """Of one sequence: inputs kept, channels."""
        return self.conv_width - 1, self.conv_channels

    @property
    def memory_shape(self) -> tuple[int, int, int]:
        """Of one sequence: value heads, key and value head size."""
        return self.num_value_heads, self.key_head_dim, self.value_head_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state in one layer, float32."""
        return 4 * (math.prod(self.conv_state_shape) + math.prod(self.memory_shape))


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention, as `npmoe.ops.latent` defines it.

    A head's query and key have nope_dim elements that do not turn, then rope_dim that do; its value
    has value_dim. kv_rank: elements of the latent. q_rank: of the compressed query; None where
    queries are made of the hidden state. scale multiplies the scores, yarn's factor included.
    interleaved: neighbours form the pairs that turn, else halves. bias: of the projections to
    compressed query, latent and rope key, and of the output projection.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    kv_rank: int
    q_rank: int | None
    scale: float
    interleaved: bool
    bias: bool = False

    @property
    def num_kv_heads(self) -> int:
        """Heads of the cache."""
        return 1

    @property
    def head_dim(self) -> tuple[int, int]:
        """Elements of a token in the cache: of its rope key (K) and its latent (V)."""
        return self.rope_dim, self.kv_rank


@dataclass(frozen=True)
class MLPSpec:
    """A dense gated MLP (SwiGLU)."""

    intermediate_size: int
    bias: bool = False


@dataclass(frozen=True)
class RouterSpec:
    """Scores as `rule` says, then the top k; `renormalize` makes the k weights sum to 1.

    With softmax and `renormalize` this is also the top k first and softmax over their logits.
    bias: of the logits. selection_bias: of the scores, for the choice alone; it never weighs.
    """

    num_experts: int
    top_k: int
    renormalize: bool
    bias: bool = False
    rule: TopKRule = BEST_OF_ALL
    selection_bias: bool = False


@dataclass(frozen=True)
class SharedSpec:
    """A gated MLP that every token takes beside its routed experts: several shared experts are one
    of their summed width. gated: its output is multiplied by the sigmoid of a projection to 1."""

    intermediate_size: int
    gated: bool = False


@dataclass(frozen=True)
class ExpertSpec:
    """Routed gated MLPs, all of one width. bias: of both matrices of each expert.

    shared: what is added to the routed experts' sum.
    """

    router: RouterSpec
    intermediate_size: int
    bias: bool = False
    activation: SwiGLU = PLAIN
    shared: SharedSpec | None = None


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: attention of some kind, then a dense MLP or routed experts, each added
    to the residual stream times residual_scale.

    norm: an RMS norm "before" each of the two or "after" it, or a "layer" norm, with bias, before.
    """

    attention: AttentionSpec | DeltaNetSpec | LatentSpec
    mlp: MLPSpec | ExpertSpec
    residual_scale: float = 1.0
    norm: str = "before"

    def with_attention(self, **changes: Any) -> "LayerSpec":
        """The layer with fields of its AttentionSpec changed."""
        assert isinstance(self.attention, AttentionSpec)
        return replace(self, attention=replace(self.attention, **changes))


@dataclass(frozen=True)
class ModelSpec:
    """A whole decoder-only model with attention in one layer at least.

    embedding_scale and logits_scale multiply its two ends. layer_norm: the last norm is one, with
    bias. head_bias: of the logits. left_out: beginnings of the names of checkpoint tensors that are
    no part of it, such as a vision tower.
    """

    hidden_size: int
    vocab_size: int
    eps: float
    rope: RopeConfig
    max_positions: int
    layers: tuple[LayerSpec, ...]
    tied: bool
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    layer_norm: bool = False
    head_bias: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def _attention(self) -> list[AttentionSpec | LatentSpec]:
        found = (layer.attention for layer in self.layers)
        return [attention for attention in found if not isinstance(attention, DeltaNetSpec)]

    @property
    def num_kv_layers(self) -> int:
        """Layers that have pages in the cache."""
        return len(self._attention)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the cache, the same in every layer that has pages."""
        return self._attention[0].num_kv_heads

    @property
    def head_dim(self) -> HeadDims:
        """Head size of the cache, the same in every layer that has pages."""
        return self._attention[0].head_dim

    @property
    def delta_net(self) -> DeltaNetSpec | None:
        """The linear attention layers, which are all alike; None where there are none."""
        found = (layer.attention for layer in self.layers)
        return next((a for a in found if isinstance(a, DeltaNetSpec)), None)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states in all layers; 0 where there are none."""
        delta = self.delta_net
        count = len(self.layers) - self.num_kv_layers
        return 0 if delta is None else count * delta.state_bytes

    @property
    def rope_dim(self) -> int:
        """Elements of a head to which the rotary embedding applies, or a part of them."""
        attention = self._attention[0]
        return attention.rope_dim if isinstance(attention, LatentSpec) else attention.head_dim

    @property
    def longrope_switch(self) -> int | None:
        """Sequences longer than this take longrope's long factors; None for other types."""
        if self.rope.rope_type != "longrope":
            return None
        return self.rope.original_max_position_embeddings or self.max_positions
