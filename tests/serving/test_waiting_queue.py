"""The waiting requests: one order over all, a line for each adapter."""

from hypothesis import given
from hypothesis import strategies as st

from serving.request import Request, order_of
from serving.sampling_params import SamplingParams
from serving.waiting_queue import WaitingQueue

PARAMS = SamplingParams()


def make(arrival: int, adapter_id: int, priority: int) -> Request:
    return Request(
        request_id=str(arrival),
        prompt_token_ids=[1],
        params=PARAMS,
        arrival=arrival,
        adapter_id=adapter_id,
        priority=priority,
    )


@given(
    kinds=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=20),
    data=st.data(),
)
def test_it_is_a_sorted_list_with_lines(kinds, data):
    queue = WaitingQueue()
    requests = [make(arrival, *kind) for arrival, kind in enumerate(kinds)]
    for request in data.draw(st.permutations(requests)):
        queue.add(request)
        queue.check_invariants()
    for gone in data.draw(st.permutations(requests)):
        assert list(queue) == sorted(requests, key=order_of)
        assert len(queue) == len(requests)
        for adapter_id in range(4):
            line = [r for r in sorted(requests, key=order_of) if r.adapter_id == adapter_id]
            assert queue.head(adapter_id) is (line[0] if line else None)
        assert [head for _, head in queue.heads] == sorted(
            filter(None, map(queue.head, range(4))), key=order_of
        )
        queue.remove(gone)
        requests.remove(gone)
        queue.check_invariants()
    assert len(queue) == 0
