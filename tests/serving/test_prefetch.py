"""Adapters of waiting requests come to the device ahead of them, where nobody loses by it."""

from fake_server import FakeServer


def make_server(**limits):
    """A server with the adapters "1", "2" and "3", whose ids are these numbers."""
    server = FakeServer(**limits)
    for number in (1, 2, 3):
        assert server.registry.register(str(number), None).adapter_id == number
    return server


def written(batch):
    return [write.adapter_id for write in batch.slot_writes]


def test_the_next_adapter_in_line_is_written_while_its_request_waits_for_a_seat():
    server = make_server(max_num_seqs=1, max_loras=2)
    server.add([1, 2, 3], max_tokens=4)
    (waiting,) = server.add([1, 2, 3], max_tokens=2, adapter="1")
    assert written(server.step()) == [1]
    while not waiting.output_token_ids:
        assert written(server.step()) == []
    server.run()
    server.check_idle()


def test_a_prefetch_takes_no_slot_that_someone_waits_for():
    server = make_server(max_num_seqs=1, max_loras=2)
    for adapter in "12":
        server.add([1], max_tokens=1, adapter=adapter)
    server.run()
    server.add([5], max_tokens=4)
    for adapter in "312":  # both residents have requests in the queue
        server.add([1], max_tokens=1, adapter=adapter)
    assert written(server.step()) == []


def test_a_prefetch_evicts_an_adapter_that_nobody_waits_for():
    server = make_server(max_num_seqs=1, max_loras=2)
    for adapter in "12":
        server.add([1], max_tokens=1, adapter=adapter)
    server.run()
    server.add([5], max_tokens=4)
    for adapter in "32":
        server.add([1], max_tokens=1, adapter=adapter)
    assert written(server.step()) == [3]
    assert server.scheduler.slots.resident == {2, 3}


def test_a_running_adapter_is_never_evicted_by_a_prefetch():
    server = make_server(max_num_seqs=1, max_loras=1)
    server.add([1], max_tokens=5, adapter="1")
    server.add([1], max_tokens=1, adapter="2")
    for _ in range(4):
        assert 2 not in written(server.step())
    server.run()
    server.check_idle()
