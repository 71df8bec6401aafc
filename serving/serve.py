"""`lorajax serve`: one engine behind gRPC, HTTP or both, until a signal ends it.

Invariant: after SIGTERM or SIGINT nothing new is accepted, running requests may end within the drain time,
and the engine is closed last. A second signal ends the wait.
"""

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from lorajax.errors import ConfigError
from serving.adapter_roots import AdapterRoots
from serving.async_llm import AsyncLLM
from serving.config import EngineConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Settings of the front ends.

    grpc_port, http_port: None leaves that front end out; 0 takes a free port.
    adapter_roots: folders from which remote callers may load adapters; none allows no such load.
    allow_runtime_lora_updating: whether HTTP callers may load and unload adapters.
    served_model_name: HTTP's name of the base model; None takes the checkpoint's.
    max_message_bytes: of one request, and of one response over gRPC.
    token: bearer token that callers must bring; None asks for none.
    certificate, key: PEM files; with them, both front ends speak TLS only.
    drain_seconds: how long running requests may take to end after the first signal.
    """

    host: str = "127.0.0.1"
    grpc_port: int | None = 50051
    http_port: int | None = None
    adapter_roots: tuple[str, ...] = ()
    allow_runtime_lora_updating: bool = False
    served_model_name: str | None = None
    max_message_bytes: int = 16 << 20
    token: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    drain_seconds: int | float = 30

    def __post_init__(self) -> None:
        if self.grpc_port is None and self.http_port is None:
            raise ConfigError("neither grpc_port nor http_port is set; allowed: one of them, or both")


@runtime_checkable
class FrontEnd(Protocol):
    async def start(self) -> int: ...

    async def stop(self, grace: int | float) -> None: ...


def run(
    model: str,
    adapters: Mapping[str, str],
    engine_config: EngineConfig,
    config: ServeConfig,
    say: Callable[[str], None],
) -> None:
    """Load, serve, drain. say: takes one line for the operator when it serves, and when it drains."""
    roots = AdapterRoots(config.adapter_roots)
    engine = AsyncLLM(model, adapters=adapters, config=engine_config)
    asyncio.run(_serve(engine, roots, config, say))


async def _serve(
    engine: AsyncLLM, roots: AdapterRoots, config: ServeConfig, say: Callable[[str], None]
) -> None:
    started: list[FrontEnd] = []
    try:
        with _signals() as signalled:
            places = []
            for name, front_end in _front_ends(engine, roots, config).items():
                port = await front_end.start()
                started.append(front_end)
                places.append(f"{name} on {config.host}:{port}")
            say(f"serving {engine.model_name}: {', '.join(places)}")
            await signalled.get()
            say(f"draining, {config.drain_seconds:g} seconds at most")
            draining = asyncio.gather(*(front_end.stop(config.drain_seconds) for front_end in started))
            hurried = asyncio.ensure_future(signalled.get())
            await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            if not draining.done():
                draining.cancel()
            await asyncio.gather(draining, hurried, return_exceptions=True)
    finally:
        await asyncio.gather(*(front_end.stop(0) for front_end in started))
        await engine.close()


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Queue[int]]:
    """A queue that gets SIGTERM and SIGINT."""
    loop, received = asyncio.get_running_loop(), asyncio.Queue[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received.put_nowait, number)
    try:
        yield received
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _front_ends(engine: AsyncLLM, roots: AdapterRoots, config: ServeConfig) -> dict[str, FrontEnd]:
    """The servers that are asked for, not started. Their packages are optional."""
    front_ends: dict[str, FrontEnd] = {}
    if config.grpc_port is not None:
        front_ends["gRPC"] = _rpc_server(engine, roots, config, config.grpc_port)
    if config.http_port is not None:
        front_ends["HTTP"] = _http_server(engine, roots, config, config.http_port)
    return front_ends


def _rpc_server(engine: AsyncLLM, roots: AdapterRoots, config: ServeConfig, port: int) -> FrontEnd:
    try:
        from serving.rpc.server import RpcConfig, RpcServer
    except ImportError as error:
        raise ConfigError(f"grpc_port needs the extra lorajax[grpc]: {error}") from error
    rpc_config = RpcConfig(
        host=config.host,
        port=port,
        max_message_bytes=config.max_message_bytes,
        token=config.token,
        certificate=config.certificate,
        key=config.key,
    )
    return RpcServer(engine, rpc_config, roots=roots)


def _http_server(engine: AsyncLLM, roots: AdapterRoots, config: ServeConfig, port: int) -> FrontEnd:
    try:
        from serving.http.app import build_app
        from serving.http.server import HttpConfig, HttpServer
    except ImportError as error:
        raise ConfigError(f"http_port needs the extra lorajax[http]: {error}") from error
    app = build_app(
        engine,
        roots=roots,
        served_model_name=config.served_model_name,
        allow_runtime_lora_updating=config.allow_runtime_lora_updating,
        max_body_bytes=config.max_message_bytes,
        token=config.token,
    )
    http_config = HttpConfig(host=config.host, port=port, certificate=config.certificate, key=config.key)
    return HttpServer(app, http_config)
