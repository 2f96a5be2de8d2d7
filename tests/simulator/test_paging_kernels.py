"""Page commands, slots and page copies by the Numba kernels, against their definitions."""

import numpy as np
import pytest

from npmoe.ops.paging import (
    CLEAR,
    END,
    SHARE,
    WRITE,
    _as_words,
    _copy_pages_cuda,
    _map_slots_cuda,
    _page_commands_kernel,
    apply_page_commands_ref,
    copy_pages_ref,
    map_slots_ref,
)
from tests.cases import KV_FORMATS
from tests.helpers import make_pages


@pytest.mark.parametrize("threads", [1, 8])
def test_commands_take_effect_as_defined(threads: int) -> None:
    commands = np.array(
        [
            (WRITE, 0, 0, 20, 1),
            (SHARE, 3, 0, 17, 0),
            (CLEAR, 0, 5, 0, 0),
            (WRITE, 0, 5, 2, 30),
            (SHARE, 1, 0, 7, 0),  # reads what the commands before it wrote
            (CLEAR, 2, 0, 0, 0),
            (END, 0, 0, 0, 0),
            (CLEAR, 3, 0, 0, 0),
        ],
        np.int32,
    )
    page_ids = np.arange(100, 140, dtype=np.int32)
    found = np.arange(4 * 24, dtype=np.int32).reshape(4, 24)
    expected = found.copy()
    apply_page_commands_ref(expected, commands, page_ids, 7)
    _page_commands_kernel.launch(1, threads, found, commands, page_ids, np.int32(7))
    np.testing.assert_array_equal(found, expected)
    assert found[1, :8].tolist() == [101, 102, 103, 104, 105, 130, 131, 31]
    assert found[3, 16:18].tolist() == [117, 89]


@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_slots_are_as_defined(num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    block_table = rng.integers(-1, 30, (5, 4)).astype(np.int32)
    cu_seqlens_q = np.array([0, 1, 1, 9, 30, 34], np.int32)  # an empty sequence; tokens of none
    positions = rng.integers(-2, 4 * 8 + 3, num_tokens).astype(np.int32)
    found = np.full(num_tokens, -7, np.int32)
    _map_slots_cuda(found, block_table, positions, cu_seqlens_q, 8)
    expected = map_slots_ref(block_table, positions, cu_seqlens_q, 8)
    np.testing.assert_array_equal(found, expected)
    assert (expected[34:] == -1).all()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_pages_of_every_format_are_copied(kv_format: str) -> None:
    rng = np.random.default_rng(0)
    copies = np.array([[0, 3], [-1, 4], [2, 1]], np.int32)
    for like in make_pages(kv_format, num_pages=5, heads=1, head_dim=32, page_size=2).arrays():
        found = rng.integers(0, 256, (2, 5, like[0].nbytes)).astype(np.uint8).view(like.dtype)
        expected = found.copy()
        copy_pages_ref(_as_words(expected), copies)
        _copy_pages_cuda(_as_words(found), copies)
        assert found.tobytes() == expected.tobytes()
        assert found[:, 3].tobytes() == found[:, 0].tobytes() != found[:, 4].tobytes()


def test_arrays_that_do_not_fit_are_named() -> None:
    table, edges = np.zeros((2, 4), np.int32), np.zeros(3, np.int32)
    with pytest.raises(ValueError, match=r"cu_seqlens_q: expected int32 \[3\]"):
        _map_slots_cuda(np.zeros(1, np.int32), table, np.zeros(1, np.int32), edges[:2], 4)
    with pytest.raises(ValueError, match=r"copies: expected int32 \[any, 2\]"):
        _copy_pages_cuda(np.zeros((1, 2, 4), np.uint8), np.zeros((1, 3), np.int32))
