"""`max_loras` over everything that runs, and turns: nobody waits for ever, nobody is drained in vain."""

import random

import pytest
from fake_server import FakeServer
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.request import Request, RequestStatus
from serving.scheduler import SchedulerConfig

NEVER = 10**9


def server_with(names: str, **changes) -> FakeServer:
    server = FakeServer(**changes)
    for name in names:
        server.registry.register(name, None)
    return server


def running(server: FakeServer) -> list[str | None]:
    return [request.adapter_name for request in server.scheduler.running]


# ---- the cap ----


def test_one_adapter_more_is_passed_over_and_the_scan_goes_on():
    server = server_with("abc", max_loras=2)
    for name in ["a", "b", "c", "a", None, "c", "b"]:
        server.add([1, 2], adapter=name, max_tokens=5)
    server.step()
    assert running(server) == ["a", "b", "a", None, "b"]
    server.run()
    server.check_idle()


def test_the_cap_counts_decodes_chunked_prefills_and_newcomers_together():
    server = server_with("abc", max_loras=2, max_num_batched_tokens=12, max_num_seqs=4)
    server.add([1], adapter="a", max_tokens=20)
    server.step()
    server.add(list(range(20)), adapter="b", max_tokens=2)  # takes several steps
    server.add([1], adapter="c", max_tokens=2)
    server.step()
    assert running(server) == ["a", "b"]
    assert server.scheduler._prefilling
    server.step()
    assert running(server) == ["a", "b"]
    server.run()


def test_a_place_taken_in_this_step_is_shared_in_this_step():
    server = server_with("ab", max_loras=1)
    for name in ["a", "b", "a", "a"]:
        server.add([1, 2], adapter=name)
    server.step()
    assert running(server) == ["a", "a", "a"]


def test_base_is_never_counted():
    server = server_with("ab", max_loras=1, max_num_seqs=6)
    for name in [None, "a", "b", None, None]:
        server.add([1, 2], adapter=name)
    server.step()
    assert running(server) == [None, "a", None, None]


def test_zero_sets_no_cap_but_the_slots():
    server = server_with("abcd", max_loras=0, num_slots=3)
    for name in "abcd":
        server.add([1, 2], adapter=name)
    server.step()
    assert running(server) == ["a", "b", "c"]
    server.run()
    server.check_idle()


def test_a_cap_under_the_number_of_slots_keeps_adapters_resident():
    server = server_with("abc", max_loras=1, num_slots=3)
    for name in "abc":
        server.add([1, 2], adapter=name, max_tokens=2)
    server.step()
    assert running(server) == ["a"]
    server.run()
    writes = 0
    for name in "abcabc":
        server.add([1, 2], adapter=name, max_tokens=2)
        while server.scheduler.has_work:
            writes += len(server.step().slot_writes)
    assert writes == 0, "all three are resident"


def test_a_freed_place_goes_to_the_first_in_line():
    server = server_with("abcd", max_loras=1)
    (first,) = server.add([1, 2], adapter="a", max_tokens=2)
    for name in "cbd":
        server.add([1, 2], adapter=name, max_tokens=2)
    while first.status is not RequestStatus.FINISHED:
        server.step()
    server.step()
    assert running(server) == ["c"]


def test_a_kept_idle_adapter_does_not_lock_the_others_out():
    server = server_with("abc", max_loras=2, adapter_patience=2)
    server.slots.keep(server.registry.find("a").adapter_id)
    server.add([1, 2], adapter="a", max_tokens=2)
    server.run()
    (late,) = server.add([1, 2], adapter="c", max_tokens=2, priority=1)
    for _ in range(20):
        server.add([1, 2], adapter="b", max_tokens=6, priority=1)
        server.step()
    assert late.status is RequestStatus.FINISHED
    assert server.slots.is_resident(late.adapter_id) or server.slots.is_resident(1)
    assert server.slots.is_resident(1)
    server.run()


# ---- turns ----


