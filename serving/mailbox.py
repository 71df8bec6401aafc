"""From the engine's thread to a reader on an event loop.

Invariant: what waits for a reader never grows. A request's outputs are joined into one; events, which
cannot be joined, are kept up to a limit, and a reader who falls behind it is told so.
"""

import asyncio
import collections
import contextlib
import threading

from lorajax.errors import QueueFull
from serving.kv_events import KvEvent
from serving.outputs import RequestOutput


class _Bell:
    """Wakes one coroutine from another thread; rings that nobody has answered yet are one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody reads
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()


class OutputMailbox:
    """The newest output of a request. A reader who is slow gets what came meanwhile as one output."""

    def __init__(self) -> None:
        self._bell = _Bell()
        self._lock = threading.Lock()
        self._item: RequestOutput | BaseException | None = None

    def put(self, item: RequestOutput | BaseException) -> None:
        """Called on the engine's thread."""
        with self._lock:
            unread, joined = self._item, item
            if isinstance(unread, RequestOutput) and isinstance(item, RequestOutput):
                joined = item.following(unread)
            self._item = joined
        if unread is None:
            self._bell.ring()

    async def get(self) -> RequestOutput:
        """The next output; raises the error that ended the request."""
        await self._bell.wait()
        with self._lock:
            item, self._item = self._item, None
        assert item is not None
        if isinstance(item, BaseException):
            raise item
        return item


class EventMailbox:
    """Events of the prefix cache in their order, at most `max_events` of them unread."""

    def __init__(self, max_events: int):
        self._max = max_events
        self._bell = _Bell()
        self._lock = threading.Lock()
        self._events: collections.deque[KvEvent] = collections.deque()
        self._fell_behind = False

    def put(self, event: KvEvent) -> None:
        """Called on the engine's thread."""
        with self._lock:
            first = not self._events
            self._fell_behind = self._fell_behind or len(self._events) >= self._max
            if not self._fell_behind:
                self._events.append(event)
        if first:
            self._bell.ring()

    async def get(self) -> list[KvEvent]:
        """All unread events. Raises QueueFull once some were lost: they must be read faster."""
        await self._bell.wait()
        with self._lock:
            events, fell_behind = list(self._events), self._fell_behind
            self._events.clear()
        if fell_behind:
            raise QueueFull(f"the reader of events fell behind; allowed: {self._max} unread events")
        return events
