"""`LLM`: the synchronous Python API."""

import contextlib
import itertools
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tqdm.auto import tqdm

from lorajax.errors import ConfigError, EngineClosed, RequestRejected
from lorajax.lora.source import AdapterSource
from lorajax.tokenizer import Tokenizer
from serving.config import EngineConfig
from serving.engine import PreparedRequest
from serving.engine_builder import build_engine
from serving.engine_loop import EngineLoop, OutputStream, Receiver
from serving.outputs import AdapterStatus, EngineStats, RequestOutput, ScoreOutput
from serving.sampling_params import SamplingParams

T = TypeVar("T")
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """One base model with many adapters, in this process. Safe to call from several threads.

    model: Hugging Face folder, `*.gguf` file or Hub id.
    adapters: name -> PEFT folder, Hub id or `AdapterWeights`, loaded at start.
    tokenizer: in place of the checkpoint's own.
    config: an `EngineConfig`, or its fields as keywords; not both.
    Raises CheckpointError, ConfigError, AdapterFormatError, AdapterCapacityError; TypeError for an
    option that does not exist.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapters: Mapping[str, AdapterSource] | None = None,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        **engine_config_fields: Any,
    ):
        if config is not None and engine_config_fields:
            raise ConfigError(
                f"config and {sorted(engine_config_fields)} are both given; allowed: one of them"
            )
        config = config or EngineConfig(**engine_config_fields)
        self._engine = build_engine(model, config, tokenizer=tokenizer)
        self._loop = EngineLoop(self._engine)
        self._request_numbers = itertools.count()
        try:
            for name, source in (adapters or {}).items():
                self.load_adapter(name, source)
        except BaseException:
            self.close()
            raise

    # ---- requests ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts in one go; results in input order.

        prompts: a text, a list of texts, or a list of token-id lists. sampling_params and adapter: one
        for all, or one each. priority: lower runs earlier. cache_salt: requests with different salts
        never share cached pages.
        Raises RequestRejected or AdapterNotFound before anything runs.
        """
        prompts = _as_list_of_prompts(prompts)
        params = _one_each(sampling_params, len(prompts), "sampling_params", default=SamplingParams())
        names: list[str | None] = _one_each(adapter, len(prompts), "adapter", default=None)
        with self._all_prepared() as prepared:
            for prompt, param, name in zip(prompts, params, names, strict=True):
                prepared.append(
                    self._prepare(
                        prompt, param, name, priority=priority, cache_salt=cache_salt, final_only=True
                    )
                )
        return self._wait(self._loop.submit(prepared), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list, through the checkpoint's own chat template."""
        conversations: list[Any] = list(messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        tokenizer = self._engine.require_tokenizer()
        prompts = [
            tokenizer.encode(
                tokenizer.apply_chat_template(m, tools=tools, add_generation_prompt=add_generation_prompt),
                add_special_tokens=False,
            )
            for m in conversations
        ]
        return self.generate(prompts, sampling_params, adapter=adapter, use_tqdm=use_tqdm)

    def render_chat(
        self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation, ready to be answered: a prompt for `generate` or `stream`."""
        tokenizer = self._engine.require_tokenizer()
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Prompt | Sequence[Prompt],
        *,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoreOutput]:
        """Log-probability of each completion's tokens after its prompt: one prefill, nothing is sampled.

        prompts, completions: texts or token ids, one completion per prompt. A completion's text is encoded
        by itself, without special tokens: give token ids where the joint would be encoded otherwise.
        adapter: one for all, or one each. Log-probabilities are natural, of the raw logits.
        Raises RequestRejected or AdapterNotFound before anything runs.
        """
        prompts, completions = _as_list_of_prompts(prompts), _as_list_of_prompts(completions)
        if len(prompts) != len(completions):
            raise RequestRejected(
                f"{len(completions)} completions for {len(prompts)} prompts; allowed: one each"
            )
        names: list[str | None] = _one_each(adapter, len(prompts), "adapter", default=None)
        heads = [self._engine.token_ids(prompt) for prompt in prompts]
        tails = [self._engine.completion_token_ids(completion) for completion in completions]
        with self._all_prepared() as prepared:
            for head, tail, name in zip(heads, tails, names, strict=True):
                prepared.append(
                    self._prepare(head + tail, SamplingParams(), name, final_only=True, score_from=len(head))
                )
        outputs = self._wait(self._loop.submit(prepared), use_tqdm)
        return [_score(output, tail) for output, tail in zip(outputs, tails, strict=True)]

    @contextlib.contextmanager
    def _all_prepared(self) -> Iterator[list[PreparedRequest]]:
        """A list to put prepared requests in; if one cannot be prepared, all are let go of."""
        prepared: list[PreparedRequest] = []
        try:
            yield prepared
        except BaseException:
            for request in prepared:
                self._engine.discard(request)
            raise

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[RequestOutput]:
        """Outputs as they grow: `outputs[i].text` so far and `.delta`, the new part.

        The request is queued at once. Closing the iterator aborts it.
        """
        prepared = self._prepare(prompt, sampling_params or SamplingParams(), adapter, final_only=False)
        (stream,) = self._loop.submit([prepared])
        return self._stream(stream)

    def _stream(self, stream: OutputStream) -> Iterator[RequestOutput]:
        try:
            yield from stream
        finally:
            self._loop.abort(stream.request_id)

    # ---- for AsyncLLM ----

    @property
    def model_name(self) -> str:
        """The base model's, which no adapter can have."""
        return self._engine.adapters.model_name

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return self._engine.max_model_len

    def new_request_id(self) -> str:
        """An id that no request had before."""
        return f"request-{next(self._request_numbers)}"

    def check_request_id(self, request_id: str, live: Collection[str]) -> str:
        """A caller's id if it can be given to a new request. Raises RequestRejected."""
        if not isinstance(request_id, str) or not request_id or request_id in live:
            raise RequestRejected(f"request id {request_id!r:.80} is empty or in use; allowed: a new one")
        return request_id

    def prepare(
        self, prompt: Prompt, params: SamplingParams, adapter: str | None, **options: Any
    ) -> PreparedRequest:
        """See `LLMEngine.prepare`."""
        return self._engine.prepare(prompt, params, adapter, **options)

    def submit_to(self, prepared: PreparedRequest, receiver: Receiver) -> None:
        """Queue a prepared request whose outputs go to `receiver`, on the engine's thread."""
        self._loop.submit_to([prepared], [receiver])

    def discard(self, prepared: PreparedRequest) -> None:
        """Let go of a prepared request that will not be submitted."""
        self._engine.discard(prepared)

    def abort(self, request_id: str) -> None:
        """End a request. Unknown and finished ids are left alone."""
        self._loop.abort(request_id)

    def _prepare(
        self, prompt: Prompt, params: SamplingParams, adapter: str | None, **options: Any
    ) -> PreparedRequest:
        return self.prepare(prompt, params, adapter, request_id=self.new_request_id(), **options)

    def _wait(self, streams: list[OutputStream], use_tqdm: bool) -> list[RequestOutput]:
        """The final output of each stream. Interrupted, it aborts them all."""
        results = []
        try:
            # disable=None: a bar only where there is a terminal or notebook
            for stream in tqdm(streams, desc="requests", disable=None if use_tqdm else True):
                *_, last = stream
                results.append(last)
        except BaseException:
            for stream in streams:
                self._loop.abort(stream.request_id)
            raise
        return results

    # ---- adapters ----

    def load_adapter(
        self,
        name: str,
        source: AdapterSource,
        *,
        pinned: bool = False,
        replace: bool = False,
        roots: Collection[str | Path] | None = None,
    ) -> AdapterStatus:
        """Validate an adapter completely, then register it under `name`.

        The same name and source again changes nothing. pinned: keeps its device slot once it has one.
        replace: a new version for new requests; running ones finish on the weights they began with.
        roots: folders in which a source that others name must lie, symlinks followed; None trusts it.
        Raises AdapterFormatError, AdapterExists, AdapterCapacityError.
        """
        status = self._engine.adapters.load(name, source, pinned=pinned, replace=replace, roots=roots)
        if replace:  # the old version leaves now if nobody uses it
            self._loop.call(self._engine.adapters.collect_drained)
        return status

    def unload_adapter(self, name: str, *, timeout: int | float | None = None) -> int:
        """Refuse new requests at once, wait for running ones, free all that the adapter holds.

        timeout: seconds to wait, then AdapterBusy. Returns how many requests it waited for.
        """
        return self._engine.adapters.unload(name, self._loop.call, timeout=timeout)

    def blend_adapters(self, name: str, weights: Mapping[str, int | float]) -> AdapterStatus:
        """Register the exact weighted sum of loaded adapters (their ranks add up) as `name`."""
        return self._engine.adapters.blend(name, weights)

    def adapters(self) -> list[AdapterStatus]:
        """Every registered adapter, in the order of loading."""
        return self._loop.call(self._engine.adapters.statuses)

    # ---- engine ----

    def stats(self) -> EngineStats:
        return self._loop.call(self._engine.stats)

    def subscribe_kv_events(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Call `callback` with every event of the prefix cache; returns the function that ends it.

        The callback runs on the engine's thread and must be quick. Needs `kv_events=True`.
        """
        return self._loop.call(lambda: self._engine.subscribe_kv_events(callback))

    def check_health(self) -> None:
        """Raises EngineClosed, with the cause, if the engine no longer serves."""
        self._loop.check_open()

    def stop(self) -> None:
        """Abort what runs; later calls raise EngineClosed. The device is freed by `close`."""
        self._loop.close()

    def close(self) -> None:
        """Abort what runs and free the device. Later calls raise EngineClosed."""
        self.stop()
        self._engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _score(output: RequestOutput, completion: list[int]) -> ScoreOutput:
    if output.prompt_logprobs is None:
        raise EngineClosed("the request was aborted before its completion was scored")
    first = len(output.prompt_token_ids) - len(completion)
    scored = zip(completion, output.prompt_logprobs[first:], strict=True)
    logprobs = [float(found[token]) for token, found in scored if found is not None]
    return ScoreOutput(token_ids=completion, logprobs=logprobs, cumulative_logprob=math.fsum(logprobs))


def _as_list_of_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (Mapping, bytes)):
        raise RequestRejected(
            f"prompts is a {type(prompts).__name__}; allowed: a text, texts, or lists of token ids"
        )
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(item, numbers.Integral) for item in listed):
        return [listed]  # one prompt of token ids
    return listed


def _one_each(value: Any, count: int, name: str, *, default: T) -> list[T]:
    """One value for all, or a list of one each; None stands for the default."""
    if not isinstance(value, (list, tuple)):
        return [default if value is None else value] * count
    if len(value) != count:
        raise RequestRejected(
            f"{name} has {len(value)} entries for {count} prompts; allowed: one, or one each"
        )
    return [default if item is None else item for item in value]
