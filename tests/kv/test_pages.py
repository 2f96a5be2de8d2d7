"""PageAllocator against a model of what each page holds."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from npmoe.kv.pages import PageAllocator, prefix_key

NUM_PAGES = 6
KEYS = [bytes([i]) for i in range(4)]


class Allocation(RuleBasedStateMachine):
    """Holders are lists of pages; `contents` says which key each page was sealed with, if any."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(NUM_PAGES, 16)
        self.holders: list[list[int]] = []
        self.contents: dict[int, bytes] = {}

    def held(self) -> set[int]:
        return {page for pages in self.holders for page in pages}

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def allocate(self, count: int) -> None:
        free = NUM_PAGES - len(self.held())
        got = self.pages.allocate(count)
        if count > free:
            assert got is None
            return
        assert got is not None
        assert len(set(got)) == count
        assert not self.held() & set(got)
        for page in got:
            self.contents.pop(page, None)
        self.holders.append(got)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.holders))
        for page in pages:
            self.pages.retain(page)
        self.holders.append(list(pages))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pages.release(self.holders.pop(index))

    @precondition(lambda self: self.held())
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def seal(self, data: st.DataObject, key: bytes) -> None:
        page = data.draw(st.sampled_from(sorted(self.held())))
        self.pages.seal(page, key)
        if key not in self.contents.values():  # the first page with these contents stays the one
            self.contents.setdefault(page, key)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def match(self, keys: list[bytes]) -> None:
        page_of = {key: page for page, key in self.contents.items()}
        expected = []
        for key in keys:
            if key not in page_of:
                break
            expected.append(page_of[key])
        got = self.pages.match(keys)
        assert got == expected
        self.holders.append(got)

    @invariant()
    def counts_agree(self) -> None:
        self.pages.check_integrity(self.holders)
        assert self.pages.num_free == NUM_PAGES - len(self.held())


TestAllocation = Allocation.TestCase
TestAllocation.settings = settings(max_examples=60, stateful_step_count=30)


def test_too_few_pages_change_nothing() -> None:
    pages = PageAllocator(3, 16)
    assert pages.allocate(2) == [0, 1]
    assert pages.allocate(2) is None
    assert pages.num_free == 1
    assert pages.allocate(1) == [2]


def test_contents_that_can_be_found_again_are_overwritten_last() -> None:
    pages = PageAllocator(4, 16)
    first = pages.allocate(3)
    assert first == [0, 1, 2]
    pages.seal(0, b"a")
    pages.seal(1, b"b")
    pages.release(first)
    # 2 holds nothing of use; 3 was never used; then the end of the prefix goes before its start.
    assert [pages.allocate(1) for _ in range(4)] == [[2], [3], [1], [0]]


def test_a_page_given_to_someone_else_is_no_longer_found() -> None:
    pages = PageAllocator(1, 16)
    pages.allocate(1)
    pages.seal(0, b"a")
    pages.release([0])
    assert pages.match([b"a"]) == [0]
    pages.release([0])
    assert pages.allocate(1) == [0]
    assert pages.match([b"a"]) == []


def test_a_shared_page_is_free_after_the_last_release() -> None:
    pages = PageAllocator(1, 16)
    pages.allocate(1)
    pages.retain(0)
    pages.release([0])
    assert pages.num_free == 0
    pages.release([0])
    assert pages.num_free == 1


def test_releasing_a_free_page_is_caught() -> None:
    with pytest.raises(AssertionError, match="page 1 is free already"):
        PageAllocator(2, 16).release([1])


def test_check_integrity_notices_a_lost_reference() -> None:
    pages = PageAllocator(2, 16)
    pages.allocate(1)
    with pytest.raises(AssertionError, match="holders disagree"):
        pages.check_integrity([])


def test_prefix_keys_depend_on_the_tokens_their_order_and_what_came_before() -> None:
    key = prefix_key(b"", [1, 2])
    assert key == prefix_key(b"", (1, 2))
    others = [prefix_key(b"", [2, 1]), prefix_key(key, [1, 2]), prefix_key(b"", [1, 2, 0])]
    assert len({key, *others}) == 4
