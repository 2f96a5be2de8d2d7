"""Cutting uploads into reads of one buffer."""

import numpy as np
import pytest

from npmoe.runtime import transfer
from npmoe.runtime.transfer import ALIGNMENT, array_piece, chunks


@pytest.mark.parametrize("size", [256, 300, 1 << 20])
@pytest.mark.parametrize("read_bytes", [7, 1 << 20])
def test_every_byte_is_read_to_its_place(
    monkeypatch: pytest.MonkeyPatch, size: int, read_bytes: int
) -> None:
    monkeypatch.setattr(transfer, "READ_BYTES", read_bytes)
    rng = np.random.default_rng(0)
    lengths = [[[1000, 1, 24], [300]], [[5]], [[255, 1], [2], [ALIGNMENT]]]
    jobs = [
        (key, [[rng.integers(0, 256, n, np.uint8) for n in pieces] for pieces in arrays])
        for key, arrays in enumerate(lengths)
    ]
    given = [(key, [[array_piece(a) for a in pieces] for pieces in arrays]) for key, arrays in jobs]
    device, found = np.full(4096, 0xA5, np.uint8), {}
    for reads, ends in chunks(given, size):
        first = reads[0].at
        assert reads[-1].at + reads[-1].size <= (first // size + 1) * size, "one buffer"
        for r in reads:
            assert r.size <= read_bytes
            r.piece.read(device[r.at : r.at + r.size], r.start)
        if ends is not None:
            key, places = ends
            assert all(start % ALIGNMENT == 0 for start, _ in places)
            found[key] = [device[a:b].copy() for a, b in places]
    assert list(found) == [0, 1, 2]
    for key, arrays in jobs:
        for a, pieces in zip(found[key], arrays, strict=True):
            assert (a == np.concatenate(pieces)).all()


def test_an_array_of_any_layout_is_a_piece() -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4).T
    piece = array_piece(a)
    target = np.zeros(8, np.uint8)
    piece.read(target, 4)
    assert (target.view(np.float32) == a.ravel()[1:3]).all()
    assert piece.nbytes == 48
