"""Every failure in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

import dataclasses

from starlette.responses import JSONResponse

from lorajax.errors import (
    AdapterBusy,
    AdapterCapacityError,
    AdapterExists,
    AdapterNotFound,
    EngineClosed,
    LoraJaxError,
    QueueFull,
)

_STATUS: dict[type[LoraJaxError], int] = {
    AdapterNotFound: 404,
    AdapterExists: 409,
    AdapterCapacityError: 429,
    QueueFull: 429,
    AdapterBusy: 503,
    EngineClosed: 503,
    LoraJaxError: 400,  # formats, settings, requests: what the caller sent cannot be served
}
_CODES = {404: "model_not_found", 409: "adapter_exists", 429: "rate_limit_exceeded", 503: "unavailable"}


class HttpError(Exception):
    """A failure with its status. param: the field of the body that it is about."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


@dataclasses.dataclass(frozen=True)
class ErrorBody:
    """What a client gets, in a response or as the last event of a stream."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    def as_json(self) -> dict[str, object]:
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.as_json(), self.status, headers)


def error_body(error: Exception) -> ErrorBody:
    """Unexpected errors are not described to callers."""
    if isinstance(error, HttpError):
        return ErrorBody(error.status, error.message, error.param, error.code)
    if isinstance(error, LoraJaxError):
        status = next(_STATUS[kind] for kind in type(error).mro() if kind in _STATUS)
        param = "model" if isinstance(error, AdapterNotFound) else None
        return ErrorBody(status, str(error), param, _CODES.get(status))
    return ErrorBody(500, "internal error; the server's log says more")
