"""The last step of a forward pass: norm and vocabulary projection of the rows that need logits."""

from npmoe.dtypes import Array
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.ops.linear import linear
from npmoe.ops.norm import rms_norm


def lm_head(
    x: Array, norm: Array | None, eps: float, weight: QuantTensor, bias: Array | None = None
) -> Array:
    """x float32 `[R, H]`, norm `[H]`, weight `[vocab, H]` -> logits float32 `[R, vocab]`.

    norm is None where x comes normed. bias float32 `[vocab]`.
    """
    return linear(x if norm is None else rms_norm(x, norm, eps), weight, bias)
