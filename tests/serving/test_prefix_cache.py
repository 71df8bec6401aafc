"""Finding, storing and dropping cached pages; collisions of the hash cannot serve another's KV."""

import pytest
from fake_server import FakeServer

import serving.block_hash
import serving.scheduler
from serving.block_hash import namespace_keys
from serving.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventStream, replay
from serving.page_pool import PagePool
from serving.prefix_cache import CachedBlock, PrefixCache

SIZE = 2


class Chain:
    """Commits pages of one sequence after another, as a request would."""

    def __init__(self, num_pages: int = 8, *, enabled: bool = True):
        self.pool, self.events = PagePool(num_pages), []
        stream = KvEventStream()
        stream.subscribe(self.events.append)
        self.cache = PrefixCache(self.pool, SIZE, stream, enabled=enabled)

    def hashes(self, tokens, adapter_id=0, salt=None) -> list[bytes]:
        chain: list[bytes] = []
        serving.block_hash.extend_chain(chain, tokens, SIZE, namespace_keys(adapter_id, salt))
        return chain

    def compute(self, tokens, adapter_id=0, salt=None) -> list[int]:
        """Allocate and commit all full pages of a sequence; its user keeps them."""
        hashes, pages = self.hashes(tokens, adapter_id, salt), []
        for page, block_hash in enumerate(hashes):
            block = CachedBlock(
                page_id=self.cache.allocate(),
                parent_page=pages[-1] if pages else None,
                block_hash=block_hash,
                parent_hash=hashes[page - 1] if page else b"",
                token_ids=tuple(tokens[page * SIZE : (page + 1) * SIZE]),
                keys=namespace_keys(adapter_id, salt),
                adapter_id=adapter_id,
                adapter_name=None if not adapter_id else f"name-{adapter_id}",
            )
            pages.append(self.cache.commit(block))
        self.check()
        return pages

    def match(self, tokens, adapter_id=0, salt=None, max_tokens=99) -> list[int]:
        keys = namespace_keys(adapter_id, salt)
        return self.cache.match(tokens, self.hashes(tokens, adapter_id, salt), keys, max_tokens)

    def release(self, pages) -> None:
        self.cache.release(pages)
        self.check()

    def check(self) -> None:
        self.pool.check_invariants()
        self.cache.check_invariants()
        assert replay(self.events) == self.cache.block_hashes


def test_the_longest_prefix_is_found():
    chain = Chain()
    pages = chain.compute([1, 2, 3, 4, 5, 6])
    assert chain.match([1, 2, 3, 4, 5, 6, 7]) == pages
    assert chain.match([1, 2, 3, 4, 9, 6]) == pages[:2]
    assert chain.match([9, 2, 3, 4]) == []
    assert chain.match([1]) == []


@pytest.mark.parametrize(("max_tokens", "found"), [(6, 3), (5, 2), (4, 2), (1, 0), (0, 0)])
def test_at_most_so_many_tokens(max_tokens, found):
    chain = Chain()
    pages = chain.compute([1, 2, 3, 4, 5, 6])
    assert chain.match([1, 2, 3, 4, 5, 6], max_tokens=max_tokens) == pages[:found]


def test_namespaces_do_not_share():
    chain = Chain()
    chain.compute([1, 2, 3, 4], adapter_id=1)
    for adapter_id, salt in [(0, None), (2, None), (1, "salt"), (0, "salt")]:
        assert chain.match([1, 2, 3, 4], adapter_id, salt) == []
    assert len(chain.match([1, 2, 3, 4], 1)) == 2


def test_the_second_page_of_a_content_gives_way_to_the_first():
    chain = Chain()
    first = chain.compute([1, 2, 3, 4])
    assert chain.compute([1, 2, 5, 6])[0] == first[0]
    assert chain.compute([1, 2, 3, 4]) == first
    assert chain.pool.count(first[0]) == 3
    assert chain.pool.num_available == 8 - 3
    assert len(chain.events) == 3


def test_ends_are_evicted_before_beginnings():
    chain = Chain(num_pages=4)
    chain.release(chain.compute([1, 2, 3, 4, 5, 6]))
    chain.compute([9, 9, 8, 8])
    assert len(chain.match([1, 2, 3, 4, 5, 6])) == 2
    assert isinstance(chain.events[-2], BlockRemoved)
    assert chain.events[-2].block_hashes == (chain.hashes([1, 2, 3, 4, 5, 6])[2],)


