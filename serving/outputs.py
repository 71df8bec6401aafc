"""What leaves the engine."""

import dataclasses
from typing import Literal


class Logprob(float):
    """A log-probability (natural) that knows its token's rank (1 is best; None beyond those returned)
    and text. It is a plain number otherwise; `logprob` is that number."""

    rank: int | None
    decoded_token: str | None

    def __new__(cls, value: float, rank: int | None = None, decoded_token: str | None = None) -> "Logprob":
        self = super().__new__(cls, value)
        self.rank, self.decoded_token = rank, decoded_token
        return self

    @property
    def logprob(self) -> float:
        return float(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One completion. text: so far; delta: what is new since the last output of this completion.

    logprobs: per token, token id -> Logprob, the chosen token first; None if not asked for.
    stop_reason: the stop string or stop token id that ended it; None for EOS and other ends.
    """

    index: int
    text: str
    delta: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: Literal["stop", "length", "abort", "error"] | None
    stop_reason: int | str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """Times in seconds; None where the request did not get that far."""

    queue_time: float | None
    time_to_first_token: float | None
    time_per_output_token: float | None
    end_to_end_time: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A request's state. adapter: name, None for the base model; adapter_id: the very version used.

    prompt_logprobs: one entry per prompt token, None for the first, which follows nothing; the given token
    first in each. None if not asked for, or the request ended before its prompt was computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    adapter: str | None
    adapter_id: int
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics

    def renamed(self, request_id: str) -> "RequestOutput":
        """The same output under the caller's id."""
        return self if request_id == self.request_id else dataclasses.replace(self, request_id=request_id)

    def following(self, earlier: "RequestOutput") -> "RequestOutput":
        """This output for a reader who has not seen `earlier`: the deltas of both, joined."""
        joined = [
            dataclasses.replace(new, delta=old.delta + new.delta)
            for old, new in zip(earlier.outputs, self.outputs, strict=True)
        ]
        return dataclasses.replace(self, outputs=joined)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterStatus:
    """One registered adapter.

    state: "host" (registered), "resident" (in a device slot), "draining" (unloading).
    """

    name: str
    adapter_id: int
    rank: int
    target_modules: tuple[str, ...]
    num_parameters: int
    state: Literal["host", "resident", "draining"]
    num_running: int
    num_waiting: int
    pinned: bool
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counts since the engine started, and its state now.

    num_compilations: programs compiled after warm-up; more than 0 is a defect.
    prefix_cache_query_tokens / hit_tokens: prompt tokens looked up, and found.
    """

    num_running: int
    num_waiting: int
    num_finished: int
    num_preemptions: int
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    prefix_cache_query_tokens: int
    prefix_cache_hit_tokens: int
    num_adapters: int
    num_resident_adapters: int
    num_compilations: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreOutput:
    """Log-probabilities (natural) of a completion's tokens under the model, given the prompt before them."""

    token_ids: list[int]
    logprobs: list[float]
    cumulative_logprob: float
