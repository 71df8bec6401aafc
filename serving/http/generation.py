"""`/v1/completions` and `/v1/chat/completions` over an `AsyncLLM`."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from serving.async_llm import AsyncLLM
from serving.engine import Prompt
from serving.http.body import read_object
from serving.http.connection import EventStream, until_disconnect
from serving.http.requests import GenerationRequest, chat_request, completion_request
from serving.http.responses import Answer
from serving.outputs import RequestOutput


class GenerationRoutes:
    """base_name: the `model` that means no adapter."""

    def __init__(self, engine: AsyncLLM, base_name: str, max_body_bytes: int):
        self._engine, self._base_name, self._max_body_bytes = engine, base_name, max_body_bytes

    async def completions(self, request: Request) -> ASGIApp:
        asked = completion_request(await read_object(request, self._max_body_bytes))
        return await self._answer(request, asked, asked.prompts, chat=False)

    async def chat_completions(self, request: Request) -> ASGIApp:
        asked = chat_request(await read_object(request, self._max_body_bytes))
        prompt = await self._engine.render_chat(asked.messages, tools=asked.tools)
        return await self._answer(request, asked, [prompt], chat=True)

    async def _answer(
        self, request: Request, asked: GenerationRequest, prompts: Sequence[Prompt], *, chat: bool
    ) -> ASGIApp:
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        answer = Answer(answer_id, asked.model, chat=chat, stream=asked.stream)
        if asked.stream:
            events = self._events(answer, asked, prompts)
            return await until_disconnect(request.receive, EventStream.started(events))
        outputs = await until_disconnect(request.receive, self._collect(asked, prompts))
        return JSONResponse(answer.whole(outputs))

    async def _events(
        self, answer: Answer, asked: GenerationRequest, prompts: Sequence[Prompt]
    ) -> AsyncGenerator[dict[str, Any], None]:
        last: dict[int, RequestOutput] = {}
        async with contextlib.aclosing(self._merged(asked, prompts, final_only=False)) as outputs:
            async for position, output in outputs:
                if not last:
                    for event in answer.first_events(asked.params.n * len(prompts)):
                        yield event
                last[position] = output
                event = answer.event(output, position)
                if event is not None:
                    yield event
        if asked.include_usage:
            yield answer.usage_event(list(last.values()))

    async def _collect(self, asked: GenerationRequest, prompts: Sequence[Prompt]) -> list[RequestOutput]:
        """The finished output of each prompt."""
        async with contextlib.aclosing(self._merged(asked, prompts, final_only=True)) as outputs:
            finished = {position: output async for position, output in outputs}
        return [finished[position] for position in range(len(prompts))]

    async def _merged(
        self, asked: GenerationRequest, prompts: Sequence[Prompt], *, final_only: bool
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of all prompts with the prompt's number, as they come. An error of one ends all."""
        streams = [
            self._engine.generate(
                prompt,
                asked.params,
                adapter=None if asked.model == self._base_name else asked.model,
                priority=asked.priority,
                cache_salt=asked.cache_salt,
                final_only=final_only,
            )
            for prompt in prompts
        ]
        waiting = {asyncio.ensure_future(anext(s)): i for i, s in enumerate(streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    position = waiting.pop(task)
                    output = task.result()
                    if not output.finished:
                        waiting[asyncio.ensure_future(anext(streams[position]))] = position
                    yield position, output
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for stream in streams:
                await stream.aclose()
