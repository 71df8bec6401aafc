"""Between the messages of `lorajax.proto` and the types of the Python API."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import Message

from lorajax.errors import RequestRejected
from serving.engine import Prompt
from serving.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from serving.outputs import (
    AdapterStatus,
    CompletionOutput,
    EngineStats,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from serving.rpc import lorajax_pb2 as pb
from serving.sampling_params import SamplingParams

MAX_POSITIONS = 256
"""Log-probabilities of so many tokens at most in one chunk: 256 of 20 each are about 150 kB, far below
the 4 MiB that a gRPC client takes by default."""

_FINISH_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
}


# ---- what comes in ----


def to_prompt(message: Message, text_field: str, ids_field: str) -> Prompt:
    """The text or the token ids of a request. Raises RequestRejected if neither is set."""
    if message.HasField(text_field):
        return getattr(message, text_field)
    if message.HasField(ids_field):
        return list(getattr(message, ids_field).ids)
    raise RequestRejected(f"the request has no prompt; allowed: {text_field} or {ids_field}")


def to_sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """Fields that are not set keep the defaults of `SamplingParams`. Raises ConfigError."""
    set_fields: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name == "logit_bias":
            set_fields["logit_bias"] = dict(value)
        elif field.name in ("stop", "stop_token_ids", "allowed_token_ids"):
            set_fields[field.name] = list(value)
        elif field.name != "fill_context":
            set_fields[field.name] = value
    if message.fill_context:
        if "max_tokens" in set_fields:
            raise RequestRejected("fill_context and max_tokens are both set; allowed: one of them")
        set_fields["max_tokens"] = None
    return SamplingParams(**set_fields)


def from_sampling_params(params: SamplingParams) -> pb.SamplingParams:
    """For a client: what differs from the defaults is set."""
    if params.structured_output is not None:
        raise RequestRejected("structured_output has no field in lorajax.v1; allowed: None")
    message = pb.SamplingParams()
    for field in dataclasses.fields(SamplingParams):
        value = getattr(params, field.name)
        if value == field.default:
            continue
        if field.name == "stop":
            message.stop.extend(params.stop_strings)
        elif field.name == "logit_bias":
            message.logit_bias.update(value)
        elif field.name == "max_tokens" and value is None:
            message.fill_context = True
        elif isinstance(value, (tuple, list)):
            getattr(message, field.name).extend(value)
        else:
            setattr(message, field.name, value)
    return message


# ---- what goes out ----


def to_response(output: RequestOutput) -> pb.GenerateResponse:
    """A finished request, whole."""
    return pb.GenerateResponse(
        request_id=output.request_id,
        adapter=output.adapter or "",
        adapter_id=output.adapter_id,
        prompt_token_ids=output.prompt_token_ids,
        prompt_logprobs=map(_position, output.prompt_logprobs or ()),
        completions=[_completion(completion, completion.text, 0) for completion in output.outputs],
        num_cached_tokens=output.num_cached_tokens,
        metrics=_metrics(output.metrics),
    )


class ChunkWriter:
    """Turns the outputs of one request into chunks that each hold what is new, none of them large."""

    def __init__(self) -> None:
        self._num_sent: dict[int, int] = {}
        self._ended: set[int] = set()
        self._num_prompt_logprobs_sent = 0

    def chunks(self, output: RequestOutput) -> Iterator[pb.GenerateChunk]:
        """At least one chunk; the last one of a finished output says that it is finished."""
        prompt = (output.prompt_logprobs or [])[self._num_prompt_logprobs_sent :]
        self._num_prompt_logprobs_sent += len(prompt)
        for start in range(0, len(prompt), MAX_POSITIONS):
            chunk = self._chunk(output)
            chunk.prompt_logprobs.extend(map(_position, prompt[start : start + MAX_POSITIONS]))
            yield chunk
        chunk = self._chunk(output)
        room = MAX_POSITIONS
        for completion in output.outputs:
            if completion.index in self._ended:
                continue  # its end was sent; the others go on
            new = _completion(completion, completion.delta, self._num_sent.get(completion.index, 0))
            self._num_sent[completion.index] = len(completion.token_ids)
            while len(new.logprobs) > room:
                yield self._with(chunk, _first_part(new, room))
                chunk, room = self._chunk(output), MAX_POSITIONS
            room -= len(new.logprobs)
            if new.token_ids or new.text or new.finish_reason:
                self._with(chunk, new)
            if new.finish_reason:
                self._ended.add(completion.index)
        if output.finished:
            chunk.finished = True
            chunk.metrics.CopyFrom(_metrics(output.metrics))
        yield chunk

    @staticmethod
    def _chunk(output: RequestOutput) -> pb.GenerateChunk:
        return pb.GenerateChunk(
            request_id=output.request_id,
            adapter=output.adapter or "",
            adapter_id=output.adapter_id,
            num_prompt_tokens=len(output.prompt_token_ids),
            num_cached_tokens=output.num_cached_tokens,
        )

    @staticmethod
    def _with(chunk: pb.GenerateChunk, completion: pb.Completion) -> pb.GenerateChunk:
        chunk.completions.append(completion)
        return chunk


def _first_part(completion: pb.Completion, num_positions: int) -> pb.Completion:
    """Take the first tokens, and the text, out of a completion."""
    part = pb.Completion(
        index=completion.index,
        text=completion.text,
        token_ids=completion.token_ids[:num_positions],
        logprobs=completion.logprobs[:num_positions],
    )
    completion.text = ""
    del completion.token_ids[:num_positions]
    del completion.logprobs[:num_positions]
    return part


def _completion(completion: CompletionOutput, text: str, first_token: int) -> pb.Completion:
    """A completion from its token number `first_token` on."""
    message = pb.Completion(
        index=completion.index,
        text=text,
        token_ids=completion.token_ids[first_token:],
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=map(_position, (completion.logprobs or [])[first_token:]),
        finish_reason=_FINISH_REASONS[completion.finish_reason],
    )
    if isinstance(completion.stop_reason, str):
        message.stop_string = completion.stop_reason
    elif completion.stop_reason is not None:
        message.stop_token_id = completion.stop_reason
    return message


def _position(logprobs: dict[int, Logprob] | None) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        logprobs=[
            pb.Logprob(token_id=token_id, logprob=value, rank=value.rank, token=value.decoded_token)
            for token_id, value in (logprobs or {}).items()
        ]
    )


def _metrics(metrics: RequestMetrics) -> pb.RequestMetrics:
    return pb.RequestMetrics(**dataclasses.asdict(metrics))


def to_status(status: AdapterStatus) -> pb.AdapterStatus:
    return pb.AdapterStatus(**dataclasses.asdict(status))


def to_stats(stats: EngineStats) -> pb.EngineStats:
    return pb.EngineStats(**dataclasses.asdict(stats))


def to_event(event: KvEvent) -> pb.KvEvent:
    match event:
        case BlockStored():
            stored = pb.BlockStored(
                block_hashes=event.block_hashes,
                parent_block_hash=event.parent_block_hash,
                token_ids=event.token_ids,
                block_size=event.block_size,
                adapter_id=event.adapter_id,
                adapter_name=event.adapter_name or "",
            )
            return pb.KvEvent(block_stored=stored)
        case BlockRemoved():
            return pb.KvEvent(block_removed=pb.BlockRemoved(block_hashes=event.block_hashes))
        case AllBlocksCleared():
            return pb.KvEvent(all_blocks_cleared=pb.AllBlocksCleared())


def token_ids_or_text(prompt: Prompt, text_field: str, ids_field: str) -> dict[str, Any]:
    """The field of a request that holds a prompt, for a client."""
    if isinstance(prompt, str):
        return {text_field: prompt}
    return {ids_field: pb.TokenIds(ids=_listed(prompt))}


def _listed(token_ids: Sequence[int]) -> list[int]:
    return [int(token_id) for token_id in token_ids]
