"""The page pool: who owns which physical page, and a trace of every change."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NULL_PAGE = 0
"""Padding tokens write here and padding rows read here; it is never owned and never changes a result."""


class OutOfPages(Exception):
    """More pages were asked for than are free. The scheduler answers it by preempting."""


@dataclass(frozen=True)
class PageEvent:
    """One record of the KV trace. kind: "allocate", "share", "copy", "release" (one owner less) or "free" (the last one).

    `source` is the page copied from, for "copy".
    """

    kind: str
    page: int
    owner: str
    source: int | None = None


class PagePool:
    """Pages 1 .. num_pages - 1 with reference counts (vLLM's PagedAttention, arXiv:2309.06180).

    A page is free or owned by `refcount(page)` requests; a request that must write a page it shares copies it first.
    """

    def __init__(self, num_pages: int, page_size: int, trace: Callable[[PageEvent], None] | None = None) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: must be at least 2 (page 0 is the null page)")
        if page_size < 1:
            raise ValueError(f"page_size={page_size}: must be at least 1 token")
        self.num_pages = num_pages
        self.page_size = page_size
        self._trace = trace
        self._free = deque(range(1, num_pages))
        self._refcounts = [0] * num_pages

    @property
    def capacity(self) -> int:
        """Pages that requests can own."""
        return self.num_pages - 1

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return self.capacity - self.free_pages

    def refcount(self, page: int) -> int:
        return self._refcounts[page]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int, owner: str) -> list[int]:
        """`count` free pages, owned once. Raises OutOfPages, taking none, if there are fewer."""
        if count > self.free_pages:
            raise OutOfPages(f"{count} pages wanted, {self.free_pages} free")
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            assert self._refcounts[page] == 0
            self._refcounts[page] = 1
            self._record("allocate", page, owner)
        return pages

    def share(self, pages: Sequence[int], owner: str) -> list[int]:
        """One more owner for each page."""
        for page in pages:
            assert self._refcounts[page] > 0, f"page {page} is free and cannot be shared"
            self._refcounts[page] += 1
            self._record("share", page, owner)
        return list(pages)

    def copy_on_write(self, page: int, owner: str) -> int:
        """A fresh page for `owner` in place of its share of `page`; the caller copies the content. Raises OutOfPages."""
        (copy,) = self.allocate(1, owner)
        self._record("copy", copy, owner, source=page)
        self.release([page], owner)
        return copy

    def release(self, pages: Sequence[int], owner: str) -> None:
        """One owner less for each page; pages without owners become free."""
        for page in pages:
            assert self._refcounts[page] > 0, f"page {page} is released more often than it was owned"
            self._refcounts[page] -= 1
            if self._refcounts[page] == 0:
                self._free.append(page)
                self._record("free", page, owner)
            else:
                self._record("release", page, owner)

    def _record(self, kind: str, page: int, owner: str, source: int | None = None) -> None:
        if self._trace is not None:
            self._trace(PageEvent(kind, page, owner, source))
