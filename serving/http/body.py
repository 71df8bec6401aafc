"""Reading a JSON body whose sender is not trusted: bounded, well-formed, each field of the right type."""

import json
import re
from collections.abc import Collection
from typing import Any

from starlette.requests import Request

from serving.http.errors import HttpError

MAX_DEPTH = 64
MAX_DIGITS = 20
"""Of a whole number: all that 64 bits can hold."""

_HALF_CHARACTER = re.compile(r"[\ud800-\udfff]")


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body's JSON object. Raises HttpError 413 beyond max_bytes, 400 for anything else."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise HttpError(413, f"the body has more than {max_bytes} bytes, which is what is allowed")
        parts.append(part)
    try:
        text = b"".join(parts).decode("utf-8")
        body = json.loads(text, parse_constant=_refuse_constant, parse_int=_bounded_int)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise HttpError(400, f"the body is a {_type_name(body)}; allowed: an object")
    for name, value in body.items():
        _check("the name of a field", name, MAX_DEPTH)
        _check(name, value, MAX_DEPTH)
    return body


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _bounded_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits; allowed: {MAX_DIGITS}")
    return int(digits)


def _check(name: str, value: Any, depth: int) -> None:
    """Refuse halves of surrogate pairs anywhere in a field, which no tokenizer takes, and deep nesting."""
    if depth == 0:
        raise HttpError(400, f"{name[:80]!r} nests deeper than {MAX_DEPTH} levels", param=name[:80])
    match value:
        case str():
            if _HALF_CHARACTER.search(value):
                shown = ascii(name[:80])[1:-1]
                raise HttpError(400, f"{shown} holds half of a surrogate pair", param=shown)
        case list():
            for item in value:
                _check(name, item, depth - 1)
        case dict():
            for key, item in value.items():
                _check(name, key, depth - 1)
                _check(name, item, depth - 1)


class Fields:
    """The fields of a body, each asked for once, with its type; `done` refuses those never asked for."""

    def __init__(self, body: dict[str, Any]):
        self._body = dict(body)

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The field's value if it is of that type; null and absence give the default."""
        value = self._body.pop(name, None)
        if value is None:
            return default
        wrong_bool = isinstance(value, bool) and bool not in (kind if isinstance(kind, tuple) else (kind,))
        if wrong_bool or not isinstance(value, kind):
            raise HttpError(400, f"{name} is a {_type_name(value)}; allowed: {_names(kind)}", param=name)
        return value

    def require(self, name: str, kind: type | tuple[type, ...]) -> Any:
        value = self.take(name, kind)
        if value is None:
            raise HttpError(400, f"{name} is missing", param=name)
        return value

    def refuse_unless(self, name: str, allowed: Collection[Any]) -> None:
        """A setting that is known, but served with some values only."""
        value = self._body.pop(name, None)
        if value is not None and value not in allowed:
            shown = ", ".join(json.dumps(choice) for choice in allowed) or "nothing"
            raise HttpError(400, f"{name} is {json.dumps(value)[:80]}; served so far: {shown}", param=name)

    def ignore(self, *names: str) -> None:
        """Fields that say something about the caller, and change no answer."""
        for name in names:
            self._body.pop(name, None)

    def done(self) -> None:
        if self._body:
            name = min(self._body)
            raise HttpError(400, f"{name[:80]!r} is not a field of this request", param=name[:80])


_NAMES: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


def _type_name(value: Any) -> str:
    return _NAMES[type(value)]


def _names(kind: type | tuple[type, ...]) -> str:
    return " or ".join(_NAMES[k] for k in (kind if isinstance(kind, tuple) else (kind,)))
