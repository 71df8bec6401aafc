"""Counts XLA compilations of one engine, as JAX's own monitoring reports them.

JAX's listeners are process-wide, so one listener hands each event to the counter that is active on the
compiling thread. Another engine, or a user's own `jax.jit`, is not counted.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_active: contextvars.ContextVar["CompilationCounter | None"] = contextvars.ContextVar("active", default=None)


class CompilationCounter:
    """Number of programs compiled inside `counting()`, since `reset()`."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what compiles on this thread until the end of the block."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def reset(self) -> None:
        self.count = 0


def _on_event(event: str, duration_secs: float, **kwargs: object) -> None:
    counter = _active.get()
    if event == _COMPILE_EVENT and counter is not None:
        counter.count += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)
