"""Requests that wait to start, in the order of priority, then arrival; a line for each adapter.

Invariant: `heads` has the first request of every line that is not empty, in order. So the scheduler finds who
may start by looking at a few lines, however many requests wait.
"""

import bisect
import heapq
from collections.abc import Iterator, Sequence

from serving.request import Order, Request, order_of


class WaitingQueue:
    """Lines of waiting requests, one for each adapter_id (0: the base model's)."""

    def __init__(self) -> None:
        self._lines: dict[int, list[Request]] = {}
        self._heads: list[tuple[Order, Request]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        return iter(heapq.merge(*self._lines.values(), key=order_of))

    @property
    def heads(self) -> Sequence[tuple[Order, Request]]:
        """The first request of each line with its place in the order; read it before the next change."""
        return self._heads

    def head(self, adapter_id: int) -> Request | None:
        """The first request of an adapter's line."""
        line = self._lines.get(adapter_id)
        return line[0] if line else None

    def add(self, request: Request) -> None:
        line = self._lines.setdefault(request.adapter_id, [])
        position = bisect.bisect(line, order_of(request), key=order_of)
        if position == 0:
            if line:
                self._remove_head(line[0])
            bisect.insort(self._heads, (order_of(request), request))
        line.insert(position, request)
        self._length += 1

    def remove(self, request: Request) -> None:
        """The request must be in the queue."""
        line = self._lines[request.adapter_id]
        position = bisect.bisect_left(line, order_of(request), key=order_of)
        assert line[position] is request
        del line[position]
        if position == 0:
            self._remove_head(request)
            if line:
                bisect.insort(self._heads, (order_of(line[0]), line[0]))
            else:
                del self._lines[request.adapter_id]
        self._length -= 1

    def _remove_head(self, request: Request) -> None:
        position = bisect.bisect_left(self._heads, order_of(request), key=lambda head: head[0])
        assert self._heads[position][1] is request
        del self._heads[position]

    def check_invariants(self) -> None:
        lines = self._lines
        assert all(line and line == sorted(line, key=order_of) for line in lines.values())
        assert all(r.adapter_id == adapter for adapter, line in lines.items() for r in line)
        assert [r for _, r in self._heads] == sorted((line[0] for line in lines.values()), key=order_of)
        assert self._length == sum(map(len, lines.values()))
