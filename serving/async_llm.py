"""`AsyncLLM`: the Python API for asyncio, over the same engine and loop as `LLM`."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from lorajax.lora.source import AdapterSource
from serving.engine import Prompt
from serving.llm import LLM
from serving.outputs import AdapterStatus, EngineStats, RequestOutput
from serving.sampling_params import SamplingParams


class _Mailbox:
    """The newest output of a request, for a consumer on an event loop.

    A slow consumer gets the outputs that came meanwhile as one, their deltas joined: what waits for it
    never grows with the number of outputs.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._item: RequestOutput | BaseException | None = None

    def put(self, item: RequestOutput | BaseException) -> None:
        """Called on the engine's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take_in, item)

    def _take_in(self, item: RequestOutput | BaseException) -> None:
        waiting = self._item
        if isinstance(waiting, RequestOutput) and isinstance(item, RequestOutput):
            item = item.following(waiting)
        self._item = item
        self._arrived.set()

    async def get(self) -> RequestOutput:
        await self._arrived.wait()
        self._arrived.clear()
        item, self._item = self._item, None
        assert item is not None
        if isinstance(item, BaseException):
            raise item
        return item


class AsyncLLM:
    """As `LLM`, with the same arguments; every call is a coroutine or an asynchronous iterator.

    Building it blocks: the model is loaded and warmed up in the constructor.
    """

    def __init__(self, model: Any, **options: Any):
        self._llm = LLM(model, **options)
        self._live: dict[str, str] = {}  # the caller's request id -> the engine's

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they grow. Closing or cancelling the iterator aborts the request.

        request_id: the caller's, unique among live requests; it can be used again as soon as this one
            has ended. Outputs carry it.
        Raises RequestRejected, AdapterNotFound, EngineClosed at the first step of the iterator.
        """
        params = sampling_params or SamplingParams()
        # inside, every request has an id of its own: a late abort cannot meet a newer request
        inner = self._llm.new_request_id()
        outer = inner if request_id is None else self._llm.check_request_id(request_id, self._live)
        self._live[outer] = inner
        try:
            prepared = await asyncio.to_thread(
                self._llm.prepare,
                prompt,
                params,
                adapter,
                request_id=inner,
                priority=priority,
                cache_salt=cache_salt,
            )
            mailbox = _Mailbox()
            self._llm.submit_to(prepared, mailbox)
            finished = False
            while not finished:
                output = await mailbox.get()
                finished = output.finished
                yield output.renamed(outer)
        finally:
            self._llm.abort(inner)
            if self._live.get(outer) == inner:
                del self._live[outer]

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator ends with an output whose finish reason is "abort".

        Unknown and finished ids are left alone.
        """
        if request_id in self._live:
            self._llm.abort(self._live[request_id])

    async def load_adapter(
        self, name: str, source: AdapterSource, *, pinned: bool = False, replace: bool = False
    ) -> AdapterStatus:
        return await asyncio.to_thread(self._llm.load_adapter, name, source, pinned=pinned, replace=replace)

    async def unload_adapter(self, name: str, *, timeout: int | float | None = None) -> int:
        return await asyncio.to_thread(self._llm.unload_adapter, name, timeout=timeout)

    async def blend_adapters(self, name: str, weights: Mapping[str, int | float]) -> AdapterStatus:
        return await asyncio.to_thread(self._llm.blend_adapters, name, weights)

    async def adapters(self) -> list[AdapterStatus]:
        return await asyncio.to_thread(self._llm.adapters)

    async def stats(self) -> EngineStats:
        return await asyncio.to_thread(self._llm.stats)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready to be answered."""
        return self._llm.render_chat(messages)

    async def close(self) -> None:
        """Abort what runs and free the device."""
        await asyncio.to_thread(self._llm.close)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
