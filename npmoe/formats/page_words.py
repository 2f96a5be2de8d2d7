"""How the GPU's KV pages hold fp4 codes; cuda_src/kv_formats.cuh defines and unpacks them.

Four neighbouring elements share 16 bits, like in `pack_nibbles`, but each code's bits lie where
unpacking takes few operations.
"""

from npmoe.dtypes import Array, array_namespace

PLACES = ((15, 11, 10, 9), (12, 8, 7, 6), (13, 2, 1, 0), (14, 5, 4, 3))
"""Of elements 0 to 3: the places of a code's sign, then of its other bits from the highest down."""


def to_page_words(packed: Array) -> Array:
    """Codes uint8 `[..., K / 2]`, low nibble first -> the bytes of a page, of the same shape."""
    return _moved(packed, backwards=False)


def from_page_words(words: Array) -> Array:
    """The inverse of `to_page_words`."""
    return _moved(packed=words, backwards=True)


def _moved(packed: Array, backwards: bool) -> Array:
    xp = array_namespace(packed)
    units = xp.ascontiguousarray(packed).view(xp.uint16)
    moved = xp.zeros_like(units)
    for element, places in enumerate(PLACES):
        for i, place in enumerate(reversed(places)):
            ends = 4 * element + i, place
            start, end = reversed(ends) if backwards else ends
            moved |= (units >> start & 1) << end
    return moved.view(xp.uint8)
