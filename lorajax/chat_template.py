"""Chat templates: Jinja2 in a sandbox, with the globals, filters and message rules of transformers 5.

A template comes with a checkpoint and is a stranger's program: it sees plain JSON values only.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorajax.errors import RequestRejected

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a message's reasoning; templates read the first, some the second."""

# What a template can raise by itself: it divides, indexes, converts and calls methods of text.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError,
)  # fmt: skip


class ChatTemplate:
    """One template, compiled when it is first used."""

    def __init__(self, source: str):
        self._source = source

    def render(self, messages: Any, **variables: Any) -> str:
        """The prompt's text.

        messages: a non-empty list of mappings with a "role", as a client sent it: anything else is refused.
        Raises RequestRejected, also where the template refuses the messages.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestRejected("messages must be a non-empty list of {'role': …, 'content': …}")
        try:
            return self._template.render(
                messages=[_message(message) for message in messages],
                **{name: _plain(value) for name, value in variables.items()},
            )
        except _TEMPLATE_ERRORS as error:
            raise RequestRejected(f"the chat template refuses the messages: {error}") from error

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self._source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise RequestRejected(f"the checkpoint's chat template is not valid Jinja2: {error}") from error


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja2's own protocol

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # a block of its own, so that variables set inside stay inside
        return nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` without names that begin with an underscore, which lead to Python's internals."""

    def __init__(self, /, *args: Any, **attributes: Any):
        for name in (attributes := dict(*args, **attributes)):
            _refuse_private(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"the attribute {name!r} of a namespace begins with an underscore"
        )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.globals["namespace"] = _Namespace
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja2's own filter escapes HTML characters, which a prompt must not.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _message(message: Any) -> dict[str, Any]:
    """A message as templates expect it: no keys that are None, reasoning under the names that are read."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestRejected(f"a message is {message!r:.80}; allowed: {{'role': …, 'content': …}}")
    plain = {name: _plain(value) for name, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy in plain JSON types. Raises RequestRejected for anything else."""
    if value is None or type(value) in (bool, str, int, float):
        return value
    if isinstance(value, str):  # an enum, say: its text, without the methods of its class
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise RequestRejected(f"the conversation holds a {type(value).__name__}; allowed: JSON values")
