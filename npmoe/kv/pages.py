"""Which page holds what: reference counts and prefix keys over plain ints, no arrays.

A page that nobody references keeps its contents until it is needed, so that a later prompt with the
same beginning finds it again (`match`). Pages are taken oldest first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence


def prefix_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full page: a digest of its tokens and of everything before them."""
    payload = parent + b"".join(t.to_bytes(4, "little") for t in token_ids)
    return hashlib.blake2b(payload, digest_size=16).digest()


class PageAllocator:
    """Hands out page ids 0 .. num_pages - 1."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._references = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and no change) if there are too few."""
        if count > len(self._free):
            return None
        pages = []
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            self._forget(page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def retain(self, page: int) -> None:
        """One more reference to a page, which may be free but still hold its contents."""
        if self._references[page] == 0:
            del self._free[page]
        self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less to each page; last page first, so that prefixes live longest."""
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} is free already"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = None
                if page not in self._key_of:
                    self._free.move_to_end(page, last=False)

    def seal(self, page: int, key: bytes) -> None:
        """Declares that `page` is full and holds what `key` stands for."""
        if key not in self._page_of and page not in self._key_of:
            self._key_of[page] = key
            self._page_of[key] = page

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest run of `keys` that is still there, with one more reference each."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self.retain(page)
            pages.append(page)
        return pages

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]

    def check_integrity(self, holders: Sequence[Sequence[int]] | None = None) -> None:
        """Asserts the invariants; with `holders` (the page lists in use) also every count."""
        assert all(count >= 0 for count in self._references)
        free = {page for page, count in enumerate(self._references) if count == 0}
        assert set(self._free) == free, "free list and reference counts disagree"
        assert {k: p for p, k in self._key_of.items()} == self._page_of, "keys and pages disagree"
        if holders is not None:
            held = [0] * self.num_pages
            for pages in holders:
                for page in pages:
                    held[page] += 1
            assert held == self._references, "reference counts and holders disagree"
