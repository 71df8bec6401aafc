"""The three services of `lorajax.proto` over an `AsyncLLM`.

Invariant: however a call ends (answered, refused, cancelled, expired, its client gone), its request leaves
the engine: each handler holds the engine's iterator, and closes it.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from serving.adapter_roots import AdapterRoots
from serving.async_llm import AsyncLLM
from serving.outputs import RequestOutput
from serving.rpc import lorajax_pb2 as pb
from serving.rpc import lorajax_pb2_grpc as pb_grpc
from serving.rpc.errors import errors_mapped
from serving.rpc.messages import (
    ChunkWriter,
    to_event,
    to_prompt,
    to_response,
    to_sampling_params,
    to_stats,
    to_status,
)

Context = grpc.aio.ServicerContext[Any, Any]


def _generation(
    engine: AsyncLLM, request: pb.GenerateRequest, *, final_only: bool
) -> contextlib.aclosing[AsyncGenerator[RequestOutput, None]]:
    return contextlib.aclosing(
        engine.generate(
            to_prompt(request, "text", "token_ids"),
            to_sampling_params(request.sampling_params),
            adapter=request.adapter or None,
            request_id=request.request_id or None,
            priority=request.priority,
            cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
            final_only=final_only,
        )
    )


class GenerationServicer(pb_grpc.GenerationServicer):
    """max_message_bytes: of a response."""

    def __init__(self, engine: AsyncLLM, max_message_bytes: int):
        self._engine, self._max_bytes = engine, max_message_bytes

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        response = pb.GenerateResponse()
        async with (
            errors_mapped(context),
            _generation(self._engine, request, final_only=True) as outputs,
        ):
            async for output in outputs:
                response = to_response(output)
            await self._check_size(response.ByteSize(), context)
        return response

    async def GenerateStream(self, request: pb.GenerateRequest, context: Context) -> None:
        writer = ChunkWriter()
        async with (
            errors_mapped(context),
            _generation(self._engine, request, final_only=False) as outputs,
        ):
            async for output in outputs:
                for chunk in writer.chunks(output):
                    await context.write(chunk)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        score = getattr(self._engine, "score", None)
        if score is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this engine does not score completions")
        response = pb.ScoreResponse()
        async with errors_mapped(context):
            prompt = to_prompt(request, "prompt_text", "prompt_token_ids")
            completion = to_prompt(request, "completion_text", "completion_token_ids")
            (scored,) = await score([prompt], [completion], adapter=request.adapter or None)
            response = pb.ScoreResponse(
                token_ids=scored.token_ids,
                logprobs=scored.logprobs,
                cumulative_logprob=scored.cumulative_logprob,
                adapter=request.adapter,
            )
            await self._check_size(response.ByteSize(), context)
        return response

    async def _check_size(self, num_bytes: int, context: Context) -> None:
        if num_bytes > self._max_bytes:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the response has {num_bytes} bytes; allowed: {self._max_bytes}. GenerateStream sends it "
                "in parts",
            )


class AdaptersServicer(pb_grpc.AdaptersServicer):
    """roots: where adapters may be loaded from."""

    def __init__(self, engine: AsyncLLM, roots: AdapterRoots):
        self._engine, self._roots = engine, roots

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        response = pb.LoadAdapterResponse()
        async with errors_mapped(context):
            status = await self._engine.load_adapter(
                request.name,
                self._roots.resolve(request.source),
                pinned=request.pinned,
                replace=request.replace,
                roots=self._roots.folders,
            )
            response = pb.LoadAdapterResponse(adapter=to_status(self._roots.shown(status)))
        return response

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterResponse:
        response = pb.UnloadAdapterResponse()
        async with errors_mapped(context):
            # without a timeout, none that outlasts the caller: an unload that he gave up would go on
            timeout = request.timeout if request.HasField("timeout") else context.time_remaining()
            num_waited_for = await self._engine.unload_adapter(request.name, timeout=timeout)
            response = pb.UnloadAdapterResponse(num_waited_for=num_waited_for)
        return response

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: Context
    ) -> pb.ListAdaptersResponse:
        response = pb.ListAdaptersResponse()
        async with errors_mapped(context):
            statuses = await self._engine.adapters()
            response = pb.ListAdaptersResponse(
                adapters=[to_status(self._roots.shown(status)) for status in statuses]
            )
        return response


class EngineServicer(pb_grpc.EngineServicer):
    """draining: set when the server stops; it ends the streams that would never end by themselves."""

    def __init__(self, engine: AsyncLLM, draining: asyncio.Event):
        self._engine, self._draining = engine, draining

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.EngineStats:
        response = pb.EngineStats()
        async with errors_mapped(context):
            response = to_stats(await self._engine.stats())
        return response

    async def SubscribeKvEvents(self, request: pb.SubscribeKvEventsRequest, context: Context) -> None:
        async with errors_mapped(context):
            sending = asyncio.create_task(self._send_events(context))
            stopping = asyncio.create_task(self._draining.wait())
            try:
                await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    await sending  # it only ends by an error
            finally:
                for task in (sending, stopping):
                    task.cancel()
                await asyncio.gather(sending, stopping, return_exceptions=True)

    async def _send_events(self, context: Context) -> None:
        async with contextlib.aclosing(self._engine.kv_events()) as batches:
            await anext(batches)
            await context.send_initial_metadata(())
            async for events in batches:
                for event in events:
                    await context.write(to_event(event))
