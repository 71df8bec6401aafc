"""Names, ids and users: every way in, every way out, and from many threads."""

import threading

import pytest

from lorajax.errors import (
    AdapterBusy,
    AdapterCapacityError,
    AdapterExists,
    AdapterFormatError,
    AdapterNotFound,
    RequestRejected,
)
from serving.adapter_registry import AdapterRegistry


@pytest.fixture
def registry():
    registry = AdapterRegistry(reserved_names=frozenset({"base"}))
    yield registry
    registry.check_invariants()


def unload(registry: AdapterRegistry, name: str) -> None:
    entry = registry.start_draining(name)
    registry.wait_drained(entry, 0.0)
    registry.remove(entry)


def test_ids_are_minted_from_one_and_never_again(registry):
    first = registry.register("a", "weights")
    assert first.adapter_id == 1
    assert registry.payload(1) == "weights"
    unload(registry, "a")
    assert registry.register("a", None).adapter_id == 2
    assert registry.register("a", None, replace=True).adapter_id == 3
    assert registry.register("b", None).adapter_id == 4


@pytest.mark.parametrize("name", ["a", "A", "0", "x" * 128, "a.b_c-d"])
def test_good_names(registry, name):
    assert registry.register(name, None).name == name
    assert registry.acquire(name, "r").name == name


@pytest.mark.parametrize(
    "name", ["", " a ", "a ", ".a", "-a", "_a", "a/b", "a\n", "ä", "x" * 129, None, 3, "base"]
)
def test_bad_names_are_refused_with_the_reason(registry, name):
    with pytest.raises(AdapterFormatError, match=r"adapter name .*allowed"):
        registry.check_name(name)
    with pytest.raises(AdapterFormatError if isinstance(name, str) else Exception):
        registry.register(name, None)
    assert len(registry) == 0


@pytest.mark.parametrize("name", ["typo", "", " a ", "A", "base"])
def test_only_a_loaded_name_is_found(registry, name):
    registry.register("a", None)
    with pytest.raises(AdapterNotFound, match="loaded: a"):
        registry.acquire(name, "r")
    assert registry.find(name) is None


def test_a_taken_name_needs_replace(registry):
    registry.register("a", 1)
    with pytest.raises(AdapterExists, match="'a'"):
        registry.register("a", 2)
    assert registry.find("a").payload == 1


def test_a_user_counts_once_until_its_first_release(registry):
    entry = registry.register("a", None)
    assert registry.acquire("a", "one") is entry
    registry.acquire("a", "two")
    with pytest.raises(RequestRejected, match="'one' is in use"):
        registry.acquire("a", "one")
    for _ in range(3):
        registry.release(entry.adapter_id, "one")
    assert entry.users == {"two"}
    registry.release(0, "two")
    registry.release(99, "two")
    assert entry.users == {"two"}


def test_a_draining_adapter_refuses_new_requests_and_waits_for_old_ones(registry):
    entry = registry.register("a", None)
    registry.acquire("a", "old")
    registry.start_draining("a")
    with pytest.raises(AdapterNotFound):
        registry.acquire("a", "new")
    with pytest.raises(AdapterNotFound):
        registry.start_draining("a")
    assert registry.drained() == []
    waiting = threading.Thread(target=registry.wait_drained, args=(entry, 10.0))
    waiting.start()
    registry.release(entry.adapter_id, "old")
    waiting.join(10)
    assert not waiting.is_alive()
    assert registry.drained() == [entry]
    registry.remove(entry)
    registry.remove(entry)
    assert list(registry) == []


def test_after_a_timeout_it_takes_requests_again(registry):
    entry = registry.register("a", None)
    registry.acquire("a", "old")
    registry.start_draining("a")
    with pytest.raises(AdapterBusy, match="1 requests still run on adapter 'a'"):
        registry.wait_drained(entry, 0.01)
    assert registry.acquire("a", "new") is entry
    assert not entry.draining


def test_a_name_can_be_loaded_again_during_its_drain(registry):
    old = registry.register("a", 1)
    registry.acquire("a", "old")
    registry.start_draining("a")
    new = registry.register("a", 2)
    assert registry.acquire("a", "new") is new
    with pytest.raises(AdapterBusy):
        registry.wait_drained(old, 0.0)
    assert old.draining, "the name is another's now"
    assert registry.find("a") is new
    registry.release(old.adapter_id, "old")
    assert registry.drained() == [old]


def test_a_replaced_version_serves_its_requests_to_the_end(registry):
    old = registry.register("a", 1)
    registry.acquire("a", "r")
    new = registry.register("a", 2, replace=True)
    assert registry.acquire("a", "s") is new
    assert registry.payload(old.adapter_id) == 1
    registry.release(new.adapter_id, "r")
    assert registry.drained() == []
    registry.release(old.adapter_id, "r")
    assert registry.drained() == [old]


def test_a_full_registry_says_so():
    registry = AdapterRegistry(max_adapters=2)
    registry.register("a", None)
    registry.register("b", None)
    with pytest.raises(AdapterCapacityError, match="max_cpu_loras = 2"):
        registry.register("c", None)
    for _ in range(3):  # versions nobody uses are on their way out
        registry.register("a", None, replace=True)
    registry.acquire("a", "r")
    with pytest.raises(AdapterCapacityError):
        registry.register("a", None, replace=True)
    assert registry.find("a").adapter_id == 5
    registry.check_invariants()


def test_removing_an_adapter_in_use_is_a_broken_invariant(registry):
    entry = registry.register("a", None)
    registry.acquire("a", "r")
    registry.start_draining("a")
    with pytest.raises(AssertionError, match="while in use"):
        registry.remove(entry)


def test_many_threads_leave_nothing_behind():
    registry = AdapterRegistry()
    registry.register("a", 0)
    unloads = []

    def use(number: int) -> None:
        for turn in range(200):
            request_id = f"{number}-{turn}"
            try:
                entry = registry.acquire("a", request_id)
            except AdapterNotFound:
                continue
            assert registry.payload(entry.adapter_id) is not None
            registry.release(entry.adapter_id, request_id)
            registry.release(entry.adapter_id, request_id)

    def churn() -> None:
        for turn in range(1, 100):
            try:
                entry = registry.start_draining("a")
            except AdapterNotFound:
                continue
            registry.register("a", turn)
            registry.wait_drained(entry, 10.0)
            registry.remove(entry)
            unloads.append(entry.adapter_id)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    threads += [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    registry.check_invariants()
    assert len(registry) == 1
    assert len(unloads) == len(set(unloads)) > 50
    assert not registry.find("a").users
