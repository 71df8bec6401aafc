"""The one table from errors to gRPC status codes."""

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from lorajax.errors import (
    AdapterBusy,
    AdapterCapacityError,
    AdapterExists,
    AdapterFormatError,
    AdapterNotFound,
    CheckpointError,
    ConfigError,
    EngineClosed,
    LoraJaxError,
    QueueFull,
    RequestRejected,
)

logger = logging.getLogger("lorajax.rpc")

STATUS_CODES: dict[type[LoraJaxError], grpc.StatusCode] = {
    AdapterNotFound: grpc.StatusCode.NOT_FOUND,
    AdapterExists: grpc.StatusCode.ALREADY_EXISTS,
    AdapterBusy: grpc.StatusCode.UNAVAILABLE,
    EngineClosed: grpc.StatusCode.UNAVAILABLE,
    AdapterCapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RequestRejected: grpc.StatusCode.INVALID_ARGUMENT,
    AdapterFormatError: grpc.StatusCode.INVALID_ARGUMENT,
    CheckpointError: grpc.StatusCode.INVALID_ARGUMENT,
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
}


def status_code(error: LoraJaxError) -> grpc.StatusCode:
    """The code of the error's nearest class in the table."""
    return next((STATUS_CODES[kind] for kind in type(error).mro() if kind in STATUS_CODES), _OTHER)


_OTHER = grpc.StatusCode.INTERNAL


@contextlib.asynccontextmanager
async def errors_mapped(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """End the call with the status of what goes wrong inside. Unexpected errors are logged; the caller
    learns that there was one, and not what it says."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except LoraJaxError as error:
        await context.abort(status_code(error), str(error))
    except Exception:
        logger.exception("a call failed")
        await context.abort(_OTHER, "internal error; the server's log says more")
