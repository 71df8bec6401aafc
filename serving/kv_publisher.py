"""Publishes KV events over ZeroMQ, in the msgpack form that consumers of vLLM's events read.

A message has three frames: topic, sequence number (8 bytes, big-endian, from 0, without gaps), payload. The
payload is `[timestamp, [event, …], data_parallel_rank]`; an event is an array whose first element is its
name:

    ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name]
    ["BlockRemoved", block_hashes, medium]
    ["AllBlocksCleared"]

Hashes are 16 bytes. The base model's `lora_id` and `lora_name` are nil. A subscriber that missed
messages asks the replay socket (ROUTER) with the first sequence number it lacks; it gets one message
[sequence number, payload] each, and at the end the number -1 with an empty payload.
"""

import collections
import queue
import threading
import time

import msgpack
import zmq

from serving.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

MEDIUM = "GPU"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_POLL_SECONDS = 0.05


def wire_form(event: KvEvent) -> list:
    """The array that stands for an event."""
    match event:
        case BlockStored():
            return [
                "BlockStored",
                list(event.block_hashes),
                event.parent_block_hash,
                list(event.token_ids),
                event.block_size,
                event.adapter_id or None,
                MEDIUM,
                event.adapter_name,
            ]
        case BlockRemoved():
            return ["BlockRemoved", list(event.block_hashes), MEDIUM]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]


class KvEventPublisher:
    """Sends events from a thread of its own; `publish` only queues, so a step never waits for a socket.

    endpoint: where subscribers connect, e.g. "tcp://127.0.0.1:5557". replay_endpoint: for those that
    missed messages. num_kept: messages that can be replayed. max_queue: events that may wait; beyond it
    the publisher is too slow for the engine, and `publish` raises.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        num_kept: int = 10_000,
        max_queue: int = 100_000,
    ):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.bind(endpoint)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._replay = None
        if replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.bind(replay_endpoint)
            self.replay_endpoint: str = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self._topic = topic.encode()
        self._waiting: queue.Queue[KvEvent | None] = queue.Queue(max_queue)
        self._sent: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=num_kept)
        self._thread = threading.Thread(target=self._run, name="lorajax-kv-events", daemon=True)
        self._thread.start()

    def publish(self, event: KvEvent) -> None:
        """Queue an event: the callback for `subscribe_kv_events`. Raises queue.Full."""
        self._waiting.put_nowait(event)

    def close(self) -> None:
        """Send what waits, and end."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()
            self._context.destroy(linger=1000)

    def _run(self) -> None:
        number = 0
        while True:
            self._answer_replay()
            events = self._take()
            open_ = None not in events
            batch = [wire_form(event) for event in events if event is not None]
            if batch:
                payload = msgpack.Packer().pack([time.time(), batch, 0])
                self._socket.send_multipart([self._topic, number.to_bytes(8, "big"), payload])
                self._sent.append((number, payload))
                number += 1
            if not open_:
                return

    def _take(self) -> list[KvEvent | None]:
        """All events that wait; none if none comes for a while."""
        try:
            events = [self._waiting.get(timeout=_POLL_SECONDS)]
        except queue.Empty:
            return []
        while not self._waiting.empty():
            events.append(self._waiting.get())
        return events

    def _answer_replay(self) -> None:
        while self._replay is not None and self._replay.poll(0):
            client, *_, first = self._replay.recv_multipart()
            for number, payload in self._sent:
                if number >= int.from_bytes(first, "big"):
                    self._replay.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
            self._replay.send_multipart([client, b"", END_OF_REPLAY, b""])
