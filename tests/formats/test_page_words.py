"""fp4 codes where the GPU's pages have them."""

import numpy as np
import pytest

from npmoe.formats.groups import pack_nibbles
from npmoe.formats.page_words import from_page_words, to_page_words


@pytest.mark.parametrize(
    ("codes", "word"),
    [
        ((0b1000, 0, 0, 0), 1 << 15),
        ((0b0111, 0, 0, 0), 0b111 << 9),
        ((0, 0b1001, 0, 0), 1 << 12 | 1 << 6),
        ((0, 0, 0b1010, 0), 1 << 13 | 1 << 1),
        ((0, 0, 0, 0b1100), 1 << 14 | 1 << 5),
        ((15, 15, 15, 15), 0xFFFF),
    ],
)
def test_places(codes: tuple[int, ...], word: int) -> None:
    words = to_page_words(pack_nibbles(np.array(codes, np.uint8)))
    assert words.view(np.uint16).tolist() == [word]


def test_there_and_back() -> None:
    packed = np.random.default_rng(0).integers(0, 256, (3, 5, 64)).astype(np.uint8)
    words = to_page_words(packed)
    assert words.shape == packed.shape
    assert (words != packed).mean() > 0.9
    assert (from_page_words(words) == packed).all()
