"""The page pool: who owns which physical page, and a trace of every change."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NULL_PAGE = 0
"""Of every rank. Padding tokens write here and padding rows read here; it is never owned and never changes a result."""


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
    """Pages with reference counts (vLLM's PagedAttention, arXiv:2309.06180), spread over one or more ranks.

    A rank is one of the devices that a sequence's pages are dealt to in turn, wherever its first page lies: logical page j
    on rank (first + j) mod ranks. Each rank has `num_pages` pages, the first of which is its null page. Page p is page
    p // ranks of rank p % ranks. A page is free or owned by `refcount(page)` requests; a request that must write a page it
    shares copies it first, within its rank.
    """

    def __init__(
        self, num_pages: int, page_size: int, trace: Callable[[PageEvent], None] | None = None, *, ranks: int = 1
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: must be at least 2 (page 0 is the null page)")
        if page_size < 1:
            raise ValueError(f"page_size={page_size}: must be at least 1 token")
        self.num_pages = num_pages
        self.page_size = page_size
        self.ranks = ranks
        self._trace = trace
        self._free = [deque(range(ranks + rank, num_pages * ranks, ranks)) for rank in range(ranks)]
        self._refcounts = [0] * (num_pages * ranks)

    @property
    def capacity(self) -> int:
        """Pages that requests can own."""
        return (self.num_pages - 1) * self.ranks

    @property
    def free_pages(self) -> int:
        return sum(map(len, self._free))

    @property
    def used_pages(self) -> int:
        return self.capacity - self.free_pages

    def refcount(self, page: int) -> int:
        return self._refcounts[page]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def available(self, after: Sequence[int] = (), *, copying: int | None = None) -> int:
        """How many pages `allocate` could give after these, once there is a copy of page `copying`; -1 if that cannot be."""
        free = [len(pages) for pages in self._free]
        if copying is not None:
            free[copying % self.ranks] -= 1
            if min(free) < 0:
                return -1
        first = self._next_rank(after)
        return min((rank - first) % self.ranks + count * self.ranks for rank, count in enumerate(free))

    def allocate(self, count: int, owner: str, after: Sequence[int] = ()) -> list[int]:
        """`count` free pages, owned once, dealt from the ranks in turn where a sequence's pages so far end.

        A sequence without pages starts on the rank with the most free ones. Raises OutOfPages, taking none, if there are
        fewer.
        """
        available = self.available(after)
        if count > available:
            raise OutOfPages(f"{count} pages wanted, {available} free")
        first = self._next_rank(after)
        pages = [self._free[(first + number) % self.ranks].popleft() for number in range(count)]
        for page in pages:
            self._take(page, owner)
        return pages

    def _next_rank(self, after: Sequence[int]) -> int:
        if after:
            return (after[-1] + 1) % self.ranks
        return max(range(self.ranks), key=lambda rank: len(self._free[rank]))

    def _take(self, page: int, owner: str) -> None:
        assert self._refcounts[page] == 0
        self._refcounts[page] = 1
        self._record("allocate", page, owner)

    def share(self, pages: Sequence[int], owner: str) -> list[int]:
        """One more owner for each page."""
        for page in pages:
            assert self._refcounts[page] > 0, f"page {page} is free and cannot be shared"
            self._refcounts[page] += 1
            self._record("share", page, owner)
        return list(pages)

    def copy_on_write(self, page: int, owner: str) -> int:
        """A fresh page for `owner` in place of its share of `page`; the caller copies the content. Raises OutOfPages."""
        rank = page % self.ranks
        if not self._free[rank]:
            raise OutOfPages(f"no page of rank {rank} is free for a copy of page {page}")
        copy = self._free[rank].popleft()
        self._take(copy, owner)
        self._record("copy", copy, owner, source=page)
        self.release([page], owner)
        return copy

    def release(self, pages: Sequence[int], owner: str) -> None:
        """One owner less for each page; pages without owners become free."""
        for page in pages:
            assert self._refcounts[page] > 0, f"page {page} is released more often than it was owned"
            self._refcounts[page] -= 1
            if self._refcounts[page] == 0:
                self._free[page % self.ranks].append(page)
                self._record("free", page, owner)
            else:
                self._record("release", page, owner)

    def _record(self, kind: str, page: int, owner: str, source: int | None = None) -> None:
        if self._trace is not None:
            self._trace(PageEvent(kind, page, owner, source))
