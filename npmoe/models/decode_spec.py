"""Which models the decode kernels run."""

from npmoe.errors import UnsupportedModel
from npmoe.formats.fragments import padded
from npmoe.models.specs import AttentionSpec, ExpertSpec, LatentSpec, ModelSpec
from npmoe.ops.route import BEST_OF_ALL

MAX_TOP_K = 32


def check_decode_spec(spec: ModelSpec) -> None:
    """Raises UnsupportedModel for a layer that the decode kernels do not run."""
    if spec.rope.rope_type == "longrope":
        raise _no_kernel("longrope")
    if spec.delta_net is not None:
        raise _no_kernel("linear attention by the gated delta rule")
    if spec.rope.partial_rotary_factor != 1:
        raise _no_kernel("rotary on a part of each head")
    if (spec.embedding_scale, spec.logits_scale) != (1, 1):
        raise _no_kernel("scaled embeddings or logits")
    if spec.layer_norm or spec.head_bias:
        raise _no_kernel("a layer norm or a bias before the logits")
    for layer in spec.layers:
        a, mlp = layer.attention, layer.mlp
        if isinstance(a, LatentSpec):
            raise _no_kernel("multi-head latent attention")
        assert isinstance(a, AttentionSpec)
        if layer.residual_scale != 1:
            raise _no_kernel("a scaled residual")
        if layer.norm != "before":
            raise _no_kernel(f"norm = {layer.norm!r}")
        if not isinstance(mlp, ExpertSpec):
            raise _no_kernel("a dense MLP")
        top_k, by_head = mlp.router.top_k, a.qk_norm == "head"
        heads = a.num_heads * a.head_dim
        for what, present in (
            (f"{top_k} experts a token", top_k > MAX_TOP_K),
            ("attention with an output gate", a.output_gate),
            ("q, k and v clipped after a norm of each head", a.clip is not None and by_head),
            ("interleaved rotary", a.interleaved),
            ("a q/k norm after rotary", a.qk_norm == "rotated"),
            (f"head_dim {a.head_dim}", a.head_dim not in (64, 128)),
            ("more than 16 query heads a KV head", a.num_heads > 16 * a.num_kv_heads),
            (f"heads of {a.num_heads} x {a.head_dim}", padded(heads) > heads),
            ("a selection bias", mlp.router.selection_bias),
            (f"experts chosen by {mlp.router.rule}", mlp.router.rule != BEST_OF_ALL),
            ("shared experts", mlp.shared is not None),
        ):
            if present:
                raise _no_kernel(what)


def _no_kernel(what: str) -> UnsupportedModel:
    return UnsupportedModel(f"no decode kernel yet for {what}; use device='cpu'")
