"""Adapters under load: loads that disturb nobody, names that come and go, every limit at once."""

import random

import pytest
from fake_server import FakeServer

from serving.request import FinishReason, RequestStatus


def test_loading_and_churning_others_leaves_running_adapters_in_their_slots():
    """F003: two adapters decode; others are loaded, and some of them used, all the while."""
    server = FakeServer(max_loras=3, num_pages=200)
    for name in ("a1", "a2"):
        server.registry.register(name, None)
    long = [server.add([1, 2, 3], max_tokens=60, adapter=name)[0] for name in ("a1", "a2")]
    server.step()
    slots = [request.slot for request in long]
    for number in range(50):
        server.registry.register(f"idle-{number}", None)
        server.registry.register(f"busy-{number}", None)
        server.add([1, 2, 3], max_tokens=1, adapter=f"busy-{number}")
        writes = server.step().slot_writes
        assert [write.slot for write in writes] == [3]
        assert [request.slot for request in long] == slots
        server.check()
    server.run()
    server.check_idle()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_more_adapters_than_slots_all_keep_working(num_slots):
    """F041: registered is not resident; whoever was evicted comes back."""
    server = FakeServer(max_loras=num_slots)
    for number in range(5):
        server.registry.register(f"a{number}", None)
    for turn in range(15):
        (request,) = server.add([1, 2, 3], max_tokens=4, adapter=f"a{turn % 5}")
        server.run()
        assert request.finish_reason is FinishReason.LENGTH
    server.check_idle()


def test_names_that_come_and_go_leave_nothing_behind():
    """F019: slot, host copy and cached pages go with each, also when it is unloaded while in use."""
    server = FakeServer(num_pages=100)
    server.add([1] * 9, max_tokens=1)
    server.run()
    cached = server.cache.block_hashes
    for number in range(200):
        name = f"name-{number}"
        server.registry.register(name, object())
        server.add([1] * 9, max_tokens=3, adapter=name)
        if number % 2:
            server.step()
        else:
            server.run()
        entry = server.registry.start_draining(name)
        server.collect_drained()
        server.run()
        assert server.registry.find(name) is None
        assert not server.slots.is_resident(entry.adapter_id)
        assert server.cache.block_hashes == cached
    assert len(server.registry) == 0
    assert not server.slots._kept
    assert len(server.cache._by_adapter) == 1
    server.check_idle()


def storm(seed: int, num_steps: int) -> None:
    """F010: long chunked prompts on two adapters, short ones on six more and on base, a pool that is far
    too small, and three in ten requests cancelled."""
    rng = random.Random(seed)
    server = FakeServer(
        num_pages=14, max_loras=2, max_num_seqs=5, max_num_batched_tokens=13, max_queue=40, adapter_patience=4
    )
    names = [f"a{number}" for number in range(1, 9)]
    for name in names:
        server.registry.register(name, None)
    num_preempted = 0
    for step in range(num_steps):
        if server.scheduler.num_waiting < 12:
            name = rng.choice([None, "a1", "a2", *names])
            size = rng.randint(15, 40) if name in ("a1", "a2") else rng.randint(1, 6)
            server.add([rng.randint(0, 1) for _ in range(size)], max_tokens=rng.randint(1, 14), adapter=name)
        if rng.random() < 0.3 and server.scheduler.has_work:
            server.end(server.scheduler.get(rng.choice(sorted(server.scheduler._live))))
        num_preempted += len(server.step().preempted)
        if step % 5 == 0:
            server.check()
    assert num_preempted
    server.run()
    server.check_idle()


@pytest.mark.parametrize("seed", range(3))
def test_every_limit_holds_in_a_storm(seed):
    storm(seed, 500)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 104))
def test_every_limit_holds_in_a_long_storm(seed):
    storm(seed, 5000)


def test_a_request_that_is_cancelled_before_it_ran_holds_nothing():
    server = FakeServer(max_loras=1)
    for name in "ab":
        server.registry.register(name, None)
    server.add([1], max_tokens=20, adapter="a")
    server.step()
    (deferred,) = server.add([1], max_tokens=20, adapter="b")
    server.step()
    assert deferred.status is RequestStatus.WAITING
    server.end(deferred)
    entry = server.registry.start_draining("b")
    assert server.registry.drained() == [entry]
    server.collect_drained()
    server.run()
    server.check_idle()
