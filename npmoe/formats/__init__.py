"""Number formats: the NumPy definition of every bit that npmoe stores."""

from npmoe.formats.groups import Encoded, pack_nibbles, unpack_nibbles
from npmoe.formats.quant_tensor import QuantTensor, concatenate_rows, quantize, stack

__all__ = [
    "Encoded",
    "QuantTensor",
    "concatenate_rows",
    "pack_nibbles",
    "quantize",
    "stack",
    "unpack_nibbles",
]
