"""The last step of a forward pass: norm and vocabulary projection of the rows that need logits."""

from npmoe.dtypes import Array
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.ops.linear import linear
from npmoe.ops.norm import rms_norm


def lm_head(x: Array, norm: Array, eps: float, weight: QuantTensor) -> Array:
    """x float32 `[R, H]`, norm `[H]`, weight `[vocab, H]` -> logits float32 `[R, vocab]`."""
    return linear(rms_norm(x, norm, eps), weight)
