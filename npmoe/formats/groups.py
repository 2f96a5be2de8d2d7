"""What the group-scaled formats share: groups along the last axis, nibbles, finite input.

A group is `group_size` consecutive elements of the last axis; they share one scale.
"""

from typing import NamedTuple

from npmoe.dtypes import Array, array_namespace

FP16_MAX = 65504.0


class Encoded(NamedTuple):
    """An array in a group-scaled format.

    codes: one byte per element, or two elements a byte (low nibble first), last axis packed.
    scales: one entry per group. zeros: zero point per group (uint8), asymmetric formats only.
    """

    codes: Array
    scales: Array
    zeros: Array | None = None


def split(x: Array, group_size: int) -> Array:
    """`[..., K]` of any float dtype as float32 `[..., K / group_size, group_size]`.

    Raises ValueError when K is not a multiple of group_size or an element is NaN or infinite.
    """
    xp = array_namespace(x)
    if group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(
            f"the last axis has {x.shape[-1]} elements, not a multiple of group_size = {group_size}"
        )
    x = x.astype(xp.float32)
    check_finite(x)
    return x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)


def check_finite(x: Array) -> None:
    """Raises ValueError if any element is NaN or infinite: neither has a code."""
    xp = array_namespace(x)
    if not bool(xp.isfinite(x).all()):
        bad = int((~xp.isfinite(x)).sum())
        raise ValueError(f"{bad} of {x.size} values are NaN or infinite and cannot be quantised")


def fp16_scale(scale: Array) -> Array:
    """A float32 scale rounded to float16; ValueError where float16 cannot hold it."""
    xp = array_namespace(scale)
    if scale.size and float(scale.max()) > FP16_MAX:
        raise ValueError(
            f"a group needs the scale {float(scale.max()):.3g}, float16 ends at {FP16_MAX:.0f}"
        )
    return scale.astype(xp.float16)


def divide(x: Array, scale: Array) -> Array:
    """`x / scale` with zero where the scale is zero; `scale` broadcasts over the last axis."""
    xp = array_namespace(x)
    scale = scale.astype(xp.float32)[..., None]
    return xp.where(scale > 0, x / xp.where(scale > 0, scale, 1), xp.float32(0))


def pack_nibbles(codes: Array) -> Array:
    """Codes 0..15, uint8 `[..., K]` -> bytes `[..., K / 2]`; element 2i sits in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"cannot pack {codes.shape[-1]} codes of 4 bits into whole bytes")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Array) -> Array:
    """Bytes uint8 `[..., K / 2]` -> codes 0..15, uint8 `[..., K]`."""
    xp = array_namespace(packed)
    pairs = xp.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def join(values: Array, scales: Array, zeros: Array | None = None) -> Array:
    """Code values `[..., K]` times their group's scale, float32: `(value - zero) * scale`."""
    xp = array_namespace(values)
    groups = scales.shape[-1]
    v = values.astype(xp.float32).reshape(*values.shape[:-1], groups, values.shape[-1] // groups)
    if zeros is not None:
        v = v - zeros.astype(xp.float32)[..., None]
    return (v * scales.astype(xp.float32)[..., None]).reshape(values.shape)
