"""Pages: used, cached or free; evicted least recently used first."""

import pytest

from serving.page_pool import PagePool


def test_pages_are_given_until_none_is_left():
    pool = PagePool(3)
    pages = [pool.allocate() for _ in range(3)]
    assert sorted(page for page, _ in pages) == [0, 1, 2]
    assert not any(evicted for _, evicted in pages)
    assert pool.num_available == 0
    pool.check_invariants()


def test_a_page_without_users_is_free_or_cached():
    pool = PagePool(2)
    (first, _), (second, _) = pool.allocate(), pool.allocate()
    pool.share(first)
    pool.free(first, keep=False)
    assert pool.num_available == 0
    pool.free(first, keep=False)
    pool.free(second, keep=True)
    assert pool.num_available == 2
    assert list(pool.cached_pages) == [second]
    pool.check_invariants()


def test_free_pages_go_before_cached_ones_and_those_by_age():
    pool = PagePool(3)
    pages = [pool.allocate()[0] for _ in range(3)]
    for page in (pages[1], pages[0]):
        pool.free(page, keep=True)
    pool.free(pages[2], keep=False)
    assert [pool.allocate() for _ in range(3)] == [(pages[2], False), (pages[1], True), (pages[0], True)]


def test_a_shared_page_is_no_longer_the_oldest():
    pool = PagePool(2)
    pages = [pool.allocate()[0] for _ in range(2)]
    for page in pages:
        pool.free(page, keep=True)
    pool.share(pages[0])
    pool.free(pages[0], keep=True)
    assert pool.allocate() == (pages[1], True)


def test_forgetting_frees_only_pages_without_users():
    pool = PagePool(2)
    cached, used = pool.allocate()[0], pool.allocate()[0]
    pool.free(cached, keep=True)
    pool.forget(cached)
    pool.forget(used)
    assert pool.allocate() == (cached, False)
    assert pool.count(used) == 1
    pool.check_invariants()


def test_freeing_too_often_is_a_broken_invariant():
    pool = PagePool(1)
    page, _ = pool.allocate()
    pool.free(page, keep=True)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(page, keep=True)
