"""`LLMEngine`: one step of serving, from scheduled requests to outputs.

The engine ties the rooms together and decides nothing itself: the scheduler says what runs, the batch
builder pads it, the runner computes it, the scheduler takes the tokens, the output builder makes text.
`prepare` and `discard` may be called from any thread; all else belongs to one (see `engine_loop`).
"""

import dataclasses
import itertools
import numbers
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lorajax.errors import ConfigError, RequestRejected
from lorajax.logprobs import Logprobs
from lorajax.tokenizer import Tokenizer
from serving.adapter_loader import AdapterLoader
from serving.adapter_registry import RegisteredAdapter
from serving.batch_builder import BatchBuilder, PaddedBatch
from serving.compilations import CompilationCounter
from serving.config import EngineConfig
from serving.kv_events import KvEvent, KvEventStream
from serving.model_runner import ModelRunner, StepOutput
from serving.output_builder import OutputBuilder, TokenLogprobs
from serving.outputs import EngineStats, RequestOutput
from serving.request import FinishReason, Request
from serving.request_adjustment import adjustment_of
from serving.sampling_params import SamplingParams
from serving.scheduler import Scheduler

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """A validated request that counts as a user of its adapter: add it to the engine, or discard it."""

    request_id: str
    children: tuple[Request, ...]
    output: OutputBuilder


