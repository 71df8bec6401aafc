"""`SamplingParams`: how a request's tokens are chosen, validated when it is made."""

import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence

from lorajax.errors import ConfigError

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them overflows and draws the best token anyway."""

MAX_LOGPROBS = 20


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
        _integer(self, "n", 1, 64)
        _number(self, "temperature", 0.0, math.inf)
        _number(self, "top_p", 0.0, 1.0, exclusive=True)
        _integer(self, "top_k", -1)
        _number(self, "min_p", 0.0, 1.0)
        _integer(self, "seed", -(2**63), 2**64 - 1, optional=True)
        _integer(self, "max_tokens", 1, optional=True)
        _integer(self, "min_tokens", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens}; allowed: at most max_tokens = {self.max_tokens}"
            )
        _integer(self, "logprobs", 0, MAX_LOGPROBS, optional=True)
        _integer(self, "prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        _number(self, "presence_penalty", -2.0, 2.0)
        _number(self, "frequency_penalty", -2.0, 2.0)
        _number(self, "repetition_penalty", 0.0, math.inf, exclusive=True)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: True, False")
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, however it was given."""
        return _strings(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def _integer(
    params: SamplingParams, name: str, low: int, high: int | None = None, *, optional: bool = False
) -> None:
    value = getattr(params, name)
    if value is None and optional:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        none = " or None" if optional else ""
        raise ConfigError(f"{name} is {value!r}; allowed: a whole number {limit}{none}")


def _number(params: SamplingParams, name: str, low: float, high: float, *, exclusive: bool = False) -> None:
    value = getattr(params, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < low or value > high or (exclusive and value == low):
        above = f"above {low:g}" if exclusive else f"from {low:g}"
        limit = f"{above} on" if high == math.inf else f"{above} to {high:g}"
        raise ConfigError(f"{name} is {value!r}; allowed: a finite number {limit}")


def _strings(stop: object) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)  # pyright: ignore[reportArgumentType]
    if not all(isinstance(string, str) and string for string in strings):
        raise ConfigError(f"stop is {stop!r}; allowed: a non-empty string, or several")
    return strings


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    values = () if ids is None else tuple(ids)  # pyright: ignore[reportArgumentType]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in values):
        raise ConfigError(f"{name} is {ids!r}; allowed: token ids")
    return values
