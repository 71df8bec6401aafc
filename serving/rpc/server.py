"""`RpcServer`: the gRPC front end of an `AsyncLLM`, with health and reflection."""

import asyncio
import contextlib
import dataclasses
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from lorajax.errors import ConfigError, EngineClosed
from serving.adapter_roots import AdapterRoots
from serving.async_llm import AsyncLLM
from serving.rpc import lorajax_pb2 as pb
from serving.rpc import lorajax_pb2_grpc as pb_grpc
from serving.rpc.auth import TokenInterceptor
from serving.rpc.servicers import AdaptersServicer, EngineServicer, GenerationServicer

SERVICES = tuple(f"{pb.DESCRIPTOR.package}.{name}" for name in pb.DESCRIPTOR.services_by_name)
_HEALTH_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RpcConfig:
    """Settings of the server.

    host, port: where it listens; port 0 takes a free one.
    max_message_bytes: of a request, and of a unary response. Larger ones end with RESOURCE_EXHAUSTED.
    token: bearer token that calls must bring; None asks for none.
    certificate, key: PEM files, both or none; with them the server speaks TLS only.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    max_message_bytes: int = 16 << 20
    token: str | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS needs certificate and key; one of them is given; allowed: both, or none")
        if self.max_message_bytes < 1024:
            raise ConfigError(f"max_message_bytes is {self.max_message_bytes}; allowed: at least 1024")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; allowed: 0 to 65535")


class RpcServer:
    """Serves an engine, which it does not own: close that after `stop`."""

    def __init__(
        self, engine: AsyncLLM, config: RpcConfig | None = None, *, roots: AdapterRoots | None = None
    ):
        self._engine, self._config = engine, config or RpcConfig()
        self._roots = roots or AdapterRoots()
        self._draining = asyncio.Event()
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue] - untyped package
        self._server: grpc.aio.Server | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Begin to serve; returns the port. Raises ConfigError if the address or the TLS files do not do."""
        config = self._config
        server = grpc.aio.server(
            interceptors=() if config.token is None else (TokenInterceptor(config.token),),
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", config.max_message_bytes),
                ("grpc.so_reuseport", 0),  # a taken port is an error, not shared
            ],
        )
        generation = GenerationServicer(self._engine, config.max_message_bytes)
        pb_grpc.add_GenerationServicer_to_server(generation, server)
        pb_grpc.add_AdaptersServicer_to_server(AdaptersServicer(self._engine, self._roots), server)
        pb_grpc.add_EngineServicer_to_server(EngineServicer(self._engine, self._draining), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        port = self._listen(server)
        await server.start()
        self._server = server
        await self._set_health(serving=True)
        self._watch = asyncio.create_task(self._watch_engine())
        return port

    async def stop(self, grace: int | float = 30) -> None:
        """Refuse new calls, let running ones end for `grace` seconds, then abort them."""
        if self._server is None:
            return
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._health.enter_graceful_shutdown()
        self._draining.set()
        await self._server.stop(grace)
        self._server = None

    def _listen(self, server: grpc.aio.Server) -> int:
        config = self._config
        address = f"{config.host}:{config.port}"
        try:
            if config.certificate is None or config.key is None:
                return server.add_insecure_port(address)
            pair = (config.key.read_bytes(), config.certificate.read_bytes())
            return server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except OSError as error:
            raise ConfigError(f"certificate or key: {error.strerror}; allowed: readable PEM files") from error
        except RuntimeError as error:
            raise ConfigError(f"the server cannot listen on {address}: {error}") from error

    async def _watch_engine(self) -> None:
        """Health says NOT_SERVING once the engine has stopped."""
        with contextlib.suppress(EngineClosed):
            while True:
                self._engine.check_health()
                await asyncio.sleep(_HEALTH_SECONDS)
        await self._set_health(serving=False)

    async def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in ("", *SERVICES):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)
