"""Block hash → page: full pages whose KV later requests may reuse.

Invariants: a cached page's content is exactly what its block says. A block's parent is cached as long
as the block is: whoever holds a page holds its parents, and gives them back after it, so the least recently
used page never has children. `match` goes from parent to child by page and compares tokens and namespace,
so that two contents of equal hash cannot serve each other's KV.
"""

from collections.abc import Sequence
from typing import NamedTuple

from serving.block_hash import NamespaceKeys
from serving.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventStream
from serving.page_pool import PagePool


class CachedBlock(NamedTuple):
    """What one page holds. parent_page, parent_hash: None and empty for a sequence's first page."""

    page_id: int
    parent_page: int | None
    block_hash: bytes
    parent_hash: bytes
    token_ids: tuple[int, ...]
    keys: NamespaceKeys
    adapter_id: int
    adapter_name: str | None

    def holds(self, parent_page: int | None, token_ids: tuple[int, ...], keys: NamespaceKeys) -> bool:
        """Whether this is the content, and not another one with the same hash."""
        return self.parent_page == parent_page and self.token_ids == token_ids and self.keys == keys


class PrefixCache:
    """Finds, stores and drops cached pages. `enabled=False` never finds or stores any."""

    def __init__(self, pool: PagePool, page_size: int, events: KvEventStream, *, enabled: bool):
        self._pool, self._page_size, self._events, self._enabled = pool, page_size, events, enabled
        self._by_hash: dict[bytes, CachedBlock] = {}  # parents before children
        self._by_page: dict[int, CachedBlock] = {}
        self._by_adapter: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    @property
    def block_hashes(self) -> set[bytes]:
        """Hashes of all cached blocks."""
        return set(self._by_hash)

    def match(
        self, token_ids: Sequence[int], block_hashes: Sequence[bytes], keys: NamespaceKeys, max_tokens: int
    ) -> list[int]:
        """Pages of the longest cached prefix of at most `max_tokens` tokens. Modifies nothing."""
        pages: list[int] = []
        parent: int | None = None
        for page in range(min(max_tokens // self._page_size, len(block_hashes))):
            block = self._by_hash.get(block_hashes[page])
            begin = page * self._page_size
            tokens = tuple(token_ids[begin : begin + self._page_size])
            if block is None or not block.holds(parent, tokens, keys):
                break
            parent = block.page_id
            pages.append(parent)
        return pages

    def commit(self, block: CachedBlock) -> int:
        """Make a full, computed page findable. Returns the page that its user must hold from now on.

        That is another one if it has the same content and was first: the user then shares that page,
        and its own is free again. A content whose hash is taken by another content stays private, and
        so do the pages after it.
        """
        if not self._enabled:
            return block.page_id
        assert block.page_id not in self._by_page, f"page {block.page_id} is committed twice"
        first = self._by_hash.get(block.block_hash)
        if first is not None:
            if not first.holds(block.parent_page, block.token_ids, block.keys):
                return block.page_id
            self._pool.share(first.page_id)
            self._pool.free(block.page_id, keep=False)
            return first.page_id
        if block.parent_page is not None and block.parent_page not in self._by_page:
            return block.page_id
        self._by_hash[block.block_hash] = self._by_page[block.page_id] = block
        self._by_adapter.setdefault(block.adapter_id, set()).add(block.page_id)
        if self._events.wanted:
            self._events.publish(self._stored(block))
        return block.page_id

    def allocate(self) -> int:
        """A page for new content; evicts the least recently used cached page if none is free."""
        page_id, evicted = self._pool.allocate()
        if evicted:
            self._remove([page_id])
        return page_id

    def share(self, page_ids: Sequence[int]) -> None:
        """One user more for each page of a match."""
        for page_id in page_ids:
            self._pool.share(page_id)

    def release(self, page_ids: Sequence[int]) -> None:
        """One user less for each page of a sequence; those that are findable stay cached.

        The last page goes first: it is evicted first, and a prefix is worth more than its end.
        """
        for page_id in reversed(page_ids):
            self._pool.free(page_id, keep=page_id in self._by_page)

    def drop_adapter(self, adapter_id: int) -> int:
        """Forget every page computed with an adapter. Returns how many. It must have no requests."""
        pages = sorted(self._by_adapter.get(adapter_id, ()))
        self._remove(pages)
        for page_id in pages:
            assert not self._pool.count(page_id), f"adapter {adapter_id} is dropped while requests run on it"
            self._pool.forget(page_id)
        return len(pages)

    def clear(self) -> None:
        """Forget everything; pages in use stay with their users."""
        for page_id in self._by_page:
            self._pool.forget(page_id)
        self._by_hash.clear()
        self._by_page.clear()
        self._by_adapter.clear()
        if self._events.wanted:
            self._events.publish(AllBlocksCleared())

    def stored_events(self) -> list[BlockStored]:
        """Events that lead from an empty cache to this one: what a late subscriber missed."""
        return [self._stored(block) for block in self._by_hash.values()]

    def _stored(self, block: CachedBlock) -> BlockStored:
        return BlockStored(
            block_hashes=(block.block_hash,),
            parent_block_hash=block.parent_hash or None,
            token_ids=block.token_ids,
            block_size=self._page_size,
            adapter_id=block.adapter_id,
            adapter_name=block.adapter_name,
        )

    def _remove(self, page_ids: Sequence[int]) -> None:
        blocks = [self._by_page.pop(page_id) for page_id in page_ids]
        for block in blocks:
            del self._by_hash[block.block_hash]
            same_adapter = self._by_adapter[block.adapter_id]
            same_adapter.discard(block.page_id)
            if not same_adapter:
                del self._by_adapter[block.adapter_id]
        if blocks and self._events.wanted:
            self._events.publish(BlockRemoved(block_hashes=tuple(block.block_hash for block in blocks)))

    def check_invariants(self) -> None:
        assert {b.page_id for b in self._by_hash.values()} == set(self._by_page)
        assert all(self._by_hash[b.block_hash] is b for b in self._by_page.values())
        assert {p for pages in self._by_adapter.values() for p in pages} == set(self._by_page)
        idle = {page: age for age, page in enumerate(self._pool.cached_pages)}
        assert set(idle) == {page for page in self._by_page if not self._pool.count(page)}
        for block in self._by_page.values():
            if block.parent_page is not None:
                parent = self._by_page[block.parent_page]
                assert (parent.block_hash, parent.keys) == (block.parent_hash, block.keys)
                if parent.page_id in idle:
                    assert idle[block.page_id] < idle[parent.page_id], "a parent would be evicted first"