class LLMEngine:
    """Steps requests to completion on one model runner. Built by `engine_builder`."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        runner: ModelRunner,
        builder: BatchBuilder,
        scheduler: Scheduler,
        adapters: AdapterLoader,
        events: KvEventStream,
        publisher: Any = None,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
    ):
        self.config, self.adapters, self.tokenizer = config, adapters, tokenizer
        self._runner, self._builder, self._scheduler, self._events = runner, builder, scheduler, events
        self._vocab_size, self._eos, self._max_model_len = vocab_size, eos_token_ids, max_model_len
        self._publisher = publisher
        self._compilations = CompilationCounter()
        self._seeds = np.random.default_rng(config.seed) if config.seed else None
        self._outputs: dict[str, OutputBuilder] = {}
        self._children: dict[str, tuple[Request, ...]] = {}
        self._num_steps = self._num_finished = self._num_prompt_tokens = self._num_output_tokens = 0

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    # ---- requests ----

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        adapter: str | None,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        final_only: bool = False,
        score_from: int | None = None,
    ) -> PreparedRequest:
        """Tokenize, validate, and take hold of the adapter. Raises RequestRejected, AdapterNotFound.

        score_from: end with the prompt, without a sampled token, after the log-probabilities of its tokens
        from this one on.
        """
        if not isinstance(params, SamplingParams):
            raise RequestRejected(f"sampling_params is a {type(params).__name__}; allowed: SamplingParams")
        token_ids = self.token_ids(prompt)
        _refuse_unserved(params)
        answers = score_from is None and params.max_tokens != 0
        longest = self._max_model_len - answers  # an answer has at least one token
        if len(token_ids) > longest:
            raise RequestRejected(
                f"the prompt has {len(token_ids)} tokens; allowed: {longest}, since max_model_len is "
                f"{self._max_model_len}"
            )
        entry = None if adapter is None else self.adapters.acquire(adapter, request_id)
        try:
            children = self._children_of(
                request_id, token_ids, params, adapter, entry, priority, cache_salt, score_from
            )
            text = prompt if isinstance(prompt, str) else None
            output = OutputBuilder(children, prompt=text, tokenizer=self.tokenizer, final_only=final_only)
        except BaseException:
            if entry is not None:
                self.adapters.release(entry.adapter_id, request_id)
            raise
        return PreparedRequest(request_id=request_id, children=children, output=output)

    def _children_of(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        adapter: str | None,
        entry: RegisteredAdapter | None,
        priority: int,
        cache_salt: str | None,
        score_from: int | None,
    ) -> tuple[Request, ...]:
        """One request of the scheduler for each of the n completions."""
        # None takes what the model, and the page pool, leave
        room = max(1, self._scheduler.config.max_request_len - len(token_ids))
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if score_from is not None:
            max_tokens = 0
        elif params.prompt_logprobs is not None:
            score_from = 1
        seed = self._new_seed() if params.seed is None else params.seed
        eos = () if params.ignore_eos else self._eos
        ends = (*eos, *(params.stop_token_ids or ()))
        children: list[Request] = []
        for index in range(params.n):
            child = Request(
                request_id=request_id if params.n == 1 else f"{request_id}/{index}",
                group_id=request_id,
                child_index=index,
                leader=children[0] if children else None,
                prompt_token_ids=token_ids,
                params=params,
                adapter_id=0 if entry is None else entry.adapter_id,
                adapter_name=adapter,
                priority=priority,
                cache_salt=cache_salt,
                eos_token_ids=eos,
                adjustment=adjustment_of(params, token_ids, ends, self._vocab_size),
                score_from=score_from if index == 0 else None,
                max_tokens=max_tokens,
                seed=seed % 2**64,
            )
            children.append(child)
        return tuple(children)

    def discard(self, prepared: PreparedRequest) -> None:
        """Let go of a prepared request that will not be added."""
        self.adapters.release(prepared.children[0].adapter_id, prepared.request_id)

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestRejected(
                "the checkpoint has no tokenizer; pass token ids, or a tokenizer to the engine"
            )
        return self.tokenizer

    def token_ids(self, prompt: Prompt) -> list[int]:
        """A prompt as valid token ids, at least one. Raises RequestRejected."""
        if isinstance(prompt, str):
            token_ids = self._checked(self.require_tokenizer().encode(prompt))
        else:
            token_ids = self._checked(prompt)
        if not token_ids:
            raise RequestRejected("the prompt is empty; allowed: at least one token")
        return token_ids

    def completion_token_ids(self, completion: Prompt) -> list[int]:
        """What follows a prompt, as valid token ids: a text without special tokens. May be empty."""
        if isinstance(completion, str):
            return self._checked(self.require_tokenizer().encode(completion, add_special_tokens=False))
        return self._checked(completion)

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        if not isinstance(token_ids, Iterable) or isinstance(token_ids, (Mapping, bytes)):
            raise RequestRejected(
                f"the prompt is a {type(token_ids).__name__}; allowed: a text, or token ids"
            )
        listed: list[Any] = list(token_ids)
        for token in listed:  # a tokenizer, too, may know ids that the embedding lacks
            whole = isinstance(token, numbers.Integral) and not isinstance(token, bool)
            if not whole or not 0 <= int(token) < self._vocab_size:
                raise RequestRejected(
                    f"token id {token!r} in the prompt; allowed: 0 to {self._vocab_size - 1}"
                )
        return [int(token) for token in listed]

    def _new_seed(self) -> int:
        return secrets.randbits(64) if self._seeds is None else int(self._seeds.integers(2**63))

    # ---- stepping (the engine's thread) ----

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(self, prepared: PreparedRequest) -> None:
        """Queue a prepared request. Raises RequestRejected, and lets go of it, if it cannot be."""
        added: list[Request] = []
        try:
            for child in prepared.children:
                self._scheduler.add(child)
                added.append(child)
        except RequestRejected:
            for child in added:
                self._scheduler.finish(child, FinishReason.ABORT)
            self.discard(prepared)
            raise
        self._outputs[prepared.request_id] = prepared.output
        self._children[prepared.request_id] = prepared.children
        self._num_prompt_tokens += len(prepared.children[0].prompt_token_ids)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request now. Unknown and finished ids give no output."""
        children = self._children.get(request_id, ())
        for child in children:
            self._end(child, FinishReason.ABORT)
        return self._collect({request_id} if children else set())

    def release_adapters(self) -> None:
        """After a failure: requests will not run on, so their adapters have no users."""
        for request_id, children in self._children.items():
            self.adapters.release(children[0].adapter_id, request_id)

    def step(self) -> list[RequestOutput]:
        """Run one batch of decodes and one of prefills; returns what changed for callers."""
        with self._compilations.counting():
            batch = self._scheduler.schedule()
            for write in batch.slot_writes:
                self._runner.write_slot(write.slot, self.adapters.packed(write.adapter_id))
            runs: list[tuple[PaddedBatch, StepOutput]] = []
            if batch.decodes:
                padded = self._builder.build_decode(batch.decodes)
                runs.append((padded, self._runner.execute(padded)))
            if batch.prefills:
                padded = self._builder.build_prefill(batch.prefills)
                runs.append((padded, self._runner.execute(padded)))
            self._num_steps += 1
            for chunk in batch.prefills:
                self._outputs[chunk.request.group_id].mark_scheduled()
            sampled = [row for padded, output in runs for row in _read_rows(padded, output)]
            for padded, output in runs:
                for request, position, logprobs in _read_scores(padded, output):
                    self._outputs[request.group_id].append_prompt_logprobs(position, logprobs)
        ended = self._scheduler.update(batch, [(request, token) for request, token, _ in sampled])
        for request, token, logprobs in sampled:
            self._take_token(request, token, logprobs)
        changed = [*(request for request, _, _ in sampled), *batch.ended, *ended]
        return self._collect({request.group_id for request in changed})

    def _take_token(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> None:
        self._num_output_tokens += 1
        output = self._outputs[request.group_id]
        stop_string = output.append(request, token, logprobs)
        if stop_string is not None:
            self._scheduler.finish(request, FinishReason.STOP, stop_string)
            # it may have ended by length in the same step; the stop string is the better reason
            request.finish_reason, request.stop_reason = FinishReason.STOP, stop_string
        if request.finish_reason is not None:
            output.finish(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.finish_reason is None:
            self._scheduler.finish(request, reason)
            self._outputs[request.group_id].finish(request)

    def _collect(self, request_ids: set[str]) -> list[RequestOutput]:
        """Outputs of these requests; the finished ones leave the engine."""
        outputs = []
        for request_id in sorted(request_ids):
            builder = self._outputs[request_id]
            output = builder.build()
            if output is not None:
                outputs.append(output)
            if builder.finished:
                self._forget(request_id)
                self._num_finished += 1
        return outputs

    def _forget(self, request_id: str) -> None:
        """The one way by which a request leaves: its adapter has a user less."""
        del self._outputs[request_id]
        children = self._children.pop(request_id)
        self.adapters.release(children[0].adapter_id, request_id)
        self.adapters.collect_drained()

    # ---- state ----

    def stats(self) -> EngineStats:
        scheduler, pool = self._scheduler, self._scheduler.pool
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_finished=self._num_finished,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_pages=pool.num_pages,
            num_free_pages=pool.num_available,
            num_cached_pages=len(scheduler.cache),
            prefix_cache_query_tokens=scheduler.prefix_query_tokens,
            prefix_cache_hit_tokens=scheduler.prefix_hit_tokens,
            num_adapters=len(self.adapters.registry),
            num_resident_adapters=len(scheduler.slots.resident),
            num_compilations=self._compilations.count,
        )

    def subscribe_kv_events(self, callback: Callable[[KvEvent], None]) -> Callable[[], None]:
        if not self.config.kv_events:
            raise ConfigError("kv_events is False; allowed: True, to subscribe to events")
        return self._events.subscribe(callback)

    def check_idle(self) -> None:
        """Raise if an idle engine still holds anything for a request. For tests."""
        self._scheduler.check_invariants()
        self.adapters.registry.check_invariants()
        assert not self.has_work and not self._outputs and not self._children
        assert self._scheduler.pool.num_available == self._scheduler.pool.num_pages
        assert not any(entry.users for entry in self.adapters.registry)

    def close(self) -> None:
        """Let go of the device's memory, and end the publishing of events."""
        if self._publisher is not None:
            self._publisher.close()
        self._runner.close()


def _read_rows(padded: PaddedBatch, output: StepOutput) -> list[tuple[Request, int, TokenLogprobs | None]]:
    """Wait for the device, and pair every sampled request with its token."""
    tokens = np.asarray(output.token_ids).tolist()
    logprobs = [None] * len(tokens) if output.logprobs is None else _split(output.logprobs)
    return [(request, tokens[row], logprobs[row]) for row, request in enumerate(padded.sampled)]


def _read_scores(padded: PaddedBatch, output: StepOutput) -> Iterator[tuple[Request, int, TokenLogprobs]]:
    """Wait for the device, and pair every scored prompt token with its log-probabilities."""
    if padded.scored is None:
        return
    rows = itertools.chain.from_iterable(map(_split, output.prompt_logprobs))
    for request, first, count in padded.scored.spans:
        for position, logprobs in zip(range(first, first + count), rows, strict=False):
            yield request, position, logprobs


def _split(logprobs: Logprobs) -> list[TokenLogprobs]:
    """Row by row."""
    chosen = np.asarray(logprobs.chosen).tolist()
    if logprobs.top is None:
        none = np.empty(0)
        return [TokenLogprobs(chosen=value, top_token_ids=none, top_logprobs=none) for value in chosen]
    top_ids, top = np.asarray(logprobs.top_token_ids), np.asarray(logprobs.top)
    return [
        TokenLogprobs(chosen=value, top_token_ids=top_ids[row], top_logprobs=top[row])
        for row, value in enumerate(chosen)
    ]


_UNSERVED = {"structured_output": None}


def _refuse_unserved(params: SamplingParams) -> None:
    """Settings that are not served yet are refused, never ignored."""
    for name, neutral in _UNSERVED.items():
        if getattr(params, name) != neutral:
            raise RequestRejected(f"{name} is {getattr(params, name)!r}; served so far: {neutral!r}")
