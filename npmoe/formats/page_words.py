"""How the GPU's KV pages hold codes of 4 bits; cuda_src/kv_formats.cuh defines and unpacks them.

Four neighbouring elements share 16 bits, like in `pack_nibbles`, but bits lie where unpacking takes
few operations. Codes of int4 become a sign and a magnitude; those of int4_asym stay.
"""

from collections.abc import Callable

from npmoe.dtypes import Array, array_namespace

E2M1_PLACES = ((15, 11, 10, 9), (12, 8, 7, 6), (13, 2, 1, 0), (14, 5, 4, 3))
INT4_PLACES = ((15, 6, 5, 4), (11, 2, 1, 0), (3, 10, 9, 8), (7, 14, 13, 12))
PLACES = {**dict.fromkeys(("fp4", "mxfp4", "nvfp4"), E2M1_PLACES), "int4": INT4_PLACES}
"""Format -> of elements 0 to 3, the places of a code's sign, then of its other bits from the
highest down."""


def to_page_words(packed: Array, format_name: str) -> Array:
    """Codes uint8 `[..., K / 2]`, low nibble first -> the bytes of a page, of the same shape."""
    if format_name not in PLACES:
        return packed
    if format_name == "int4":
        packed = _each_nibble(packed, _to_sign_and_magnitude)
    return _moved(packed, PLACES[format_name], backwards=False)


def from_page_words(words: Array, format_name: str) -> Array:
    """The inverse of `to_page_words`."""
    if format_name not in PLACES:
        return words
    packed = _moved(words, PLACES[format_name], backwards=True)
    return _each_nibble(packed, _from_sign_and_magnitude) if format_name == "int4" else packed


def _to_sign_and_magnitude(code: Array) -> Array:
    """Codes 1 to 15, which stand for -7 to 7. 0 means nothing; it becomes 0."""
    xp = array_namespace(code)
    return xp.where(code < 8, (8 - code) & 7 | 8 * (code > 0), code - 8).astype(xp.uint8)


def _from_sign_and_magnitude(code: Array) -> Array:
    xp = array_namespace(code)
    return xp.where(code >= 8, 16 - code, code + 8).astype(xp.uint8)


def _each_nibble(packed: Array, change: Callable[[Array], Array]) -> Array:
    return change(packed & 15) | change(packed >> 4) << 4


def _moved(packed: Array, all_places: tuple[tuple[int, ...], ...], backwards: bool) -> Array:
    xp = array_namespace(packed)
    units = xp.ascontiguousarray(packed).view(xp.uint16)
    moved = xp.zeros_like(units)
    for element, places in enumerate(all_places):
        for i, place in enumerate(reversed(places)):
            ends = 4 * element + i, place
            start, end = reversed(ends) if backwards else ends
            moved |= (units >> start & 1) << end
    return moved.view(xp.uint8)
