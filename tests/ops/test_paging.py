"""Block tables by commands, slots of tokens, copies of pages: the definitions, by hand."""

import numpy as np
import pytest

from npmoe.ops.paging import (
    CLEAR,
    END,
    SHARE,
    WRITE,
    apply_page_commands,
    copy_kv_pages,
    map_slots,
)


def commands(*rows: tuple[int, int, int, int, int]) -> np.ndarray:
    return np.array(rows, np.int32).reshape(-1, 5)


def test_commands_take_effect_in_order_up_to_the_end() -> None:
    table = np.full((3, 4), -1, np.int32)
    page_ids = np.array([10, 11, 12, 13], np.int32)
    asked = commands(
        (WRITE, 0, 0, 3, 0),  # 10 11 12
        (SHARE, 2, 0, 2, 0),  # row 2: 10 11
        (CLEAR, 0, 1, 0, 0),  # row 0: 10
        (WRITE, 2, 2, 1, 3),  # row 2: 10 11 13
        (END, 0, 0, 0, 0),
        (CLEAR, 2, 0, 0, 0),
    )
    apply_page_commands(table, asked, page_ids)
    assert table.tolist() == [[10, -1, -1, -1], [-1, -1, -1, -1], [10, 11, 13, -1]]


def test_cleared_entries_hold_the_empty_page() -> None:
    table = np.arange(4, dtype=np.int32).reshape(1, 4)
    apply_page_commands(table, commands((CLEAR, 0, 1, 0, 0)), np.zeros(0, np.int32), empty=9)
    assert table.tolist() == [[0, 9, 9, 9]]


def test_slots_by_hand() -> None:
    # Three sequences: two tokens, none, three tokens; one token more than they have.
    table = np.array([[7, 2], [0, 0], [5, -1]], np.int32)
    positions = np.array([3, 4, 1, -1, 4, 0], np.int32)
    cu_seqlens_q = np.array([0, 2, 2, 5], np.int32)
    slots = map_slots(table, positions, cu_seqlens_q, 4)
    assert slots.tolist() == [31, 8, 21, -1, -1, -1]  # 7 * 4 + 3, 2 * 4 + 0, 5 * 4 + 1
    assert slots.dtype == np.int32


def test_a_position_past_the_table_has_no_slot() -> None:
    table, edges = np.zeros((1, 2), np.int32), np.array([0, 2], np.int32)
    assert map_slots(table, np.array([7, 8], np.int32), edges, 4).tolist() == [3, -1]


def test_map_slots_fills_what_it_is_given() -> None:
    out = np.full(1, 5, np.int32)
    edges = np.array([0, 1], np.int32)
    assert map_slots(np.ones((1, 1), np.int32), np.array([2], np.int32), edges, 16, out) is out
    assert out.tolist() == [18]


def test_a_page_size_below_one_is_refused() -> None:
    edges = np.array([0, 1], np.int32)
    with pytest.raises(ValueError, match="page_size = 0: legal is 1 or more"):
        map_slots(np.ones((1, 1), np.int32), np.array([2], np.int32), edges, 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
@pytest.mark.parametrize("width", [3, 8])  # bytes that eight does, and does not, divide
def test_pages_are_copied_in_every_layer_and_negative_sources_skipped(
    dtype: type, width: int
) -> None:
    slab = np.arange(2 * 4 * width).reshape(2, 4, width).astype(dtype)
    before = slab.copy()
    copy_kv_pages([slab], np.array([[0, 2], [-1, 3], [1, 3]], np.int32))
    np.testing.assert_array_equal(slab, before[:, [0, 1, 0, 1]])


def test_a_slab_that_is_a_strided_view_is_refused() -> None:
    with pytest.raises(ValueError, match="not C-contiguous"):
        copy_kv_pages([np.zeros((2, 4, 6), np.uint8)[:, :, ::2]], np.zeros((1, 2), np.int32))
