"""Block hash → page: full pages whose KV later requests may reuse.

Invariant: a cached page's content is exactly what its entry says: tokens, namespace and parent page
content. `match` compares these, so even two blocks of equal hash cannot serve each other's KV. An
entry lives until its page is given to someone else, or its adapter goes.
"""

import dataclasses
from collections.abc import Sequence

from serving.block_hash import NamespaceKeys
from serving.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventStream
from serving.page_pool import PagePool


@dataclasses.dataclass(frozen=True, slots=True)
class CachedBlock:
    """What one cached page holds."""

    page_id: int
    block_hash: bytes
    parent_hash: bytes
    token_ids: tuple[int, ...]
    keys: NamespaceKeys
    adapter_id: int


class PrefixCache:
    """Finds, stores and drops cached pages. `enabled=False` never finds or stores any."""

    def __init__(self, pool: PagePool, page_size: int, events: KvEventStream, *, enabled: bool):
        self._pool, self._page_size, self._events, self._enabled = pool, page_size, events, enabled
        self._by_hash: dict[bytes, CachedBlock] = {}
        self._by_page: dict[int, CachedBlock] = {}
        self._by_adapter: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def match(
        self, token_ids: Sequence[int], block_hashes: Sequence[bytes], keys: NamespaceKeys, max_tokens: int
    ) -> list[int]:
        """Pages of the longest cached prefix of at most `max_tokens` tokens. Modifies nothing."""
        pages: list[int] = []
        parent = b""
        for block_hash in block_hashes[: max_tokens // self._page_size]:
            block = self._by_hash.get(block_hash)
            begin = len(pages) * self._page_size
            tokens = tuple(token_ids[begin : begin + self._page_size])
            if block is None or (block.parent_hash, block.token_ids, block.keys) != (parent, tokens, keys):
                break
            pages.append(block.page_id)
            parent = block_hash
        return pages

    def commit(
        self,
        page_id: int,
        block_hash: bytes,
        parent_hash: bytes,
        token_ids: Sequence[int],
        keys: NamespaceKeys,
        adapter_id: int,
        adapter_name: str | None,
    ) -> None:
        """Make a full, computed page findable. A second page of the same content stays private."""
        if not self._enabled or block_hash in self._by_hash or page_id in self._by_page:
            return
        block = CachedBlock(page_id, block_hash, parent_hash, tuple(token_ids), keys, adapter_id)
        self._by_hash[block_hash] = self._by_page[page_id] = block
        self._by_adapter.setdefault(adapter_id, set()).add(page_id)
        if self._events.wanted:
            stored = BlockStored(
                block_hashes=(block_hash,),
                parent_block_hash=parent_hash or None,
                token_ids=block.token_ids,
                block_size=self._page_size,
                adapter_id=adapter_id,
                adapter_name=adapter_name,
            )
            self._events.publish(stored)

    def allocate(self) -> int:
        """A page for new content; evicts the least recently used cached page if none is free."""
        page_id, evicted = self._pool.allocate()
        if evicted:
            self._remove(page_id)
        return page_id

    def release(self, page_id: int) -> None:
        """One user less; a page that is findable stays cached."""
        self._pool.free(page_id, keep=page_id in self._by_page)

    def drop_adapter(self, adapter_id: int) -> int:
        """Forget every page computed with an adapter. Returns how many. It must have no requests."""
        pages = sorted(self._by_adapter.get(adapter_id, ()))
        for page_id in pages:
            self._remove(page_id)
            self._pool.forget(page_id)
        return len(pages)

    def clear(self) -> None:
        """Forget everything; pages in use stay with their users."""
        for page_id in list(self._by_page):
            self._pool.forget(page_id)
        self._by_hash.clear()
        self._by_page.clear()
        self._by_adapter.clear()
        if self._events.wanted:
            self._events.publish(AllBlocksCleared())

    def _remove(self, page_id: int) -> None:
        block = self._by_page.pop(page_id)
        del self._by_hash[block.block_hash]
        siblings = self._by_adapter[block.adapter_id]
        siblings.discard(page_id)
        if not siblings:
            del self._by_adapter[block.adapter_id]
        if self._events.wanted:
            self._events.publish(BlockRemoved(block_hashes=(block.block_hash,)))

    def check_invariants(self) -> None:
        assert {b.page_id for b in self._by_hash.values()} == set(self._by_page)
        assert all(self._by_hash[b.block_hash] is b for b in self._by_page.values())
        assert {p for pages in self._by_adapter.values() for p in pages} == set(self._by_page)
        without_user = {page for page in self._by_page if self._pool.count(page) == 0}
        assert len(without_user) == self._pool.num_cached, "a cached page without a user is findable"
