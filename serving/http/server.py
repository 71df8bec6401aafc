"""`HttpServer`: the application on a socket, by uvicorn."""

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from lorajax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Where the server listens; port 0 takes a free one. certificate, key: PEM files, both or none."""

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS needs certificate and key; one of them is given; allowed: both, or none")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; allowed: 0 to 65535")


class _Server(uvicorn.Server):
    """Signals belong to whoever runs the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an application until `stop`."""

    def __init__(self, app: ASGIApp, config: HttpConfig | None = None):
        self._app, self._config = app, config or HttpConfig()
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Begin to serve; returns the port. Raises ConfigError if the address or the TLS files do not do."""
        config = self._config
        try:
            listening = socket.create_server((config.host, config.port))
        except OSError as error:
            raise ConfigError(
                f"the server cannot listen on {config.host}:{config.port}: {error.strerror}"
            ) from error
        settings = uvicorn.Config(
            self._app,
            lifespan="off",
            log_config=None,
            access_log=False,
            ssl_certfile=config.certificate,
            ssl_keyfile=config.key,
            timeout_graceful_shutdown=None,
        )
        try:
            settings.load()
        except OSError as error:
            listening.close()
            raise ConfigError(f"certificate or key: {error.strerror}; allowed: readable PEM files") from error
        self._server = _Server(settings)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.01)
        return listening.getsockname()[1]

    async def stop(self, grace: int | float = 30) -> None:
        """Refuse new connections, let running answers end for `grace` seconds, then cut them off."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        try:
            await asyncio.wait_for(asyncio.shield(self._serving), grace)
        except TimeoutError:
            self._server.force_exit = True
            await self._serving
        self._server = self._serving = None
