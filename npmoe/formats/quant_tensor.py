"""QuantTensor: a weight matrix, or a stack of them, in any format.

Every checkpoint format is brought into it without loss, and ops take it, so that the number of
formats and the number of ops do not multiply.
"""

from dataclasses import dataclass, replace
from typing import Any

from npmoe.dtypes import Array, array_namespace
from npmoe.formats import floats, fp4, fp8, int4, int8
from npmoe.formats.groups import Encoded

DEFAULT_GROUP_SIZE: dict[str, int] = {
    "int8": 32,
    "int4": 32,
    "int4_asym": 32,
    "fp4": 32,
    "mxfp4": 32,
    "nvfp4": 16,
}
"""Elements per scale where the caller does not say; fp8 takes one scale per output row."""

CODES_PER_BYTE: dict[str, int] = {"int4": 2, "int4_asym": 2, "fp4": 2, "mxfp4": 2, "nvfp4": 2}


@dataclass(frozen=True)
class QuantTensor:
    """A weight `[..., N, K]` (out x in).

    format: fp32, bf16, fp16, fp8, int8, int4, int4_asym, fp4, mxfp4 or nvfp4.
    shape: the logical shape.
    codes: float32 (fp32), uint16 (bf16, fp16) or uint8 `[..., N, K]`, `[..., N, K / 2]` (4 bits).
    scales: `[..., N / block[0], K / block[1]]`, rounded up; fp16, float32 (fp8, and where fp16
    cannot hold what a checkpoint has), uint8 (E8M0, E4M3), or None.
    zeros: uint8, shaped as scales (int4_asym). global_scale (nvfp4): float32 `[...]`, or `[..., N]`
    where rows come from matrices with a global scale each.
    block: rows and columns that share one scale; (1, 1) where there are none.
    layout: "rows" as above, or the name that an op gave to its own arrangement of the same codes.
    """

    format: str
    shape: tuple[int, ...]
    codes: Array
    scales: Array = None
    zeros: Array = None
    global_scale: Array = None
    block: tuple[int, int] = (1, 1)
    layout: str = "rows"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays().values())

    @property
    def has_row_globals(self) -> bool:
        """Whether there is a global scale for each row."""
        return self.global_scale is not None and self.global_scale.ndim == len(self.shape) - 1

    def arrays(self) -> dict[str, Array]:
        """The arrays that are present, by field name."""
        names = ("codes", "scales", "zeros", "global_scale")
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}

    def map_arrays(self, function: Any) -> "QuantTensor":
        """The same tensor with `function` applied to every array."""
        return replace(self, **{name: function(a) for name, a in self.arrays().items()})

    def __getitem__(self, index: Any) -> "QuantTensor":
        """Part of a stack: indexes the leading axes of every array, `w[e]` or `w[2:5]`."""
        part = self.map_arrays(lambda a: a[index])
        extra = len(part.codes.shape) - len(self.codes.shape)
        lead = part.codes.shape[: len(self.shape) - 2 + extra]
        return replace(part, shape=(*lead, *self.shape[-2:]))

    def select_rows(self, rows: Array) -> "QuantTensor":
        """Rows of a matrix `[N, K]` by index `[R]`, as `[R, K]`."""
        if self.layout != "rows" or self.block[0] > 1 or len(self.shape) != 2:
            raise ValueError("only a matrix in 'rows' layout with scales per row gives out rows")
        names = [n for n in self.arrays() if n != "global_scale" or self.has_row_globals]
        picked = {n: getattr(self, n)[rows] for n in names}
        return replace(self, shape=(len(rows), self.shape[1]), **picked)

    def dequantize(self) -> Array:
        """float32 `[..., N, K]`, the definition of what the codes mean."""
        if self.layout != "rows":
            raise ValueError(f"a tensor in layout {self.layout!r} cannot be decoded")
        if self.format in ("fp32", "bf16", "fp16"):
            return _FLOATS[self.format][1](self.codes)
        xp = array_namespace(self.codes)
        rows, columns = self.shape[-2:]
        if self.format == "fp8" and (self.block[0] > 1 or columns % self.block[1]):
            scales = xp.repeat(self.scales, self.block[0], axis=-2)[..., :rows, :]
            scales = xp.repeat(scales, self.block[1], axis=-1)[..., :columns]
            return fp8.decode_table(self.codes, fp8.E4M3_VALUES) * scales
        encoded = Encoded(self.codes, self.scales, self.zeros)
        if self.format == "nvfp4":
            global_scale = self.global_scale
            return fp4.decode_nvfp4(
                encoded, global_scale if self.has_row_globals else global_scale[..., None]
            )
        return _GROUPED[self.format][1](encoded)