def crowd(server: FakeServer, names: str, *, length: int, steps: int, late: Request) -> int:
    """Keep every one of these adapters in demand until `late` starts; returns the steps it waited."""
    for step in range(steps):
        if late in server.started_at:
            return step
        for name in names:
            server.add([1, 2], adapter=name, max_tokens=length)
        server.step()
    raise AssertionError(f"not started after {steps} steps")


@pytest.mark.parametrize("patience", [0, 5, 40])
@pytest.mark.parametrize("residents", ["a", "ab", "abc"])
def test_hot_adapters_make_way_within_the_bound(residents, patience):
    """F011: with every place in constant demand, one request on another adapter starts in time."""
    length = 12
    server = server_with("abcx", max_loras=len(residents), adapter_patience=patience, max_num_seqs=6)
    for _ in range(3):
        for name in residents:
            server.add([1, 2], adapter=name, max_tokens=length)
        server.step()
    ahead = len(server.scheduler._live) - len(server.scheduler.running)
    (late,) = server.add([1, 2], adapter="x", max_tokens=1)
    waited = crowd(server, residents, length=length, steps=1000, late=late)
    in_line = -(-ahead // 6) * length  # those that wait before it take their seats first
    assert waited <= patience + in_line + length + 1


def test_without_turns_it_would_starve():
    """The adversary of the test above is one: under greedy admission it never starts."""
    server = server_with("ax", max_loras=1, adapter_patience=NEVER, max_num_seqs=6)
    server.add([1, 2], adapter="a", max_tokens=12)
    server.step()
    (late,) = server.add([1, 2], adapter="x", max_tokens=1)
    with pytest.raises(AssertionError, match="not started"):
        crowd(server, "a", length=12, steps=500, late=late)


def test_base_does_not_pay_for_turns():
    """Base requests start at once while an adapter drains, and take the seats it leaves."""
    server = server_with("ax", max_loras=1, adapter_patience=0, max_num_seqs=4)
    server.add([1, 2], adapter="a", max_tokens=30)
    server.step()
    server.add([1, 2], adapter="x", max_tokens=2)
    for _ in range(10):
        server.add([1, 2], adapter="a", max_tokens=2)
        (base,) = server.add([1, 2], max_tokens=1)
        server.step()
        assert server.scheduler._turns.leaving == {1}
        assert base.status is RequestStatus.FINISHED


def test_nobody_leaves_while_nobody_waits():
    server = server_with("ab", max_loras=2, adapter_patience=0)
    for step in range(60):
        server.add([1, 2], adapter="ab"[step % 2], max_tokens=5)
        server.step()
        assert not server.scheduler._turns.leaving


def test_only_as_many_leave_as_are_overdue():
    server = server_with("abcx", max_loras=3, adapter_patience=0, max_num_seqs=8)
    for name in "abc":
        server.add([1, 2], adapter=name, max_tokens=20)
    server.step()
    server.add([1, 2], adapter="x", max_tokens=2)
    server.step()
    server.step()
    assert server.scheduler._turns.leaving == {server.registry.find("a").adapter_id}


def test_a_kept_adapter_does_not_leave_since_its_slot_would_not():
    server = server_with("abx", max_loras=2, adapter_patience=0)
    server.slots.keep(server.registry.find("a").adapter_id)
    for name in "ab":
        server.add([1, 2], adapter=name, max_tokens=20)
    server.step()
    server.add([1, 2], adapter="x", max_tokens=2)
    server.step()
    server.step()
    assert server.scheduler._turns.leaving == {server.registry.find("b").adapter_id}
    server.run()


def test_an_adapter_with_urgent_requests_does_not_block_the_turn_of_others():
    """'a' goes on with requests before the overdue one; then 'b' must leave in its stead."""
    server = server_with("abx", max_loras=2, adapter_patience=0, max_num_seqs=16)
    for name in "ab":
        server.add([1, 2], adapter=name, max_tokens=6, priority=1)
    server.step()
    (late,) = server.add([1, 2], adapter="x", max_tokens=1, priority=1)
    for _ in range(30):
        (urgent,) = server.add([1, 2], adapter="a", max_tokens=4, priority=0)
        server.add([1, 2], adapter="b", max_tokens=4, priority=1)
        server.step()
        assert urgent.status is RequestStatus.RUNNING, "it comes before the overdue one"
    assert late.status is RequestStatus.FINISHED


BENIGN = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([None, *"abc"]), st.integers(1, 10), st.integers(1, 8)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(load=BENIGN, patience=st.sampled_from([0, 4]))
def test_a_load_with_places_for_all_runs_exactly_as_under_greedy_admission(load, patience):
    def serve(patience: int) -> list[int]:
        server = server_with("abc", max_loras=3, adapter_patience=patience, max_num_seqs=3)
        requests = []
        for gap, adapter, prompt, length in load:
            for _ in range(gap):
                server.step()
            requests += server.add([1] * prompt, adapter=adapter, max_tokens=length)
        server.run()
        return [server.num_steps, *(server.started_at[request] for request in requests)]

    assert serve(patience) == serve(NEVER)


def test_more_adapters_than_places_lose_little_to_turns():
    """Six adapters on two places, in a queue: turns cost at most a tenth of the steps of greedy admission."""

    def serve(patience: int) -> int:
        server = server_with("abcdef", max_loras=2, adapter_patience=patience, max_num_seqs=4, num_pages=200)
        for number in range(240):
            server.add([1, 2], adapter="abcdef"[number * number % 6], max_tokens=4 + number % 7)
        server.run()
        return server.num_steps

    assert serve(24) <= 1.1 * serve(NEVER)


# ---- the bound ----


def bound(config: SchedulerConfig, num_before: int) -> int:
    return (num_before + 1) * (config.adapter_patience + 3 * config.max_steps_to_end)


def adversary(seed: int, *, num_pages: int, max_loras: int, max_num_seqs: int, rounds: int) -> None:
    """Keeps every running adapter in demand with requests of any shape, aborts at times, and now and then
    sends one request on another adapter, whose wait is held against the bound.

    All are of one priority, so whatever arrives later comes after it.
    """
    rng = random.Random(seed)
    server = server_with(
        "abcx",
        num_pages=num_pages,
        max_loras=max_loras,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + 4,
        max_model_len=16,
        adapter_patience=3,
    )
    hot = "abc"[:max_loras]

    def press() -> None:
        demand = [request.adapter_name for request in server.scheduler.waiting]
        for name in [*hot, *([None] if rng.random() < 0.1 else [])]:
            for _ in range(2 - demand.count(name)):
                prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 12))]
                longest = 16 - len(prompt)
                server.add(prompt, adapter=name, max_tokens=rng.choice([1, longest, longest, longest]))
        if rng.random() < 0.03 and server.scheduler.running:
            server.end(rng.choice(server.scheduler.running))
        server.step()

    late = None
    for _ in range(rounds):
        for _ in range(rng.randint(1, 8)):
            press()
        while late is not None and late.status is not RequestStatus.FINISHED:
            press()
        limit = bound(server.config, len(server.scheduler._live))
        prompt = [1] * rng.randint(1, 12)
        (late,) = server.add(prompt, adapter="x", max_tokens=16 - len(prompt))
        waited = 0
        while late.status is RequestStatus.WAITING:
            press()
            waited += 1
            assert waited <= limit
    server.run()
    server.check_idle()


SIZES = {
    "num_pages": st.sampled_from([4, 6, 40]),
    "max_loras": st.integers(1, 3),
    "max_num_seqs": st.sampled_from([1, 3, 8, 16]),
}


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), **SIZES)
def test_a_request_starts_within_the_bound_whatever_comes_after_it(seed, num_pages, max_loras, max_num_seqs):
    adversary(seed, num_pages=num_pages, max_loras=max_loras, max_num_seqs=max_num_seqs, rounds=4)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), **SIZES)
def test_a_request_starts_within_the_bound_at_length(seed, num_pages, max_loras, max_num_seqs):
    adversary(seed, num_pages=num_pages, max_loras=max_loras, max_num_seqs=max_num_seqs, rounds=30)