def test_dropping_an_adapter_leaves_the_others():
    chain = Chain()
    chain.release(chain.compute([1, 2, 3, 4], adapter_id=1))
    chain.release(chain.compute([1, 2], adapter_id=1, salt="s"))
    base = chain.compute([1, 2])
    assert chain.cache.drop_adapter(1) == 3
    chain.check()
    assert chain.match([1, 2, 3, 4], 1) == chain.match([1, 2], 1, "s") == []
    assert chain.match([1, 2]) == base
    assert chain.pool.num_available == 7
    assert chain.cache.drop_adapter(1) == 0


def test_an_adapter_with_users_cannot_be_dropped():
    chain = Chain()
    chain.compute([1, 2], adapter_id=1)
    with pytest.raises(AssertionError, match="while requests run"):
        chain.cache.drop_adapter(1)


def test_clearing_forgets_all_and_leaves_used_pages_to_their_users():
    chain = Chain()
    used = chain.compute([1, 2])
    chain.release(chain.compute([3, 4]))
    chain.cache.clear()
    chain.check()
    assert isinstance(chain.events[-1], AllBlocksCleared)
    assert chain.match([1, 2]) == chain.match([3, 4]) == []
    again = chain.compute([1, 2])
    assert again != used
    chain.release(used)
    chain.release(again)
    assert chain.pool.num_available == 8


def test_switched_off_it_finds_and_stores_nothing():
    chain = Chain(enabled=False)
    chain.release(chain.compute([1, 2, 3, 4]))
    assert chain.match([1, 2, 3, 4]) == chain.events == []
    assert chain.pool.num_available == 8


def test_a_late_subscriber_can_be_told_what_is_cached():
    chain = Chain(num_pages=4)
    chain.release(chain.compute([1, 2, 3, 4, 5, 6]))
    chain.release(chain.compute([7, 8, 9, 9], adapter_id=3))
    events = chain.cache.stored_events()
    assert replay(events) == chain.cache.block_hashes
    seen = {None}
    for event in events:
        assert isinstance(event, BlockStored)
        assert event.parent_block_hash in seen
        seen.update(event.block_hashes)
    assert {(e.adapter_id, e.adapter_name) for e in events} == {(0, None), (3, "name-3")}


# ---- forced collisions: every hash is the same, or one of two ----


@pytest.fixture(params=[1, 2, 3])
def colliding(request, monkeypatch):
    """Hashes take so few values that contents, parents and namespaces collide all the time."""
    honest = serving.block_hash.block_hash

    def weak(parent, token_ids, keys):
        return bytes([honest(parent, token_ids, keys)[0] % request.param])

    monkeypatch.setattr(serving.block_hash, "block_hash", weak)
    monkeypatch.setattr(serving.scheduler, "block_hash", weak)


def test_colliding_contents_are_not_confused(colliding):
    chain = Chain(num_pages=64)
    sequences = [([a, a, b, b], adapter, salt) for a in (1, 2) for b in (3, 4) for adapter, salt in KINDS]
    contents = {}
    for tokens, adapter_id, salt in sequences:
        for page, page_id in enumerate(chain.compute(tokens, adapter_id, salt)):
            contents[page_id] = (tuple(tokens[: (page + 1) * SIZE]), adapter_id, salt)
    for tokens, adapter_id, salt in sequences:
        for page, page_id in enumerate(chain.match(tokens, adapter_id, salt)):
            assert contents[page_id] == (tuple(tokens[: (page + 1) * SIZE]), adapter_id, salt)


KINDS = [(0, None), (1, None), (2, None), (0, "s"), (1, "s")]


def test_a_child_of_a_colliding_parent_is_not_served(monkeypatch):
    """Two parents of equal hash; the child was computed after the one that is not cached."""
    monkeypatch.setattr(serving.block_hash, "block_hash", lambda parent, tokens, keys: bytes(tokens[-1:]))
    chain = Chain()
    first = chain.compute([1, 9])
    chain.compute([2, 9, 5, 5])  # its first page collides with [1, 9], so neither page may be found
    assert chain.match([1, 9, 5, 5]) == first
    assert chain.match([2, 9, 5, 5]) == []


def test_served_tokens_are_right_though_hashes_collide(colliding):
    server = FakeServer(num_pages=12, page_size=SIZE, max_num_seqs=3, max_num_batched_tokens=9)
    for name in ("a", "b"):
        server.registry.register(name, None)
    for number in range(120):
        prompt = [number // 2 % 2, number // 3 % 2, number // 5 % 2] * 2
        adapter, salt = (None, "a", "b")[number % 3], (None, "s")[number // 7 % 2]
        server.add(prompt, max_tokens=5, adapter=adapter, cache_salt=salt)
        server.step()
        server.check()
    server.run()
    server.check_idle()
    assert server.scheduler.prefix_hit_tokens > 0
