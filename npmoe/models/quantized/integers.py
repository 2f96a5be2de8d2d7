"""Integer matrices as they lie in checkpoints: compressed-tensors' packed ones, AWQ and GPTQ.

All put 32 / bits codes into an int32, the first in its lowest bits. A value is
`(code - zero) * scale`.
"""

from dataclasses import dataclass

import numpy as np

from npmoe.formats.groups import pack_nibbles, unpack_nibbles
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.models.quantized.scheme import (
    FLOATS,
    Arrays,
    Expected,
    FindShape,
    Scheme,
    exact_scales,
    whole,
)

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which nibble of an int32 AWQ puts column 0, 1, ... of eight."""


@dataclass(frozen=True)
class _Integers(Scheme):
    """bits: 4 or 8. group_size: columns under one scale, None for all of a row.

    symmetric: the zero is 2^(bits - 1). reordered: columns say themselves to which group they
    belong (`g_idx`), in any order.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    reordered: bool = False

    method = ""
    index_name = "g_idx"

    @property
    def words(self) -> str:
        """For people."""
        kind = "" if self.symmetric else " with zero points"
        of = "rows" if self.group_size is None else f"groups of {self.group_size}"
        order = " in any order" if self.reordered else ""
        return f"{self.method} int{self.bits}{kind}, {of}{order}"

    @property
    def format(self) -> str:
        """fp32, which holds every value, where no format has such groups or zero points."""
        if self.reordered or (self.bits == 8 and not self.symmetric):
            return "fp32"
        return f"int{self.bits}" + ("" if self.symmetric else "_asym")

    @property
    def per_word(self) -> int:
        """Codes in an int32."""
        return 32 // self.bits

    def group(self, columns: int) -> int:
        """Columns that share a scale."""
        return self.group_size or columns

    def _groups(self, columns: int) -> int:
        return whole("columns", columns, self.group(columns))

    def _index(self, columns: int, find: FindShape) -> list[Expected]:
        """`g_idx`, where it is there or must be."""
        if not self.reordered and find(self.index_name) is None:
            return []
        return [Expected(self.index_name, (columns,), ("I32",))]

    def _tensor(
        self,
        data: np.ndarray,
        zeros: np.ndarray | None,
        scales: np.ndarray,
        index: np.ndarray | None,
    ) -> QuantTensor:
        """data: the codes as bytes `[N, K bits / 8]`, a low nibble first. zeros `[N, G]`, scales
        `[N, G]`, index (`g_idx`) `[K]`."""
        rows, columns = len(data), data.shape[1] * 8 // self.bits
        group, middle = self.group(columns), 1 << self.bits - 1
        if self.symmetric and zeros is not None:
            if (zeros != middle).any():
                raise ValueError(f"a zero point is not {middle}, the config says symmetric")
            zeros = None
        in_order = np.arange(columns) // group
        if index is not None and not self.reordered and (index != in_order).any():
            raise ValueError(f"{self.index_name} reorders the columns, the config says otherwise")
        if self.format == "fp32":
            return self._expanded(data, zeros, scales, in_order if index is None else index)
        if self.bits == 8:
            data = data ^ np.uint8(0x80)  # less 128, in two's complement
        block = (1, group)
        shape = (rows, columns)
        return QuantTensor(self.format, shape, data, exact_scales(scales), zeros, block=block)

    def _expanded(
        self, data: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray, index: np.ndarray
    ) -> QuantTensor:
        if index.min() < 0 or index.max() >= scales.shape[1]:
            raise ValueError(f"{self.index_name} names a group that is not there")
        codes = (unpack_nibbles(data) if self.bits == 4 else data).astype(np.int16)
        zero = 1 << self.bits - 1 if zeros is None else zeros.astype(np.int16)[:, index]
        values = (codes - zero).astype(np.float32)
        return QuantTensor("fp32", codes.shape, values * scales.astype(np.float32)[:, index])


