"""Biases, penalties and masks: host state and device program together, against the float64 definitions."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import adjusted

from lorajax.errors import RequestRejected
from lorajax.logits_adjustment import LogitsAdjustment, adjust
from serving.request_adjustment import adjustment_of, adjustment_rows, token_set
from serving.sampling_params import SamplingParams

VOCAB = 70  # not a whole number of words
ADJUST = jax.jit(adjust)
TOKENS = st.integers(0, VOCAB - 1)

# made into SamplingParams in the tests: the shape checker draws random numbers, which strategies may not
REQUESTS = st.fixed_dictionaries(
    {
        "fields": st.fixed_dictionaries(
            {"min_tokens": st.integers(0, 4)},
            optional={
                "presence_penalty": st.floats(-2, 2),
                "frequency_penalty": st.floats(-2, 2),
                "repetition_penalty": st.floats(0.2, 5),
                "logit_bias": st.dictionaries(TOKENS, st.floats(-100, 100), max_size=5),
                "allowed_token_ids": st.lists(TOKENS, min_size=3, max_size=20, unique=True),
            },
        ),
        "prompt": st.lists(TOKENS, min_size=1, max_size=10),
        "output": st.lists(TOKENS, max_size=12),
        "ends": st.lists(TOKENS, max_size=2),
    }
)


def adjust_rows(logits, adjustments, *, dense=None):
    if dense is None:
        dense = any(a is not None and a.dense for a in adjustments)
    rows = adjustment_rows(adjustments, len(logits), logits.shape[1], dense=dense)
    return np.asarray(ADJUST(logits, LogitsAdjustment(**vars(rows))))


def test_sets_of_tokens_are_bits_from_the_low_end():
    assert token_set([0, 1, 33, 69], VOCAB).tolist() == [3, 2, 1 << 5]
    assert token_set([], VOCAB).tolist() == [0, 0, 0]


@settings(max_examples=200, deadline=None)
@given(st.lists(REQUESTS, min_size=4, max_size=4), st.integers(0, 2**31))
def test_equal_to_the_definition_in_any_company(requests, seed):
    logits = np.random.default_rng(seed).normal(0, 5, (len(requests), VOCAB)).astype(np.float32)
    params = [SamplingParams(**request["fields"]) for request in requests]
    adjustments = [
        adjustment_of(p, request["prompt"], request["ends"], VOCAB)
        for p, request in zip(params, requests, strict=True)
    ]
    for adjustment, request in zip(adjustments, requests, strict=True):
        if adjustment is not None:  # in two parts, as a running request takes in its tokens
            adjustment.advance(request["output"][:5])
            adjustment.advance(request["output"])
    together = adjust_rows(logits, adjustments)
    for row, request in enumerate(requests):
        p, output = params[row], request["output"]
        expected = adjusted(logits[row], p, request["prompt"], output, request["ends"])
        np.testing.assert_allclose(together[row], expected, rtol=2e-6, atol=2e-5)
        alone = adjust_rows(logits[row : row + 1], [adjustments[row]])[0]
        assert alone.tobytes() == together[row].tobytes()
        if adjustments[row] is None:
            assert together[row].tobytes() == logits[row].tobytes()


def test_only_a_request_that_changes_its_logits_has_an_adjustment():
    neutral = SamplingParams(top_k=3, min_p=0.1, seed=4, logprobs=2, stop_token_ids=[4], logit_bias={})
    assert adjustment_of(neutral, [1, 2], (0, 4), VOCAB) is None
    assert adjustment_of(SamplingParams(min_tokens=3), [1], (), VOCAB) is None  # nothing ends it
    for fields, dense in [
        ({"min_tokens": 1}, False),
        ({"allowed_token_ids": [3]}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"logit_bias": {3: 1.0}}, True),
    ]:
        adjustment = adjustment_of(SamplingParams(**fields), [1], (0,), VOCAB)
        assert adjustment is not None
        assert adjustment.dense is dense


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias has token id {VOCAB}; allowed: 0 to {VOCAB - 1}"),
        (
            {"allowed_token_ids": [1, 10**9]},
            f"allowed_token_ids has token id 1000000000; allowed: 0 to {VOCAB - 1}",
        ),
        ({"allowed_token_ids": [0, 4], "min_tokens": 1}, "min_tokens is 1, but every allowed token ends"),
    ],
)
def test_what_can_never_be_drawn_is_refused(fields, words):
    with pytest.raises(RequestRejected, match=words):
        adjustment_of(SamplingParams(**fields), [1], (0, 4), VOCAB)


def test_a_stop_token_beyond_the_vocabulary_is_no_mistake():
    adjustment = adjustment_of(SamplingParams(min_tokens=2), [1], (3, 10**6), VOCAB)
    assert adjustment is not None
    assert adjustment.allowed.tolist() == token_set(set(range(VOCAB)) - {3}, VOCAB).tolist()


def test_min_tokens_holds_back_the_ends_until_it_is_reached():
    adjustment = adjustment_of(SamplingParams(min_tokens=2), [1], (3, 40), VOCAB)
    held, everything = (token_set(set(range(VOCAB)) - ends, VOCAB).tolist() for ends in ({3, 40}, set()))
    for output, expected in [([], held), ([9], held), ([9, 9], everything), ([9, 9, 9], everything)]:
        adjustment.advance(output)
        assert adjustment.allowed.tolist() == expected


def test_a_token_mask_joins_the_other_sets_and_wins_over_min_tokens():
    params = SamplingParams(min_tokens=2, allowed_token_ids=[2, 3, 5])
    adjustment = adjustment_of(params, [1], (3,), VOCAB)
    for mask, expected in [([2, 3, 9], [2]), ([3, 9], [3]), ([2, 5, 60], [2, 5])]:
        adjustment.token_mask = token_set(mask, VOCAB)
        assert adjustment.allowed.tolist() == token_set(expected, VOCAB).tolist()
    adjustment.token_mask = None
    assert adjustment.allowed.tolist() == token_set([2, 5], VOCAB).tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {3: 1e308, 5: -1e308}, "repetition_penalty": 1e308},
        {"logit_bias": {3: 1e308}, "repetition_penalty": 1e-308},
        {"logit_bias": {3: -1e308}, "repetition_penalty": 1e-308, "allowed_token_ids": [3, 4, 5]},
    ],
)
def test_extreme_numbers_stay_finite_even_over_the_smallest_temperature(fields):
    adjustment = adjustment_of(SamplingParams(**fields), [3, 4, 5, 6], (), VOCAB)
    logits = np.linspace(-30, 30, VOCAB, dtype=np.float32)[None]
    logits[0, 4] = 0
    result = adjust_rows(logits, [adjustment])[0] / np.float32(1e-5)
    allowed = list(fields.get("allowed_token_ids", range(VOCAB)))
    assert np.isfinite(result[allowed]).all()
    assert np.isneginf(np.delete(result, allowed)).all()


def test_arrays_of_a_step_are_its_own():
    """A step that was dispatched may still read them: taking in more tokens must not change them."""
    params = SamplingParams(frequency_penalty=1, repetition_penalty=2, logit_bias={1: 1}, min_tokens=1)
    adjustment = adjustment_of(params, [1], (0,), VOCAB)
    first = adjustment_rows([adjustment], 2, VOCAB, dense=True)
    before = {name: column.copy() for name, column in vars(first).items()}
    adjustment.advance([7, 8])
    second = adjustment_rows([adjustment], 2, VOCAB, dense=True)
    for name, column in vars(first).items():
        np.testing.assert_array_equal(column, before[name])
        assert not np.shares_memory(column, vars(second)[name])
    assert not np.array_equal(second.penalty, first.penalty)
    assert not np.array_equal(second.seen, first.seen)
