"""Events on the wire: what a subscriber of vLLM's KV events expects."""

import msgpack
import zmq

from serving.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from serving.kv_publisher import END_OF_REPLAY, KvEventPublisher

STORED = BlockStored(
    block_hashes=(b"h" * 16,),
    parent_block_hash=None,
    token_ids=(1, 2, 3, 4),
    block_size=4,
    adapter_id=7,
    adapter_name="caps",
)
BASE = BlockStored(
    block_hashes=(b"b" * 16,),
    parent_block_hash=b"h" * 16,
    token_ids=(5, 6, 7, 8),
    block_size=4,
    adapter_id=0,
    adapter_name=None,
)
EVENTS = [STORED, BASE, BlockRemoved(block_hashes=(b"h" * 16,)), AllBlocksCleared()]
WIRE = [
    ["BlockStored", [b"h" * 16], None, [1, 2, 3, 4], 4, 7, "GPU", "caps"],
    ["BlockStored", [b"b" * 16], b"h" * 16, [5, 6, 7, 8], 4, None, "GPU", None],
    ["BlockRemoved", [b"h" * 16], "GPU"],
    ["AllBlocksCleared"],
]


def subscriber(context, endpoint, topic=b""):
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, topic)
    socket.setsockopt(zmq.RCVTIMEO, 1000)
    socket.connect(endpoint)
    return socket


def replayed(context, publisher, first):
    """Messages from number `first` on, as the replay socket gives them."""
    messages = []
    with context.socket(zmq.DEALER) as request:
        request.setsockopt(zmq.RCVTIMEO, 5000)
        request.connect(publisher.replay_endpoint)
        request.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            _, sequence, payload = request.recv_multipart()
            if sequence == END_OF_REPLAY:
                assert payload == b""
                return messages
            messages.append((int.from_bytes(sequence, "big"), payload))


def test_messages_in_order_and_replay_of_missed_ones():
    context = zmq.Context()
    publisher = KvEventPublisher("tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topic="kv-events")
    socket = subscriber(context, publisher.endpoint, b"kv-events")
    for event in EVENTS:
        publisher.publish(event)
    received, number = [], 0
    while len(received) < len(EVENTS):
        try:
            topic, sequence, payload = socket.recv_multipart()
            assert topic == b"kv-events"
            messages = [(int.from_bytes(sequence, "big"), payload)]
        except zmq.Again:
            messages = []
        if not messages or messages[0][0] > number:  # it connected too late for the first ones
            messages = replayed(context, publisher, number)
        for found, payload in messages:
            if found < number:
                continue
            assert found == number
            number += 1
            timestamp, events, rank = msgpack.unpackb(payload)
            assert isinstance(timestamp, float)
            assert rank == 0
            received += events
    assert received == WIRE
    assert [found for found, _ in replayed(context, publisher, 0)] == list(range(number))
    assert replayed(context, publisher, number) == []
    publisher.close()
    publisher.close()
    context.destroy(linger=0)
