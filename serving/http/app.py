"""The HTTP front end as a Starlette application over an `AsyncLLM`."""

import dataclasses
import hmac
import logging
import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lorajax.errors import EngineClosed, LoraJaxError
from serving.adapter_roots import AdapterRoots
from serving.async_llm import AsyncLLM
from serving.http.body import Fields, read_object
from serving.http.errors import ErrorBody, HttpError, error_body
from serving.http.generation import GenerationRoutes
from serving.metrics import EngineMetrics
from serving.outputs import AdapterStatus

logger = logging.getLogger("lorajax.http")


def build_app(
    engine: AsyncLLM,
    *,
    metrics: EngineMetrics | None = None,
    roots: AdapterRoots | None = None,
    served_model_name: str | None = None,
    allow_runtime_lora_updating: bool = False,
    max_body_bytes: int = 16 << 20,
    token: str | None = None,
) -> Starlette:
    """The application. It does not own the engine.

    metrics: observing the engine already; None makes one. roots: where adapters may be loaded from.
    served_model_name: the `model` that means the base model; None takes the checkpoint's name.
    allow_runtime_lora_updating: whether callers may load and unload adapters.
    max_body_bytes: of a request. token: bearer token for all routes but /health; None asks for none.
    """
    name = served_model_name or engine.model_name
    if metrics is None:
        metrics = EngineMetrics(engine.model_name)
        engine.observe(metrics.observe)
    generation = GenerationRoutes(engine, name, max_body_bytes)
    adapters = AdapterRoutes(
        engine, name, roots or AdapterRoots(), metrics, max_body_bytes, updating=allow_runtime_lora_updating
    )
    app = Starlette(
        routes=[
            Route("/v1/completions", generation.completions, methods=["POST"]),
            Route("/v1/chat/completions", generation.chat_completions, methods=["POST"]),
            Route("/v1/models", adapters.models),
            Route("/v1/models/{name:path}", adapters.model),
            Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
            Route("/v1/lora_adapters", adapters.adapters),
            Route("/v1/lora_stats", adapters.stats),
            Route("/metrics", adapters.metrics),
            Route("/health", adapters.health),
        ],
        exception_handlers={
            HttpError: _known,
            LoraJaxError: _known,
            HTTPException: _no_route,
            ClientDisconnect: _gone,
            Exception: _unexpected,
        },
    )
    if token is not None:
        app.add_middleware(_TokenMiddleware, token=token)
    return app


class AdapterRoutes:
    """Models, adapters, metrics and health."""

    def __init__(
        self,
        engine: AsyncLLM,
        base_name: str,
        roots: AdapterRoots,
        metrics: EngineMetrics,
        max_body_bytes: int,
        *,
        updating: bool,
    ):
        self._engine, self._base_name, self._roots, self._metrics = engine, base_name, roots, metrics
        self._max_body_bytes, self._updating = max_body_bytes, updating
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        names = [status.name for status in await self._engine.adapters() if status.state != "draining"]
        models = [self._model(self._base_name), *map(self._model, dict.fromkeys(names))]
        return JSONResponse({"object": "list", "data": models})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        names = {status.name for status in await self._engine.adapters() if status.state != "draining"}
        if name not in names | {self._base_name}:
            raise HttpError(404, f"no model named {name!r:.80}", param="model", code="model_not_found")
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        parent = None if name == self._base_name else self._base_name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "lorajax",
            "root": self._base_name,
            "parent": parent,
            "max_model_len": self._engine.max_model_len,
        }

    async def load(self, request: Request) -> Response:
        fields = await self._update_fields(request)
        name, source = fields.require("lora_name", str), fields.require("lora_path", str)
        pinned, replace = fields.take("pinned", bool, False), fields.take("replace", bool, False)
        fields.done()
        status = await self._engine.load_adapter(
            name, self._roots.resolve(source), pinned=pinned, replace=replace, roots=self._roots.folders
        )
        return JSONResponse(self._status(status))

    async def unload(self, request: Request) -> Response:
        fields = await self._update_fields(request)
        name, timeout = fields.require("lora_name", str), fields.take("timeout", (int, float))
        fields.done()
        num_waited_for = await self._engine.unload_adapter(name, timeout=timeout)
        return JSONResponse({"name": name, "num_waited_for": num_waited_for})

    async def _update_fields(self, request: Request) -> Fields:
        if not self._updating:
            raise HttpError(403, "loading and unloading is off; start with --allow-runtime-lora-updating")
        return Fields(await read_object(request, self._max_body_bytes))

    async def adapters(self, request: Request) -> Response:
        statuses = await self._engine.adapters()
        return JSONResponse({"object": "list", "data": [self._status(status) for status in statuses]})

    def _status(self, status: AdapterStatus) -> dict[str, Any]:
        return dataclasses.asdict(self._roots.shown(status))

    async def stats(self, request: Request) -> Response:
        stats = dataclasses.asdict(await self._engine.stats())
        return JSONResponse({"engine": stats, "adapters": self._metrics.by_adapter()})

    async def metrics(self, request: Request) -> Response:
        text = self._metrics.render(await self._engine.stats(), await self._engine.adapters())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self, request: Request) -> Response:
        try:
            self._engine.check_health()
        except EngineClosed as error:
            return ErrorBody(503, str(error), code="unavailable").response()
        return JSONResponse({"status": "ok"})


class _TokenMiddleware:
    def __init__(self, app: ASGIApp, token: str):
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                refusal = ErrorBody(
                    401, "header 'Authorization: Bearer <token>' needed", code="invalid_api_key"
                )
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _known(request: Request, error: Exception) -> Response:
    return error_body(error).response()


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = ErrorBody(
        error.status_code, f"{request.method} {request.url.path[:80]}: {error.detail}"
    ).response()
    response.headers.update(error.headers or {})
    return response


def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


def _unexpected(request: Request, error: Exception) -> Response:
    logger.error("a request failed", exc_info=error)
    return error_body(error).response()