_FLOATS: dict[str, tuple] = {
    "fp32": (lambda x: x.astype("float32"), lambda codes: codes),
    "bf16": (floats.encode_bf16, floats.decode_bf16),
    "fp16": (floats.encode_fp16, floats.decode_fp16),
}
_GROUPED: dict[str, tuple] = {
    "fp8": (fp8.encode_fp8, fp8.decode_fp8),
    "int8": (int8.encode_int8, int8.decode_int8),
    "int4": (int4.encode_int4, int4.decode_int4),
    "int4_asym": (int4.encode_int4_asym, int4.decode_int4_asym),
    "fp4": (fp4.encode_fp4, fp4.decode_fp4),
    "mxfp4": (fp4.encode_mxfp4, fp4.decode_mxfp4),
}
WEIGHT_FORMATS = (*_FLOATS, *_GROUPED, "nvfp4")


def quantize(x: Array, format: str, group_size: int | None = None) -> QuantTensor:
    """Encodes a float array `[..., N, K]`; see QuantTensor for what comes out.

    Raises ValueError for an unknown format, for K not a multiple of the group size, and for NaN,
    infinity or values beyond the format's range.
    """
    if format in _FLOATS:
        return QuantTensor(format, tuple(x.shape), _FLOATS[format][0](x))
    if format not in WEIGHT_FORMATS:
        raise ValueError(f"format = {format!r}: legal formats are {', '.join(WEIGHT_FORMATS)}")
    group = group_size or DEFAULT_GROUP_SIZE.get(format, x.shape[-1])
    global_scale = None
    if format == "nvfp4":
        encoded, global_scale = fp4.encode_nvfp4(x, group)
    elif format == "fp8":
        encoded = fp8.encode_fp8(x, group, fp16_scales=False)
    else:
        encoded = _GROUPED[format][0](x, group)
    return QuantTensor(
        format,
        tuple(x.shape),
        encoded.codes,
        encoded.scales,
        encoded.zeros,
        global_scale,
        block=(1, group),
    )


def concatenate_rows(parts: list[QuantTensor]) -> QuantTensor:
    """Tensors of one format and K, joined along the output axis (such as q, k and v), each under
    its own scales: those of blocks of rows that do not fit together are repeated for every row."""
    if len(parts) == 1:
        return parts[0]
    blocks = {p.block for p in parts}
    height = parts[0].block[0]
    if len(blocks) > 1 or any(p.shape[-2] % height for p in parts[:-1]):
        parts = [_with_scales_by_row(p) for p in parts]
    if parts[0].global_scale is not None:
        parts = [_with_global_scales_by_row(p) for p in parts]
    return _join(parts, "concatenate", axis=-2)


def _with_scales_by_row(w: QuantTensor) -> QuantTensor:
    rows, height = w.shape[-2], w.block[0]
    if height == 1:
        return w
    xp = array_namespace(w.codes)

    def spread(a: Array) -> Array:
        return None if a is None else xp.repeat(a, height, axis=-2)[..., :rows, :]

    return replace(w, scales=spread(w.scales), zeros=spread(w.zeros), block=(1, w.block[1]))


def _with_global_scales_by_row(w: QuantTensor) -> QuantTensor:
    if w.has_row_globals:
        return w
    xp = array_namespace(w.codes)
    spread = xp.broadcast_to(xp.asarray(w.global_scale)[..., None], w.shape[:-1])
    return replace(w, global_scale=spread)


def stack(parts: list[QuantTensor]) -> QuantTensor:
    """Tensors of one format and shape as one with a new leading axis (such as experts)."""
    return _join(parts, "stack", axis=0)


def _join(parts: list[QuantTensor], how: str, axis: int) -> QuantTensor:
    first = parts[0]
    if any(
        (p.format, p.block, p.layout) != (first.format, first.block, first.layout) for p in parts
    ):
        raise ValueError("cannot join tensors of different formats")
    xp = array_namespace(first.codes)
    joined = {}
    for name in first.arrays():
        along = -1 if how == "concatenate" and name == "global_scale" else axis
        joined[name] = getattr(xp, how)([getattr(p, name) for p in parts], axis=along)
    if how == "stack":
        shape: tuple[int, ...] = (len(parts), *first.shape)
    else:
        rows = sum(p.shape[-2] for p in parts)
        shape = (*first.shape[:-2], rows, first.shape[-1])
    return replace(first, shape=shape, **joined)
