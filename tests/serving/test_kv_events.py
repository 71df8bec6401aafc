"""Events of the prefix cache: who hears them, and what a replay of them gives."""

import logging

import pytest
from fake_server import FakeServer

from serving.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventStream, replay

CLEARED = AllBlocksCleared()


def test_every_subscriber_hears_every_event_until_it_leaves():
    stream, one, other = KvEventStream(), [], []
    assert not stream.wanted
    leave = stream.subscribe(one.append)
    stream.subscribe(other.append)
    stream.publish(CLEARED)
    leave()
    leave()
    stream.publish(CLEARED)
    assert (len(one), len(other)) == (1, 2)
    assert stream.wanted


def test_a_failing_subscriber_is_dropped_and_harms_nobody(caplog):
    stream, heard = KvEventStream(), []

    def fail(event):
        raise RuntimeError("broken listener")

    stream.subscribe(fail)
    stream.subscribe(heard.append)
    with caplog.at_level(logging.ERROR):
        stream.publish(CLEARED)
        stream.publish(CLEARED)
    assert heard == [CLEARED] * 2
    assert len(caplog.records) == 1
    assert "broken listener" in caplog.text


def serve(server: FakeServer, *adapters: str | None) -> None:
    for adapter in adapters:
        server.add([1, 2, 3, 4, 5, 6, 1, 2, 3], max_tokens=6, adapter=adapter)
        server.run()


def test_stored_events_say_what_a_consumer_needs():
    server = FakeServer(page_size=4)
    adapter_id = server.registry.register("caps", None).adapter_id
    (request,) = server.add([1, 2, 3, 4, 5, 6, 1, 2, 3], max_tokens=6, adapter="caps")
    server.run()
    first, second, third = server.events
    tokens = (request.prompt_token_ids + request.output_token_ids)[:12]
    assert (*first.token_ids, *second.token_ids, *third.token_ids) == tuple(tokens)
    parents = [first.parent_block_hash, second.parent_block_hash, third.parent_block_hash]
    assert parents == [None, *first.block_hashes, *second.block_hashes]
    for event in server.events:
        assert (event.block_size, event.adapter_id, event.adapter_name) == (4, adapter_id, "caps")


def test_base_streams_are_the_same_with_lora_on_and_off():
    off, on = FakeServer(max_loras=0, num_slots=0), FakeServer(max_loras=2)
    on.registry.register("caps", None)
    serve(off, None, None)
    serve(on, None, "caps", None)
    assert [event for event in on.events if event.adapter_id == 0] == off.events


def test_an_adapter_that_goes_takes_its_blocks_along():
    server = FakeServer()
    server.registry.register("caps", None)
    serve(server, None, "caps")
    server.events.append("unload")
    server.registry.start_draining("caps")
    server.collect_drained()
    before, (removed,) = server.events[: server.events.index("unload")], server.events[-1:]
    server.events.remove("unload")
    assert isinstance(removed, BlockRemoved)
    of_adapter = [e.block_hashes for e in before if isinstance(e, BlockStored) and e.adapter_id]
    assert sorted(removed.block_hashes) == sorted(hash for hashes in of_adapter for hash in hashes)
    server.check()


@pytest.mark.parametrize("events", [[], [CLEARED]])
def test_a_replay_of_nothing_is_empty(events):
    assert replay(events) == set()
