"""Draws on the device against the float64 definitions; rows that keep to themselves; extreme settings."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_reference import distribution
from scipy.stats import chi2

from lorajax.sampler import SamplingInputs, kept_tokens, sample
from serving.batch_builder import sampling_rows
from serving.request import Request
from serving.sampling_params import SamplingParams

VOCAB = 24
DRAW = jax.jit(sample)
KEPT = jax.jit(kept_tokens)


def inputs_of(params, *, rows=None, outputs=0):
    """Sampling inputs of one row per SamplingParams, each at the position after `outputs` tokens."""
    requests = [
        Request(
            request_id=str(row),
            prompt_token_ids=[1],
            params=p,
            seed=(p.seed or 0) % 2**64,
            output_token_ids=[0] * outputs,
        )
        for row, p in enumerate(params)
    ]
    return SamplingInputs(**vars(sampling_rows(requests, rows or len(requests))))


def repeated(params, count):
    """The fields of `count` rows with the same settings, to be varied."""
    return {name: np.repeat(column, count, axis=0) for name, column in vars(inputs_of([params])).items()}


def draw(logits, inputs):
    return np.asarray(DRAW(np.asarray(logits, np.float32), inputs)).tolist()


def distinct_logits(rng, vocab=VOCAB, spread=4.0):
    """Random logits of which no two are close."""
    steps = rng.permutation(vocab) + rng.uniform(0.1, 0.9, vocab)
    return ((steps / vocab - 0.5) * spread).astype(np.float32)


# made into SamplingParams in the tests: the shape checker draws random numbers, which strategies may not
FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.05, 5),
        "top_k": st.integers(-1, VOCAB + 3),
        "top_p": st.floats(0.01, 1),
        "min_p": st.one_of(st.just(0.0), st.floats(0, 1)),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.lists(FILTERS, min_size=4, max_size=4), st.integers(0, 2**31), st.floats(0.5, 20))
def test_kept_tokens_are_those_of_the_definition(fields, seed, spread):
    params = [SamplingParams(**each) for each in fields]
    rng = np.random.default_rng(seed)
    logits = np.stack([distinct_logits(rng, spread=spread) for _ in params])
    temperatures = np.array([[p.temperature] for p in params], np.float32)
    kept = np.asarray(KEPT(logits / temperatures, inputs_of(params)))
    for row, p in enumerate(params):
        expected = distribution(logits[row], p)
        # a limit that falls on a token's edge, within float32, may go either way
        assume(_edge_distance(logits[row], p) > 1e-5)
        assert kept[row].tolist() == (expected > 0).tolist()


def _edge_distance(logits, params):
    """How near min_p and top_p come to a change of mind."""
    probs = np.sort(distribution(logits, SamplingParams(temperature=params.temperature)))[::-1]
    near_min_p = abs(probs / probs[0] - params.min_p).min() if params.min_p else 1
    kept = probs[probs >= params.min_p * probs[0]][: params.top_k if params.top_k > 0 else None]
    near_top_p = abs(np.cumsum(kept) / kept.sum() - params.top_p)[:-1].min(initial=1)
    return min(near_min_p, near_top_p if params.top_p < 1 else 1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.3),
        SamplingParams(temperature=1.5, top_k=8, top_p=0.8, min_p=0.1),
    ],
    ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
@pytest.mark.parametrize("vary", ["seed", "child", "position"])
def test_distribution_by_chi_square(params, vary):
    """Each of seed, child and position alone makes independent draws."""
    count = 20_000
    logits = distinct_logits(np.random.default_rng(5), vocab=12)
    inputs = repeated(params, count)
    inputs["seed"][:, 0] = 11
    number = np.arange(count)
    if vary == "seed":
        inputs["seed"][:, 0] = number
    else:
        inputs[vary][:] = number
    drawn = draw(np.tile(logits, (count, 1)), SamplingInputs(**inputs))
    seen, expected = np.bincount(drawn, minlength=12), distribution(logits, params) * count
    assert not seen[expected == 0].any()
    seen, expected = seen[expected > 0], expected[expected > 0]
    statistic = ((seen - expected) ** 2 / expected).sum()
    assert chi2.sf(statistic, len(expected) - 1) > 1e-3


def test_neighbouring_positions_and_children_are_independent():
    """Pairs of draws, from positions p and p + 1 or children 0 and 1, over the joint distribution."""
    count, vocab = 20_000, 4
    logits = np.tile(distinct_logits(np.random.default_rng(1), vocab, 2.0), (count, 1))
    params = SamplingParams()
    single = distribution(logits[0], params)
    for vary in ("child", "position"):
        draws = []
        for step in (0, 1):
            inputs = repeated(params, count)
            inputs["seed"][:, 0] = np.arange(count)
            inputs[vary][:] = step
            draws.append(np.array(draw(logits, SamplingInputs(**inputs))))
        seen = np.bincount(draws[0] * vocab + draws[1], minlength=vocab * vocab)
        expected = np.outer(single, single).ravel() * count
        assert chi2.sf(((seen - expected) ** 2 / expected).sum(), len(seen) - 1) > 1e-3


@settings(max_examples=40, deadline=None)
@given(st.lists(FILTERS | st.just({"temperature": 0}), min_size=8, max_size=8), st.integers(0, 2**31))
def test_rows_do_not_affect_each_other(fields, seed):
    """A row's token is the same alone, in any place of any company, and in a wider bucket."""
    params = [SamplingParams(**each) for each in fields]
    rng = np.random.default_rng(seed)
    logits = np.stack([distinct_logits(rng) for _ in params])
    together = draw(logits, inputs_of(params))
    order = rng.permutation(8)
    assert draw(logits[order], inputs_of([params[i] for i in order])) == [together[i] for i in order]
    padded = np.concatenate([logits, np.zeros((8, VOCAB), np.float32)])
    assert draw(padded, inputs_of(params, rows=16))[:8] == together
    for row in (0, 7):
        assert draw(logits[row : row + 1], inputs_of([params[row]])) == [together[row]]


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-40, 1e-6, 9.9e-6])
def test_tiny_temperatures_are_greedy(temperature):
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, 5:9] = [1.0, 3.0, 2.999, -50]
    params = SamplingParams(temperature=temperature)
    assert params.greedy
    assert draw(logits, inputs_of([params])) == [6]


