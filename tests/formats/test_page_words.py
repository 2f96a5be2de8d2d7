"""Codes of 4 bits where the GPU's pages have them."""

import numpy as np
import pytest

from npmoe.formats.groups import pack_nibbles
from npmoe.formats.page_words import from_page_words, to_page_words


@pytest.mark.parametrize("name", ["fp4", "mxfp4", "nvfp4"])
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
def test_places_of_e2m1(name: str, codes: tuple[int, ...], word: int) -> None:
    words = to_page_words(pack_nibbles(np.array(codes, np.uint8)), name)
    assert words.view(np.uint16).tolist() == [word]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ((0, 0, 0, 0), 0),
        ((7, 0, 0, 0), 0b111 << 4),
        ((-1, 0, 0, 0), 1 << 15 | 1 << 4),
        ((0, -6, 0, 0), 1 << 11 | 0b110),
        ((0, 0, -5, 0), 1 << 3 | 0b101 << 8),
        ((0, 0, 0, -3), 1 << 7 | 0b011 << 12),
        ((-7, -7, -7, -7), 0xFFFF),
    ],
)
def test_places_of_int4(values: tuple[int, ...], word: int) -> None:
    """Signs and magnitudes; a code is 8 more than its value."""
    words = to_page_words(pack_nibbles(np.array(values, np.int8).view(np.uint8) + 8), "int4")
    assert words.view(np.uint16).tolist() == [word]


@pytest.mark.parametrize("name", ["fp4", "int4"])
def test_there_and_back(name: str) -> None:
    codes = np.random.default_rng(0).integers(1, 16, (3, 5, 128)).astype(np.uint8)
    packed = pack_nibbles(codes)
    words = to_page_words(packed, name)
    assert words.shape == packed.shape
    assert (words != packed).mean() > 0.9
    assert (from_page_words(words, name) == packed).all()


@pytest.mark.parametrize("name", ["int4_asym", "int8", "fp8", "bf16"])
def test_other_codes_stay(name: str) -> None:
    codes = np.arange(16, dtype=np.uint8)
    assert to_page_words(codes, name) is codes
    assert from_page_words(codes, name) is codes
