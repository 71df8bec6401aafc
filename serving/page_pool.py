"""The pages of the KV cache as ids: who uses which, which are free, which are free but still cached.

Invariant: every page is in exactly one of three states: used (reference count > 0), cached (count 0,
content kept, evicted least recently used first), or free (count 0, no content worth keeping).
"""

from collections import OrderedDict


class PagePool:
    """Hands out page ids 0 … num_pages - 1 and counts who refers to them."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free, or cached without a user."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def count(self, page_id: int) -> int:
        return self._counts[page_id]

    def allocate(self) -> tuple[int, bool]:
        """A page with one user, and whether it was cached: its content is then lost to the cache.

        There must be one available.
        """
        if self._free:
            page_id, evicted = self._free.pop(), False
        else:
            (page_id, _), evicted = self._cached.popitem(last=False), True
        self._counts[page_id] = 1
        return page_id, evicted

    def share(self, page_id: int) -> None:
        """One user more, of a page that is used or cached."""
        if self._counts[page_id] == 0:
            del self._cached[page_id]
        self._counts[page_id] += 1

    def free(self, page_id: int, *, keep: bool) -> None:
        """One user less. keep: a page without users stays cached, as the most recently used."""
        assert self._counts[page_id] > 0, f"page {page_id} is freed more often than it was allocated"
        self._counts[page_id] -= 1
        if self._counts[page_id] == 0:
            if keep:
                self._cached[page_id] = None
            else:
                self._free.append(page_id)

    def forget(self, page_id: int) -> None:
        """The content of a page is no longer cached. One without users becomes free."""
        if self._counts[page_id] == 0:
            del self._cached[page_id]
            self._free.append(page_id)

    def check_invariants(self) -> None:
        free, cached = set(self._free), set(self._cached)
        used = {page for page, count in enumerate(self._counts) if count > 0}
        assert len(free) == len(self._free) and min(self._counts, default=0) >= 0
        assert not free & cached and not free & used and not cached & used
        assert len(free) + len(cached) + len(used) == self.num_pages
