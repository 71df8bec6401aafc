"""Sampling settings: each is checked when it is made, and says what is allowed."""

import dataclasses
import math

import numpy as np
import pytest

from lorajax.errors import ConfigError
from serving.sampling_params import SamplingParams

DEFAULTS = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "max_tokens": 16,
    "min_tokens": 0,
    "stop": (),
    "stop_token_ids": (),
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "logprobs": None,
    "prompt_logprobs": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "skip_special_tokens": True,
    "structured_output": None,
}

NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
INTEGERS = ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"]
FLAGS = ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens"]


def test_defaults():
    assert dataclasses.asdict(SamplingParams()) == DEFAULTS


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3, "1", None, True, [1.0]])
def test_numbers_are_finite_numbers(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is .*; allowed: a finite number"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.0, 1.5, "1", True, math.nan, -(2**70), [1]])
def test_integers_are_whole_numbers(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is .*; allowed: a whole number"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_flags_are_true_or_false(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is .*; allowed: True, False"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0},
        {"n": 65},
        {"n": None},
        {"top_p": 0},
        {"top_p": 1.01},
        {"min_p": 1.1},
        {"top_k": -2},
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"min_tokens": -1},
        {"min_tokens": None},
        {"min_tokens": 17},
        {"logprobs": -1},
        {"logprobs": 21},
        {"prompt_logprobs": 21},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": 5},
        {"stop": [5]},
        {"stop": b"a"},
        {"stop_token_ids": 5},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [True]},
        {"stop_token_ids": ["5"]},
        {"stop_token_ids": "5"},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": 3},
        {"logit_bias": [1]},
        {"logit_bias": {"1": 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: True}},
    ],
    ids=str,
)
def test_what_is_not_allowed_is_refused_by_name(fields):
    with pytest.raises(ConfigError, match=f"^{next(iter(fields))} is .*; allowed: "):
        SamplingParams(**fields)


def test_an_unknown_setting_is_an_error():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 64},
        {"temperature": 0},
        {"temperature": 100.0},
        {"top_k": -1},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"max_tokens": None, "min_tokens": 1000},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"logprobs": 0},
        {"logprobs": 20},
        {"min_tokens": 16},
        {"stop_token_ids": []},
        {"logit_bias": {}},
    ],
    ids=str,
)
def test_limits_are_allowed(fields):
    params = SamplingParams(**fields)
    assert all(getattr(params, name) in (value, ()) for name, value in fields.items())


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (1e-40, True), (9.9e-6, True), (1e-5, False), (1, False)]
)
def test_tiny_temperatures_are_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_values_are_normalised():
    params = SamplingParams(
        seed=np.int64(3),
        temperature=np.float32(0.5),
        stop="end",
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=range(3),
        logit_bias={np.int32(4): 2},
    )
    assert (params.seed, params.temperature, params.stop) == (3, 0.5, ("end",))
    assert (params.stop_token_ids, params.allowed_token_ids) == ((1, 2), (0, 1, 2))
    assert params.logit_bias == {4: 2.0}
    kinds = [type(params.seed), type(params.temperature), type(params.stop_token_ids[0])]
    assert kinds == [int, float, int]
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams().stop_strings == ()


def test_settings_that_have_served_copy_as_new_ones_do():
    """Whatever the engine derives from them is not among their fields."""
    params = SamplingParams(temperature=0.0, stop="end", seed=3)
    for name in dir(params):
        getattr(params, name)
    assert SamplingParams(**vars(params)) == params


def test_a_callers_list_can_change_without_harm():
    stop, bias = ["a"], {1: 1.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 2.0
    assert (params.stop, params.logit_bias) == (("a",), {1: 1.0})