EXTREMES = [
    SamplingParams(temperature=1e-5),
    SamplingParams(temperature=1e300),
    SamplingParams(top_p=1e-300),
    SamplingParams(top_k=2**40),
    SamplingParams(min_p=1.0),
    SamplingParams(min_p=1e-300),
    SamplingParams(temperature=1e-5, top_p=1e-46, top_k=1, min_p=1.0),
    SamplingParams(temperature=1e300, top_p=1e-46),
    SamplingParams(temperature=1e300, top_p=1 - 1e-16, top_k=5),
]


@pytest.mark.parametrize("spread", [1.0, 1e4, 1e30], ids="spread-{:g}".format)
def test_extreme_settings_never_draw_a_masked_token(spread):
    """Masked logits are -inf: no setting may turn them into NaN or +inf, nor fall back on token 0."""
    logits = np.full((len(EXTREMES), VOCAB), -np.inf, np.float32)
    logits[:, [7, 9, 20]] = np.array([1.0, 0.5, -1.0], np.float32) * np.float32(spread)
    for position in range(20):
        drawn = draw(logits, inputs_of(EXTREMES, outputs=position))
        assert set(drawn) <= {7, 9, 20}
        for row in (2, 4, 6, 7):  # these keep the best token alone
            assert drawn[row] == 7


def test_a_mixed_batch_leaves_a_greedy_row_alone():
    """Greedy with a ban, beside sampled rows: the same token as in a batch of greedy rows alone."""
    rng = np.random.default_rng(0)
    logits = np.stack([distinct_logits(rng) for _ in range(4)])
    banned = int(logits[0].argmax())
    logits[0, banned] = -np.inf
    params = [SamplingParams(temperature=t) for t in (0, 0.7, 1e-40, 1e-6)]
    greedy = np.asarray(jax.jit(lambda x: sample(x, None))(logits)).tolist()
    mixed = draw(logits, inputs_of(params))
    assert (
        [mixed[i] for i in (0, 2, 3)]
        == [greedy[i] for i in (0, 2, 3)]
        == logits.argmax(1)[[0, 2, 3]].tolist()
    )
    assert mixed[0] != banned


def test_keys_of_seeds_children_and_positions_are_all_different():
    """The draws of a request: as many different sequences as there are (seed, child) pairs."""
    logits = np.zeros((1, 1000), np.float32)
    sequences = set()
    for seed, child in itertools.product((0, 1, 2**32, 2**63 + 1, 2**64 - 1), range(3)):
        inputs = vars(inputs_of([SamplingParams(seed=seed)]))
        inputs["child"][:] = child
        tokens = []
        for position in range(4):
            inputs["position"][:] = position
            tokens += draw(logits, SamplingInputs(**inputs))
        sequences.add(tuple(tokens))
    assert len(sequences) == 15
