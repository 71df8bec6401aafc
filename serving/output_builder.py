"""Collects what one request produced, over its n children, and turns it into `RequestOutput`s.

Invariant: the deltas of the outputs of a child, joined, are its text.
"""

import dataclasses
import time

import numpy as np

from lorajax.tokenizer import Tokenizer
from serving.detokenizer import Detokenizer
from serving.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from serving.request import FinishReason, Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of one sampled token and of the best tokens in its place, best first."""

    chosen: float
    top_token_ids: np.ndarray
    top_logprobs: np.ndarray


class _Child:
    """Text and log-probabilities of one completion so far."""

    def __init__(self, request: Request, detokenizer: Detokenizer | None):
        self.request, self.detokenizer = request, detokenizer
        self.logprobs: list[dict[int, Logprob]] | None = None if request.params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.unsent = ""

    def output(self) -> CompletionOutput:
        request, delta = self.request, self.unsent
        self.unsent = ""
        return CompletionOutput(
            index=request.child_index,
            text="" if self.detokenizer is None else self.detokenizer.text,
            delta=delta,
            token_ids=list(request.output_token_ids),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=None if request.finish_reason is None else request.finish_reason.value,
            stop_reason=request.stop_reason,
        )


class OutputBuilder:
    """Outputs of one request. `final_only` gives a single output, at the end."""

    def __init__(
        self,
        children: tuple[Request, ...],
        *,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        final_only: bool,
    ):
        first = children[0]
        self._first, self._prompt, self._tokenizer = first, prompt, tokenizer
        self._final_only = final_only
        self._children = [_Child(child, _detokenizer(child, tokenizer)) for child in children]
        self._arrived = time.monotonic()
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None] * first.num_prompt_tokens
        self._num_unscored = 0 if first.score_from is None else first.num_prompt_tokens - first.score_from
        self._scheduled_at: float | None = None
        self._first_token_at: float | None = None

    def mark_scheduled(self) -> None:
        """Called when a child of the request runs; only the first call counts."""
        if self._scheduled_at is None:
            self._scheduled_at = time.monotonic()

    def append_prompt_logprobs(self, position: int, logprobs: TokenLogprobs) -> None:
        """Take the log-probability of the prompt token at a position.

        A prompt that is computed again, after a preemption, keeps what it had.
        """
        if self._prompt_logprobs[position] is None:
            self._num_unscored -= 1
            wanted = self._first.params.prompt_logprobs or 0
            token_id = self._first.prompt_token_ids[position]
            self._prompt_logprobs[position] = self._token_logprobs(token_id, logprobs, wanted)

    def append(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> str | None:
        """Take a child's new token. Returns the stop string that it completed, if any.

        The token that ended the request by its id makes no text, unless the request asks for it.
        """
        child = self._children[request.child_index]
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()
        if child.logprobs is not None and logprobs is not None:
            child.cumulative_logprob += logprobs.chosen
            child.logprobs.append(self._token_logprobs(token_id, logprobs, request.params.logprobs or 0))
        stopped_by_id = request.finish_reason is FinishReason.STOP
        if child.detokenizer is None or (stopped_by_id and not request.params.include_stop_str_in_output):
            return None
        child.unsent += child.detokenizer.append([token_id])
        return child.detokenizer.stop_reason

    def finish(self, request: Request) -> None:
        """Flush the text that was held back; the request has its finish reason."""
        child = self._children[request.child_index]
        if child.detokenizer is not None:
            child.unsent += child.detokenizer.finish()

    @property
    def finished(self) -> bool:
        return all(child.request.finish_reason is not None for child in self._children)

    def build(self) -> RequestOutput | None:
        """The state now; None if the caller only wants the final one and this is not it."""
        if self._final_only and not self.finished:
            return None
        return RequestOutput(
            request_id=self._first.group_id,
            prompt=self._prompt,
            prompt_token_ids=self._first.prompt_token_ids,
            prompt_logprobs=self._scored_prompt(),
            adapter=self._first.adapter_name,
            adapter_id=self._first.adapter_id,
            outputs=[child.output() for child in self._children],
            finished=self.finished,
            num_cached_tokens=self._first.num_cached_tokens,
            metrics=self._metrics(),
        )

    def _scored_prompt(self) -> list[dict[int, Logprob] | None] | None:
        scored = self._first.score_from is not None and not self._num_unscored
        return list(self._prompt_logprobs) if scored else None

    def _token_logprobs(self, token_id: int, found: TokenLogprobs, wanted: int) -> dict[int, Logprob]:
        """The chosen token, and the best ones up to the number asked for."""
        best = list(zip(found.top_token_ids.tolist(), found.top_logprobs.tolist(), strict=True))
        ranks = {token: rank for rank, (token, _) in enumerate(best, start=1)}
        chosen = {token_id: found.chosen}
        return {
            token: Logprob(value, rank=ranks.get(token), decoded_token=self._decode(token))
            for token, value in (chosen | dict(best[:wanted]) | chosen).items()
        }

    def _decode(self, token_id: int) -> str | None:
        return (
            None if self._tokenizer is None else self._tokenizer.decode([token_id], skip_special_tokens=False)
        )

    def _metrics(self) -> RequestMetrics:
        now = time.monotonic()
        scheduled, first_token = self._scheduled_at, self._first_token_at
        num_tokens = max(len(child.request.output_token_ids) for child in self._children)
        per_token = None
        if first_token is not None and num_tokens > 1:
            per_token = (now - first_token) / (num_tokens - 1)
        return RequestMetrics(
            queue_time=None if scheduled is None else scheduled - self._arrived,
            time_to_first_token=None if first_token is None else first_token - self._arrived,
            time_per_output_token=per_token,
            end_to_end_time=now - self._arrived,
        )


def _detokenizer(request: Request, tokenizer: Tokenizer | None) -> Detokenizer | None:
    if tokenizer is None:
        return None
    params = request.params
    return Detokenizer(
        tokenizer,
        request.prompt_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        stop=params.stop_strings,
        min_tokens=params.min_tokens,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )
