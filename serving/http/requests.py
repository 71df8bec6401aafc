"""From the bodies of OpenAI's routes to prompts and `SamplingParams`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lorajax.errors import ConfigError
from serving.engine import Prompt
from serving.http.body import Fields
from serving.http.errors import HttpError
from serving.sampling_params import SamplingParams

MAX_PROMPTS = 256

_NUMBER = (int, float)
_SAMPLING_FIELDS: dict[str, type | tuple[type, ...]] = {
    "n": int,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": int,
    "min_p": _NUMBER,
    "seed": int,
    "min_tokens": int,
    "stop": (str, list),
    "stop_token_ids": list,
    "include_stop_str_in_output": bool,
    "ignore_eos": bool,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "allowed_token_ids": list,
    "skip_special_tokens": bool,
}
"""Fields that OpenAI's requests, as other servers have extended them, share with SamplingParams."""

_ABOUT_THE_CALLER = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What both routes ask of the engine. model: the base model's name or an adapter's."""

    model: str
    params: SamplingParams
    stream: bool
    include_usage: bool
    priority: int
    cache_salt: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRequest(GenerationRequest):
    prompts: list[Prompt]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest(GenerationRequest):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def completion_request(body: dict[str, Any]) -> CompletionRequest:
    """Raises HttpError 400, with the field, for a body that cannot be served."""
    fields = Fields(body)
    prompts = _prompts(fields.require("prompt", (str, list)))
    fields.refuse_unless("suffix", ())
    fields.refuse_unless("echo", (False,))
    fields.refuse_unless("best_of", (1,))
    request = CompletionRequest(
        prompts=prompts,
        **_shared(
            fields, max_tokens=fields.take("max_tokens", int, 16), logprobs=fields.take("logprobs", int)
        ),
    )
    fields.done()
    return request


def chat_request(body: dict[str, Any]) -> ChatRequest:
    """Raises HttpError 400, with the field, for a body that cannot be served."""
    fields = Fields(body)
    messages = _messages(fields.require("messages", list))
    tools = fields.take("tools", list)
    if tools is not None and not _all(tools, dict):
        raise HttpError(400, "tools holds a value that is not an object", param="tools")
    fields.refuse_unless("tool_choice", ("auto", "none"))
    fields.refuse_unless("parallel_tool_calls", (True,))
    fields.refuse_unless("response_format", ({"type": "text"},))
    fields.refuse_unless("modalities", (["text"],))
    longest = fields.take("max_tokens", int)
    longest = fields.take("max_completion_tokens", int, longest)
    wanted, best = fields.take("logprobs", bool, False), fields.take("top_logprobs", int)
    if best is not None and not wanted:
        raise HttpError(400, "top_logprobs is set, but logprobs is not true", param="top_logprobs")
    request = ChatRequest(
        messages=messages,
        tools=tools,
        **_shared(fields, max_tokens=longest, logprobs=(best or 0) if wanted else None),
    )
    fields.done()
    return request


def _shared(fields: Fields, *, max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
    given: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": logprobs}
    for name, kind in _SAMPLING_FIELDS.items():
        value = fields.take(name, kind)
        if value is not None:
            given[name] = value
    bias = fields.take("logit_bias", dict)
    if bias:
        given["logit_bias"] = _logit_bias(bias)
    try:
        params = SamplingParams(**given)
    except ConfigError as error:  # its message begins with the field
        name = str(error).partition(" ")[0]
        raise HttpError(400, str(error), param=name if name in given else None) from None
    options = fields.take("stream_options", dict, {})
    fields.ignore(*_ABOUT_THE_CALLER)
    return {
        "model": fields.require("model", str),
        "params": params,
        "stream": fields.take("stream", bool, False),
        "include_usage": options.get("include_usage") is True,
        "priority": fields.take("priority", int, 0),
        "cache_salt": fields.take("cache_salt", str),
    }


def _prompts(prompt: str | list[Any]) -> list[Prompt]:
    """One text, one list of token ids, or several of either."""
    if isinstance(prompt, str) or (prompt and _all(prompt, int)):
        return [prompt]
    token_lists = _all(prompt, list) and all(_all(item, int) for item in prompt)
    if not prompt or not (_all(prompt, str) or token_lists):
        raise HttpError(400, "prompt is empty, or neither texts nor lists of token ids", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise HttpError(400, f"prompt has {len(prompt)} entries; allowed: {MAX_PROMPTS}", param="prompt")
    return prompt


def _messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages for a chat template: content in text parts becomes one text."""
    if not messages or not _all(messages, dict):
        raise HttpError(400, "messages is empty, or holds a value that is not an object", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise HttpError(400, f"{name}.role is not a string", param=f"{name}.role")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        texts = [part.get("text") for part in parts if part.get("type") == "text"]
        if len(texts) != len(content) or not _all(texts, str):
            raise HttpError(400, f"{name}.content has a part that is not text", param=f"{name}.content")
        content = "".join(str(text) for text in texts)
    elif content is not None and not isinstance(content, str):
        raise HttpError(400, f"{name}.content is neither text nor parts", param=f"{name}.content")
    return {**message, "content": content}


def _logit_bias(bias: dict[str, Any]) -> dict[int, Any]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise HttpError(400, "logit_bias has a key that is not a token id", param="logit_bias") from None


def _all(values: list[Any], kind: type) -> bool:
    """Whether a list holds values of one JSON type only; true and false are no numbers."""
    return all(isinstance(value, kind) and not isinstance(value, bool) for value in values)
