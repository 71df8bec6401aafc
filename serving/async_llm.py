"""`AsyncLLM`: the Python API for asyncio, over the same engine and loop as `LLM`."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from lorajax.errors import EngineClosed
from lorajax.lora.source import AdapterSource
from serving.engine import PreparedRequest, Prompt
from serving.kv_events import KvEvent
from serving.llm import LLM, Messages
from serving.mailbox import EventMailbox, OutputMailbox
from serving.outputs import AdapterStatus, EngineStats, RequestOutput
from serving.sampling_params import SamplingParams

T = TypeVar("T")

MAX_UNREAD_EVENTS = 10_000
_MAX_ADAPTER_CALLS = 64
"""Loads, unloads and blends at once. An unload may wait long for its requests, so there are many."""


@dataclasses.dataclass(frozen=True)
class _Observed:
    """A receiver that shows each output to the observers first."""

    mailbox: OutputMailbox
    observers: Sequence[Callable[[RequestOutput], None]]

    def put(self, item: RequestOutput | BaseException) -> None:
        if isinstance(item, RequestOutput):
            for observer in self.observers:
                observer(item)
        self.mailbox.put(item)


class AsyncLLM:
    """As `LLM`, with the same arguments; every call is a coroutine or an asynchronous iterator.

    Building it blocks: the model is loaded and warmed up in the constructor.
    """

    def __init__(self, model: Any, **options: Any):
        self._llm = LLM(model, **options)
        self._live: dict[str, str] = {}  # the caller's request id -> the engine's
        self._observers: list[Callable[[RequestOutput], None]] = []
        # of its own, so that requests never queue behind unloads that wait for requests
        self._preparing = ThreadPoolExecutor(max_workers=2, thread_name_prefix="lorajax-prepare")
        self._adapter_calls = ThreadPoolExecutor(_MAX_ADAPTER_CALLS, thread_name_prefix="lorajax-adapters")

    @property
    def model_name(self) -> str:
        """The base model's, which no adapter can have."""
        return self._llm.model_name

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return self._llm.max_model_len

    # ---- requests ----

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        final_only: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they grow; joined, where the reader is slower than the engine.

        Nothing happens before the first step of the iterator. Closing or cancelling it aborts the request.

        request_id: the caller's, unique among live requests; it can be used again as soon as this one
            has ended. Outputs carry it.
        final_only: one output, the finished one, at less cost.
        Raises RequestRejected, AdapterNotFound, EngineClosed at the first step of the iterator.
        """
        # inside, every request has an id of its own: a late abort cannot meet a newer request
        inner = self._llm.new_request_id()
        outer = inner if request_id is None else self._llm.check_request_id(request_id, self._live)
        self._live[outer] = inner
        finished = False
        try:
            prepared = await self._prepare(
                prompt,
                sampling_params or SamplingParams(),
                adapter,
                request_id=inner,
                priority=priority,
                cache_salt=cache_salt,
                final_only=final_only,
            )
            mailbox = OutputMailbox()
            self._llm.submit_to(prepared, _Observed(mailbox, self._observers))
            while not finished:
                output = await mailbox.get()
                finished = output.finished
                if finished:
                    self._release_id(outer, inner)
                yield output.renamed(outer)
        finally:
            if not finished:
                self._llm.abort(inner)
            self._release_id(outer, inner)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator ends with an output whose finish reason is "abort".

        Unknown and finished ids are left alone.
        """
        if request_id in self._live:
            self._llm.abort(self._live[request_id])

    async def render_chat(
        self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation, ready to be answered."""
        return await asyncio.wrap_future(
            _submit(self._preparing, lambda: self._llm.render_chat(messages, tools=tools))
        )

    def _release_id(self, outer: str, inner: str) -> None:
        if self._live.get(outer) == inner:
            del self._live[outer]

    async def _prepare(self, *arguments: Any, **options: Any) -> PreparedRequest:
        future = _submit(self._preparing, lambda: self._llm.prepare(*arguments, **options))
        return await _result(future, self._llm.discard)

    # ---- adapters ----

    async def load_adapter(
        self,
        name: str,
        source: AdapterSource,
        *,
        pinned: bool = False,
        replace: bool = False,
        roots: Collection[str | Path] | None = None,
    ) -> AdapterStatus:
        """See `LLM.load_adapter`. Cancelling the call does not stop a load that has begun."""
        return await self._adapter_call(
            lambda: self._llm.load_adapter(name, source, pinned=pinned, replace=replace, roots=roots)
        )

    async def unload_adapter(self, name: str, *, timeout: int | float | None = None) -> int:
        """See `LLM.unload_adapter`. Cancelling the call does not stop an unload that has begun."""
        return await self._adapter_call(lambda: self._llm.unload_adapter(name, timeout=timeout))

    async def blend_adapters(self, name: str, weights: Mapping[str, int | float]) -> AdapterStatus:
        return await self._adapter_call(lambda: self._llm.blend_adapters(name, weights))

    async def adapters(self) -> list[AdapterStatus]:
        return await asyncio.to_thread(self._llm.adapters)

    async def _adapter_call(self, call: Callable[[], T]) -> T:
        return await asyncio.wrap_future(_submit(self._adapter_calls, call))

    # ---- engine ----

    async def stats(self) -> EngineStats:
        return await asyncio.to_thread(self._llm.stats)

    def check_health(self) -> None:
        """Raises EngineClosed, with the cause, if the engine no longer serves."""
        self._llm.check_health()

    async def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        """Events of the prefix cache as they happen, several at once where many came; an empty list
        first, when nothing can be missed any more.

        Needs `kv_events=True`. Raises QueueFull when more than 10,000 are unread.
        """
        mailbox = EventMailbox(MAX_UNREAD_EVENTS)
        subscription = _submit(self._preparing, lambda: self._llm.subscribe_kv_events(mailbox.put))
        unsubscribe = await _result(subscription, lambda unsubscribe: unsubscribe())
        try:
            yield []
            while True:
                yield await mailbox.get()
        finally:
            unsubscribe()

    def observe(self, observer: Callable[[RequestOutput], None]) -> None:
        """Call `observer` with every output of every request, on the engine's thread: for metrics.

        It must be quick, and must not raise.
        """
        self._observers.append(observer)

    async def close(self) -> None:
        """Abort what runs and free the device. Later calls raise EngineClosed."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._llm.stop()  # ends all requests, hence the unloads that wait for them
        self._adapter_calls.shutdown()
        self._preparing.shutdown()
        self._llm.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def _submit(executor: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    try:
        return executor.submit(call)
    except RuntimeError:  # shut down
        raise EngineClosed("the engine is closed") from None


async def _result(future: Future[T], undo: Callable[[T], object]) -> T:
    """What a thread returns. Cancelled meanwhile, it is undone as soon as it is there."""

    def undo_result(done: Future[T]) -> None:
        if not done.cancelled() and done.exception() is None:
            undo(done.result())

    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(undo_result)
        raise
