"""The one thread that steps the engine, and the streams by which callers receive outputs.

Invariant: scheduler, caches, slots and device belong to this thread. Other threads hand it callables,
which run between two steps, and read their request's outputs from a queue of its own.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar, runtime_checkable

from lorajax.errors import EngineClosed, RequestRejected
from serving.engine import LLMEngine, PreparedRequest
from serving.outputs import RequestOutput

T = TypeVar("T")

logger = logging.getLogger("lorajax.engine")


@runtime_checkable
class Receiver(Protocol):
    """Takes the outputs of one request, or the error that ended it. Called on the engine's thread."""

    def put(self, item: RequestOutput | BaseException) -> None: ...


class OutputStream:
    """Outputs of one request, in order, ending with the finished one."""

    def __init__(self, request_id: str):
        self.request_id = request_id
        self._queue: queue.SimpleQueue[RequestOutput | BaseException] = queue.SimpleQueue()

    def put(self, item: RequestOutput | BaseException) -> None:
        self._queue.put(item)

    def __iter__(self) -> Iterator[RequestOutput]:
        finished = False
        while not finished:
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            finished = item.finished
            yield item


class EngineLoop:
    """Runs an engine on a thread of its own until closed."""

    def __init__(self, engine: LLMEngine):
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, Receiver] = {}
        self._lock = threading.Lock()  # guards _closing: nothing is posted after the last drain
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lorajax-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[PreparedRequest]) -> list[OutputStream]:
        """Queue requests together, so that they can share their first batch."""
        streams = [OutputStream(request.request_id) for request in requests]
        self.submit_to(requests, streams)
        return streams

    def submit_to(self, requests: Sequence[PreparedRequest], streams: Sequence[Receiver]) -> None:
        """Queue requests whose outputs go to the given receivers."""

        def add() -> None:
            for request, stream in zip(requests, streams, strict=True):
                if self._failure is not None:
                    self._engine.discard(request)
                    stream.put(self._closed_error())
                    continue
                self._streams[request.request_id] = stream
                try:
                    self._engine.add(request)
                except RequestRejected as error:
                    del self._streams[request.request_id]
                    stream.put(error)

        try:
            self._post(add)
        except EngineClosed:
            for request in requests:
                self._engine.discard(request)
            raise

    def abort(self, request_id: str) -> None:
        """End a request before its next step. Unknown and finished requests are left alone."""
        with contextlib.suppress(EngineClosed):  # closing has aborted it
            self._post(lambda: self._abort(request_id))

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, between two steps, and return its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                if self._failure is not None:
                    raise self._closed_error()
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it
                future.set_exception(error)

        self._post(run)
        return future.result()

    def check_open(self) -> None:
        """Raises EngineClosed after `close`, or after a failure, which is its cause."""
        if self._closing or self._failure is not None:
            raise self._closed_error()

    def close(self) -> None:
        """Abort what runs, stop the thread. Calling it again does nothing."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._inbox.put(self._abort_all)
        self._thread.join()

    def _post(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._closing:
                raise self._closed_error()
            self._inbox.put(command)

    def _closed_error(self) -> EngineClosed:
        if self._failure is None:
            return EngineClosed("the engine is closed")
        error = EngineClosed(f"the engine stopped: {type(self._failure).__name__}: {self._failure}")
        error.__cause__ = self._failure
        return error

    def _abort(self, request_id: str) -> None:
        if self._failure is None:
            self._deliver(self._engine.abort(request_id))

    def _abort_all(self) -> None:
        for request_id in list(self._streams):
            self._abort(request_id)

    def _run(self) -> None:
        while not self._closing:
            if not self._engine.has_work or self._failure is not None:
                self._guarded(self._inbox.get())  # nothing to do: sleep until a command comes
            self._run_commands()
            if self._engine.has_work and self._failure is None and not self._closing:
                self._guarded(lambda: self._deliver(self._engine.step()))
        self._run_commands()

    def _run_commands(self) -> None:
        while not self._inbox.empty():
            self._guarded(self._inbox.get())

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do a piece of the engine's work. If it breaks, so does the engine: nobody is left waiting."""
        try:
            work()
        except Exception as error:
            logger.exception("the engine stopped")
            self._failure = self._failure or error
            for stream in self._streams.values():
                stream.put(self._closed_error())
            self._streams.clear()
            self._engine.release_adapters()

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if output.finished:
                    del self._streams[output.request_id]
