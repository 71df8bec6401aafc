"""`SamplingParams`: how a request's tokens are chosen, validated when it is made."""

import dataclasses
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from lorajax.errors import ConfigError

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them overflows and draws the best token anyway."""

MAX_LOGPROBS = 20
MAX_COMPLETIONS = 64


@typing.no_type_check  # it checks its own fields, with errors for its users
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Settings of one request. Names and defaults are those of vLLM.

    n: completions per prompt. temperature: 0 is greedy. top_k: 0 or -1 is off. seed: makes the draws
    reproducible, whatever else runs. max_tokens: None takes the room that the model leaves. stop: one
    string or several; text ends before the first that appears (after it, with
    include_stop_str_in_output). stop_token_ids: as EOS, but not switched off by ignore_eos.
    logprobs: log-probabilities of the chosen token and of so many best ones (0 to 20), of the raw
    logits.
    prompt_logprobs: the same of every prompt token. max_tokens 0 computes the prompt alone, so it needs
    prompt_logprobs. Numbers may be numpy's; lists become tuples.
    Raises ConfigError, naming field, value and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    structured_output: object | None = None

    def __post_init__(self) -> None:
        _integer(self, "n", 1, MAX_COMPLETIONS)
        _number(self, "temperature", 0.0)
        _number(self, "top_p", 0.0, 1.0, exclusive=True)
        _integer(self, "top_k", -1)
        _number(self, "min_p", 0.0, 1.0)
        _integer(self, "seed", -(2**63), 2**64 - 1, optional=True)
        _integer(self, "max_tokens", 0, optional=True)
        _integer(self, "min_tokens", 0)
        _integer(self, "logprobs", 0, MAX_LOGPROBS, optional=True)
        _integer(self, "prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        _number(self, "presence_penalty", -2.0, 2.0)
        _number(self, "frequency_penalty", -2.0, 2.0)
        _number(self, "repetition_penalty", 0.0, exclusive=True)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: True, False")
        _strings(self, "stop")
        _token_ids(self, "stop_token_ids", at_least=0)
        if self.allowed_token_ids is not None:
            _token_ids(self, "allowed_token_ids", at_least=1)
        if self.logit_bias is not None:
            _bias(self, "logit_bias")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ConfigError("max_tokens is 0; allowed: 1 or more, or 0 together with prompt_logprobs")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens}; allowed: at most max_tokens = {self.max_tokens}"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, however it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _integer(
    params: SamplingParams, name: str, low: int, high: int | None = None, *, optional: bool = False
) -> None:
    if optional and getattr(params, name) is None:
        return
    value: Any = getattr(params, name)
    if not _is_integer(value) or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        none = " or None" if optional else ""
        raise ConfigError(f"{name} is {value!r}; allowed: a whole number {limit}{none}")
    object.__setattr__(params, name, int(value))


def _number(
    params: SamplingParams, name: str, low: float, high: float = math.inf, *, exclusive: bool = False
) -> None:
    value: Any = getattr(params, name)
    if not _is_finite(value) or value < low or value > high or (exclusive and value == low):
        above = f"above {low:g}" if exclusive else f"from {low:g}"
        limit = f"{above} on" if high == math.inf else f"{above} to {high:g}"
        raise ConfigError(f"{name} is {value!r}; allowed: a finite number {limit}")
    object.__setattr__(params, name, float(value))


def _strings(params: SamplingParams, name: str) -> None:
    value: Any = getattr(params, name)
    strings = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(string, str) and string for string in strings):
        raise ConfigError(f"{name} is {value!r:.80}; allowed: a non-empty string, or a list of them")
    object.__setattr__(params, name, tuple(strings))


def _token_ids(params: SamplingParams, name: str, *, at_least: int) -> None:
    value: Any = getattr(params, name)
    ids = [] if value is None else list(value) if isinstance(value, Iterable) else [value]
    wrong = not isinstance(value, Iterable | None) or len(ids) < at_least
    if wrong or not all(_is_integer(token_id) and token_id >= 0 for token_id in ids):
        count = "one or more" if at_least else "any number of"
        raise ConfigError(f"{name} is {value!r:.80}; allowed: {count} token ids, whole numbers from 0 on")
    object.__setattr__(params, name, tuple(map(int, ids)))


def _bias(params: SamplingParams, name: str) -> None:
    value: Any = getattr(params, name)
    pairs: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, Mapping) else [(-1, 0.0)]
    if not all(_is_integer(token_id) and token_id >= 0 and _is_finite(bias) for token_id, bias in pairs):
        raise ConfigError(
            f"{name} is {value!r:.80}; allowed: a mapping of token ids, whole numbers from 0 on, to finite "
            "numbers"
        )
    object.__setattr__(params, name, {int(token_id): float(bias) for token_id, bias in pairs})
