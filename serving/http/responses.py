"""From `RequestOutput`s to the bodies and events of OpenAI's routes."""

import time
from collections.abc import Sequence
from typing import Any

from serving.outputs import CompletionOutput, Logprob, RequestOutput


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


class Answer:
    """One answer of a route, whole or in events. chat: of chat completions. model: as the caller named it."""

    def __init__(self, answer_id: str, model: str, *, chat: bool, stream: bool):
        self._chat, self._stream = chat, stream
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": answer_id,
            "object": f"{kind}.chunk" if chat and stream else kind,
            "created": int(time.time()),
            "model": model,
        }
        self._num_sent: dict[int, int] = {}
        self._num_characters: dict[int, int] = {}
        self._ended: set[int] = set()

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of an answer that is not streamed; outputs: one per prompt."""
        choices = [
            self._choice(completion, index)
            for position, output in enumerate(outputs)
            for index, completion in _numbered(output, position)
        ]
        return {**self._head, "choices": choices, "usage": usage(outputs)}

    def first_events(self, num_choices: int) -> list[dict[str, Any]]:
        """Events before any text: a chat's choices begin with their role."""
        if not self._chat:
            return []
        delta = {"role": "assistant", "content": ""}
        choices = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(num_choices)
        ]
        return [{**self._head, "choices": choices}]

    def event(self, output: RequestOutput, position: int) -> dict[str, Any] | None:
        """What is new in the output of prompt number `position`; None if nothing is."""
        choices = [
            self._choice(completion, index)
            for index, completion in _numbered(output, position)
            if index not in self._ended
            and (completion.delta or completion.finish_reason or self._new_logprobs(completion, index))
        ]
        self._ended.update(choice["index"] for choice in choices if choice["finish_reason"])
        return {**self._head, "choices": choices} if choices else None

    def usage_event(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage(outputs)}

    def _new_logprobs(self, completion: CompletionOutput, index: int) -> bool:
        return len(completion.logprobs or ()) > self._num_sent.get(index, 0)

    def _choice(self, completion: CompletionOutput, index: int) -> dict[str, Any]:
        text = completion.delta if self._stream else completion.text
        choice: dict[str, Any] = {"index": index, "logprobs": self._logprobs(completion, index)}
        if not self._chat:
            choice["text"] = text
        elif self._stream:
            choice["delta"] = {"content": text} if text else {}
        else:
            choice["message"] = {"role": "assistant", "content": text}
        choice["finish_reason"] = completion.finish_reason
        choice["stop_reason"] = completion.stop_reason
        return choice

    def _logprobs(self, completion: CompletionOutput, index: int) -> dict[str, Any] | None:
        """Of the tokens that no event has shown yet."""
        if completion.logprobs is None:
            return None
        new = completion.logprobs[self._num_sent.get(index, 0) :]
        self._num_sent[index] = len(completion.logprobs)
        positions = [_entries(logprobs) for logprobs in new]
        if self._chat:
            return {"content": [{**best[0], "top_logprobs": best} for best in positions]}
        return self._text_logprobs(positions, index)

    def _text_logprobs(self, positions: list[list[dict[str, Any]]], index: int) -> dict[str, Any]:
        offsets, offset = [], self._num_characters.get(index, 0)
        for best in positions:
            offsets.append(offset)
            offset += len(best[0]["token"])
        self._num_characters[index] = offset
        return {
            "tokens": [best[0]["token"] for best in positions],
            "token_logprobs": [best[0]["logprob"] for best in positions],
            "top_logprobs": [{entry["token"]: entry["logprob"] for entry in best} for best in positions],
            "text_offset": offsets,
        }


def _numbered(output: RequestOutput, position: int) -> list[tuple[int, CompletionOutput]]:
    """The completions with their number among those of all prompts."""
    first = position * len(output.outputs)
    return [(first + completion.index, completion) for completion in output.outputs]


def _entries(logprobs: dict[int, Logprob]) -> list[dict[str, Any]]:
    """Chosen token first. A token without a text of its own is called by its id."""
    entries = []
    for token_id, value in logprobs.items():
        token = f"token_id:{token_id}" if value.decoded_token is None else value.decoded_token
        entries.append({"token": token, "logprob": float(value), "bytes": list(token.encode())})
    return entries
