"""Token embedding: rows of a table, decoded as they are read."""

from npmoe.dtypes import Array
from npmoe.formats.quant_tensor import QuantTensor


def embed(table: QuantTensor, input_ids: Array) -> Array:
    """table `[vocab, H]` in "rows" layout, input_ids int32 `[T]` -> float32 `[T, H]`."""
    return table.select_rows(input_ids).dequantize()
