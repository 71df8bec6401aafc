"""What a decode step costs the host must not grow with anything but the running requests.

Counted in calls, not in seconds, so that a busy machine changes nothing.
"""

import sys

import pytest
from fake_server import FakeServer

STEPS = 16


def calls_per_step(*, num_running=16, num_cached=0, num_registered=2, num_waiting=0, num_deferred=0) -> float:
    """Calls made by `schedule` and `update` in steps in which all running requests decode."""
    server = FakeServer(
        num_pages=8000,
        page_size=4,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running + 64,
        max_loras=2,
        max_queue=5000,
    )
    for number in range(num_registered):
        server.registry.register(f"adapter-{number}", None)
    for number in range(num_cached // 2):
        server.add([number % 1000, number // 1000, 3, 4, 5, 6, 7, 8], max_tokens=1)
        server.run()
    requests = [
        server.add([number % 5] * 3, max_tokens=60, adapter=f"adapter-{number % 2}")[0]
        for number in range(num_running)
    ]
    while len(server.step().decodes) < num_running:
        pass
    for number in range(num_waiting):
        server.add([1], adapter=f"adapter-{number % 2}")
    for number in range(num_deferred):
        server.add([1], adapter=f"adapter-{2 + number % (num_registered - 2)}")
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    for _ in range(STEPS):
        sys.setprofile(count)
        batch = server.scheduler.schedule()
        sys.setprofile(None)
        sampled = [(request, 1) for request in batch.decodes]
        sys.setprofile(count)
        server.scheduler.update(batch, sampled)
        sys.setprofile(None)
        assert batch.decodes == requests
    return calls / STEPS


@pytest.fixture(scope="module")
def plain():
    return calls_per_step()


@pytest.mark.parametrize(
    "more",
    [
        {"num_cached": 2000},
        {"num_registered": 1000},
        {"num_waiting": 1000},
        {"num_registered": 500, "num_deferred": 1000},
    ],
    ids=str,
)
def test_a_step_costs_the_same_whatever_is_cached_registered_or_waiting(plain, more):
    assert calls_per_step(**more) <= 1.1 * plain


def test_the_cost_is_linear_in_the_running_requests(plain):
    each = plain / 16
    assert calls_per_step(num_running=128) / 128 <= 1.2 * each
