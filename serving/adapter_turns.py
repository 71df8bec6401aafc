"""Whose turn it is when more adapters want to run than `max_loras` allows.

A request that is passed over because its adapter has no place is *deferred*. While others keep coming
for the adapters that run, it could wait for ever; so after PATIENCE steps it is *overdue*, and for every
overdue adapter the adapter that has run longest must leave: it takes no new requests, and its place goes to
the overdue one. Without overdue requests nobody leaves, and admission is plain greedy.

Bound. Let R be the most steps that a started request can need to end, and k the number of distinct
adapters of the same or a more urgent priority whose requests were deferred before. A deferred request starts within

    PATIENCE + (k // max_loras + 2) * R    steps,

whatever arrives behind it: at PATIENCE it is overdue; adapters leave in their order of entry, so each
of the max_loras places is freed within R steps and given to the overdue adapters in order of arrival, max_loras
of them per R steps; and a seat (max_num_seqs) is free within another R steps, for which the request comes
first. More urgent priorities go before, as they must.
"""

from collections.abc import Collection

from serving.request import Request

PATIENCE = 32
"""Steps for which a deferred request lets the running adapters go on: about the length of a short answer."""


class AdapterTurns:
    """Decides which running adapters take no new requests."""

    def __init__(self) -> None:
        self._step = 0
        self._entered: dict[int, int] = {}  # running adapter -> step of its entry, in that order
        self._leaving: set[int] = set()
        self._overdue: list[int] = []
        self._num_deferred = 0

    def next_step(self, waiting: Collection[Request], num_free_places: int) -> None:
        """Begin a step: find overdue adapters, and choose as many running ones to leave."""
        self._step += 1
        self._leaving.clear()
        self._overdue = []
        if not self._num_deferred:
            return
        deferred = [r for r in waiting if r.first_deferred_step is not None]
        self._num_deferred = len(deferred)
        for request in deferred:
            due = request.first_deferred_step + PATIENCE <= self._step
            if due and request.adapter_id not in self._entered and request.adapter_id not in self._overdue:
                self._overdue.append(request.adapter_id)
        short = len(self._overdue) - num_free_places
        self._leaving.update(list(self._entered)[: max(short, 0)])

    def defer(self, request: Request) -> None:
        """The request was passed over for want of a place."""
        if request.first_deferred_step is None:
            request.first_deferred_step = self._step
            self._num_deferred += 1

    def is_leaving(self, adapter_id: int) -> bool:
        return adapter_id in self._leaving

    def may_enter(self, request: Request, num_free_places: int) -> bool:
        """Whether a free place is this request's: overdue adapters come first."""
        ahead = [a for a in self._overdue if a != request.adapter_id]
        if request.adapter_id in self._overdue:
            ahead = self._overdue[: self._overdue.index(request.adapter_id)]
        return len(ahead) < num_free_places

    def entered(self, adapter_id: int) -> None:
        """The first request of the adapter started."""
        self._entered[adapter_id] = self._step
        if adapter_id in self._overdue:
            self._overdue.remove(adapter_id)

    def left(self, adapter_id: int) -> None:
        """The last running request of the adapter ended."""
        self._entered.pop(adapter_id, None)