@dataclass(frozen=True)
class PackedInts(_Integers):
    """compressed-tensors `pack-quantized`: rows packed along K, zero points along N."""

    method = "compressed-tensors"
    index_name = "weight_g_idx"
    markers = ("weight_packed",)

    def tensors(self, rows: int, columns: int, find: FindShape) -> list[Expected]:
        """Codes, scales, the logical shape, zero points, g_idx."""
        groups = self._groups(columns)
        words = whole("columns", columns, self.per_word)
        found = [
            Expected("weight_packed", (rows, words), ("I32",)),
            Expected("weight_scale", (rows, groups), FLOATS),
            Expected("weight_shape", (2,), ("I64", "I32")),
        ]
        if not self.symmetric:
            packed_rows = -(-rows // self.per_word)
            found.append(Expected("weight_zero_point", (packed_rows, groups), ("I32",)))
        return found + self._index(columns, find)

    def read(self, arrays: Arrays, rows: int, columns: int) -> QuantTensor:
        """The matrix."""
        said = arrays["weight_shape"].tolist()
        if said != [rows, columns]:
            raise ValueError(f"weight_shape says {said}, the config {[rows, columns]}")
        zeros = None
        if not self.symmetric:
            zeros = _unpack(arrays["weight_zero_point"].T, self.bits).T[:rows]
        data = _bytes(arrays["weight_packed"])
        return self._tensor(data, zeros, arrays["weight_scale"], arrays.get(self.index_name))


@dataclass(frozen=True)
class Awq(_Integers):
    """AWQ's `gemm` version: transposed, packed along N, eight columns in the order AWQ_PLACES."""

    method = "AWQ"
    markers = ("qweight", "qzeros", "scales")

    def tensors(self, rows: int, columns: int, find: FindShape) -> list[Expected]:
        """Codes, zero points, scales."""
        groups, words = self._groups(columns), whole("rows", rows, self.per_word)
        return [
            Expected("qweight", (columns, words), ("I32",)),
            Expected("qzeros", (groups, words), ("I32",)),
            Expected("scales", (groups, rows), FLOATS),
        ]

    def read(self, arrays: Arrays, rows: int, columns: int) -> QuantTensor:
        """The matrix."""
        codes, zeros = (
            np.ascontiguousarray(self._ordered(arrays[name]).T) for name in ("qweight", "qzeros")
        )
        return self._tensor(pack_nibbles(codes), zeros, arrays["scales"].T, None)

    def _ordered(self, packed: np.ndarray) -> np.ndarray:
        """int32 `[M, N / 8]` -> uint8 `[M, N]`."""
        nibbles = _unpack(packed, self.bits).reshape(len(packed), -1, 8)
        return nibbles[:, :, AWQ_PLACES].reshape(len(packed), -1)


@dataclass(frozen=True)
class Gptq(_Integers):
    """GPTQ: transposed, codes packed along K, zero points along N.

    zero_offset: what is added to a stored zero point: 1 in the first format, 0 in `gptq_v2`.
    """

    zero_offset: int = 1
    method = "GPTQ"
    markers = ("qweight", "qzeros", "scales")

    def tensors(self, rows: int, columns: int, find: FindShape) -> list[Expected]:
        """Codes, zero points, scales, g_idx."""
        groups = self._groups(columns)
        return [
            Expected("qweight", (whole("columns", columns, self.per_word), rows), ("I32",)),
            Expected("qzeros", (groups, whole("rows", rows, self.per_word)), ("I32",)),
            Expected("scales", (groups, rows), FLOATS),
            *self._index(columns, find),
        ]

    def read(self, arrays: Arrays, rows: int, columns: int) -> QuantTensor:
        """The matrix."""
        zeros = _unpack(arrays["qzeros"], self.bits).T.astype(np.int16) + self.zero_offset
        if self.bits == 4:
            zeros = zeros.astype(np.uint8)
        data = _bytes(arrays["qweight"].T)
        zeros = np.ascontiguousarray(zeros)
        return self._tensor(data, zeros, arrays["scales"].T, arrays.get(self.index_name))


def _bytes(packed: np.ndarray) -> np.ndarray:
    """int32 `[M, C]` -> uint8 `[M, 4 C]`: codes, the lowest bits first."""
    return np.ascontiguousarray(packed).view(np.uint8)


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """int32 `[M, C]` -> codes uint8 `[M, C * 32 / bits]`."""
    return unpack_nibbles(_bytes(packed)) if bits == 4 else _bytes(packed)
