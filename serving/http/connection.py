"""Work that ends with its client: whoever hangs up aborts what he asked for."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from serving.http.errors import error_body

T = TypeVar("T")

logger = logging.getLogger("lorajax.http")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up; raises ClientDisconnect then."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of server-sent events, each a JSON object; it ends with `[DONE]`.

    The generator is closed in every case. One that fails after the first event ends with an event that
    holds the error; before, the error is a response of its own (see `started`).
    """

    def __init__(self, first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None]):
        self._first, self._rest = first, rest

    @classmethod
    async def started(cls, events: AsyncGenerator[dict[str, Any], None]) -> "EventStream":
        """A stream whose first event is there. Raises what the generator raises before it."""
        return cls(await anext(events), events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._rest):
            with contextlib.suppress(ClientDisconnect):
                await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, json.dumps(self._first))
        try:
            async for event in self._rest:
                await self._send(send, json.dumps(event))
        except Exception as error:
            logger.exception("a stream failed")
            await self._send(send, json.dumps(error_body(error).as_json()))
        await self._send(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _send(send: Send, data: str) -> None:
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
