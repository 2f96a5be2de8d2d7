"""Step 3 of a layer: output projection and residual add."""

from npmoe.dtypes import Array
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.ops.linear import linear


def add_output(residual: Array, attended: Array, o_proj: QuantTensor, bias: Array | None) -> None:
    """residual float32 `[T, H]` += attended `[T, heads, D]` through o_proj `[H, heads * D]`."""
    residual += linear(attended.reshape(attended.shape[0], -1), o_proj, bias)
