"""Which adapters have a place among the running ones, and whose turn it is when more want one.

An adapter *has a place* while requests of it run: it counts towards `max_loras` and holds a slot. The base
model (adapter 0) needs none. Whoever may start is started in the order of priority, then arrival; an adapter
without a place is passed over, and those behind it go on.

So that nobody is passed over for ever: the first `max_loras` adapters in line for a place become *overdue*
after `patience` steps. For each overdue adapter, the adapter that has had its place longest must leave: it
starts no request that comes after the first overdue one, until its last running request gives the place away.
While nobody is overdue, admission is plainly greedy.

Bound. Let C = prefill_block * ((max_num_batched_tokens - max_num_seqs) // prefill_block), the prompt tokens
that every step can compute, and

    R = max_model_len + ceil(max_model_len / C)

the steps in which all running requests end: one prompt at most is unfinished, and all others decode in
every step. A request that has F live requests before it in the order of priority and arrival starts within

    (F + 1) * (patience + 3 * R)    steps,

whatever comes after it. For the first in the order (F = 0): it is overdue after `patience` steps; the
adapter that leaves for it starts nothing more, since everything comes after the first, and gives up its
place within R steps; if pages, seats or prompt tokens are short then, nobody else is started, and within
another R steps all that runs has ended. Once started it is never preempted, and ends within a third R.
Then the next one is first. This is the worst case, in which each request needs the whole page pool. Where
seats and pages suffice and all that came before it has started, it starts within patience + R steps.
"""

from collections.abc import Iterator

from serving.adapter_slots import AdapterSlots, SlotWrite
from serving.request import Order, Request, order_of
from serving.waiting_queue import WaitingQueue

PATIENCE = 64
"""Steps for which running adapters may go on while others wait: about the length of an answer."""


class AdapterTurns:
    """Places of adapters. max_places: at most so many at once; 0: as many as there are slots."""

    def __init__(self, slots: AdapterSlots, *, max_places: int, patience: int = PATIENCE):
        self._slots, self._patience = slots, patience
        self._max_places = max_places or slots.num_slots
        self._num_running: dict[int, int] = {}  # adapters with a place, the first to leave first
        self._step = 0
        self._in_line_since: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._overdue: Order | None = None

    @property
    def placed(self) -> dict[int, int]:
        """Adapters that have a place, with how many of their requests run."""
        return dict(self._num_running)

    @property
    def leaving(self) -> set[int]:
        """Adapters that start no request behind the first overdue one."""
        return set(self._leaving)

    def next_step(self, waiting: WaitingQueue) -> None:
        """Begin a step: see who stands in line for a place, and who must leave for those overdue."""
        self._step += 1
        self._leaving.clear()
        self._overdue = None
        if len(waiting.heads) == 0 or self._can_enter():
            self._in_line_since.clear()
            return
        since = self._in_line_since
        line = list(self._line(waiting))
        self._in_line_since = {r.adapter_id: since.get(r.adapter_id, self._step) for r in line}
        overdue = [r for r in line if self._in_line_since[r.adapter_id] + self._patience <= self._step]
        if overdue:
            self._overdue = order_of(overdue[0])
            evictable = [a for a in self._num_running if self._slots.is_evictable(a)]
            self._leaving.update(evictable[: len(overdue)])

    def first_to_start(self, waiting: WaitingQueue) -> Request | None:
        """The first waiting request, in order, that needs no place, has one or can have one."""
        heads = [waiting.head(0)]
        heads += [self._acceptable(waiting.head(adapter_id)) for adapter_id in self._num_running]
        if len(self._num_running) < self._max_places:
            heads += map(waiting.head, self._slots.idle)
            if self._slots.can_take:
                heads.append(next(self._line(waiting), None))
        return min((head for head in heads if head is not None), key=order_of, default=None)

    def start(self, request: Request) -> SlotWrite | None:
        """Count a request that starts, and give it its adapter's slot."""
        adapter_id = request.adapter_id
        if not adapter_id:
            return None
        request.slot, write = self._slots.pin(adapter_id)
        num_running = self._num_running.get(adapter_id, 0)
        if adapter_id in self._leaving:
            # it still had a request before the overdue one: let another leave first
            self._leaving.remove(adapter_id)
            del self._num_running[adapter_id]
        self._num_running[adapter_id] = num_running + 1
        return write

    def prefetch(self, waiting: WaitingQueue) -> SlotWrite | None:
        """Bring the next adapter in line to the device ahead of its requests, if nobody loses by it."""
        if not self._slots.can_take:
            return None
        head = next((r for r in self._line(waiting) if not self._slots.is_resident(r.adapter_id)), None)
        evicted = self._slots.next_evicted
        if head is None or (evicted is not None and waiting.head(evicted) is not None):
            return None
        return self._slots.prefetch(head.adapter_id)

    def stop(self, request: Request) -> None:
        """A running request ended, or was preempted."""
        adapter_id = request.adapter_id
        if not adapter_id:
            return
        request.slot = 0
        self._slots.unpin(adapter_id)
        self._num_running[adapter_id] -= 1
        if not self._num_running[adapter_id]:
            del self._num_running[adapter_id]

    def _can_enter(self) -> bool:
        """Whether an adapter that is not resident could have a place now."""
        return len(self._num_running) < self._max_places and self._slots.can_take

    def _acceptable(self, head: Request | None) -> Request | None:
        """The head of a placed adapter's line, unless the adapter leaves for one that comes before it."""
        if head is not None and self._overdue is not None and head.adapter_id in self._leaving:
            return head if order_of(head) < self._overdue else None
        return head

    def _line(self, waiting: WaitingQueue) -> Iterator[Request]:
        """The first requests of adapters that lack a place, as many as there are places."""
        residents_enter = len(self._num_running) < self._max_places
        num_places = self._max_places
        for _, head in waiting.heads:
            adapter_id = head.adapter_id
            if not adapter_id or adapter_id in self._num_running:
                continue
            if residents_enter and self._slots.is_resident(adapter_id):
                continue
            yield head
            num_places -= 1
            if not num_places:
                return
