"""Sampling settings through the engine: one batch of all kinds against `lorajax.forward` and float64."""

import itertools
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import TINY_LLAMA, adapters_of
from sampling_reference import adjusted, log_softmax

import lorajax
from lorajax.errors import ConfigError, RequestRejected
from serving import LLM, SamplingParams

EOS = 1
PROMPT = [5, 9, 9, 14, 200, 31, 77, 5]
ADAPTERS = [None, "all_r16", "v_only", "lm_head_embed"]


@pytest.fixture(scope="module")
def logits_of():
    """Logits after each token of a sequence, from the model library alone."""
    model, _ = lorajax.load_model(TINY_LLAMA, dtype="float32")
    loaded = {name: lorajax.load_adapter(path) for name, path in adapters_of(TINY_LLAMA).items()}

    def logits(token_ids, name):
        # padded to one length, so that it compiles once: later tokens do not reach back
        padded = jnp.array([[*token_ids, *[0] * (64 - len(token_ids))]])
        return np.asarray(lorajax.forward(model, padded, loaded.get(name)))[0, : len(token_ids)]

    return logits


def greedy(**fields):
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 3, **fields})


SETTINGS = [
    greedy(),
    greedy(presence_penalty=1.5),
    greedy(frequency_penalty=0.8),
    greedy(frequency_penalty=-0.5, presence_penalty=-0.5),
    greedy(repetition_penalty=1.8),
    greedy(repetition_penalty=0.6),
    greedy(logit_bias={7: 4.0, 8: -100.0, 200: 2.5}),
    greedy(allowed_token_ids=[*range(40, 60), 319]),
    greedy(min_tokens=6, stop_token_ids=list(range(2, 250))),
    greedy(
        presence_penalty=0.5,
        frequency_penalty=0.7,
        repetition_penalty=1.3,
        logit_bias={50: 3.0},
        allowed_token_ids=list(range(30, 90)),
        min_tokens=12,
        stop_token_ids=[44, 45],
    ),
]


def assert_as_defined(output, params, prompt, name, logits_of):
    """Each token is the best of the adjusted logits, and its log-probability that of the raw ones."""
    (completion,) = output.outputs
    tokens = completion.token_ids
    logits = logits_of([*prompt, *tokens], name)[len(prompt) - 1 : -1]
    raw = log_softmax(logits)
    for step, token in enumerate(tokens):
        values = adjusted(logits[step], params, prompt, tokens[:step], params.stop_token_ids)
        assert values[token] >= values.max() - 1e-4  # a near tie may go either way in float32
        found = completion.logprobs[step]
        assert next(iter(found)) == token
        assert abs(found[token] - raw[step, token]) < 1e-5
        best = np.argsort(-raw[step])[:3]
        assert set(found) == {token, *best.tolist()}
        np.testing.assert_allclose([found[i] for i in best.tolist()], raw[step, best], atol=1e-5)
    assert completion.cumulative_logprob == pytest.approx(raw[np.arange(len(tokens)), tokens].sum(), abs=1e-4)


def test_all_settings_and_adapters_in_one_batch(llm, logits_of):
    asked = list(itertools.product(SETTINGS, ADAPTERS))
    outputs = llm.generate([PROMPT] * len(asked), [p for p, _ in asked], adapter=[name for _, name in asked])
    for (params, name), output in zip(asked, outputs, strict=True):
        assert_as_defined(output, params, PROMPT, name, logits_of)
    plain = [o.outputs[0].token_ids for (p, _), o in zip(asked, outputs, strict=True) if p == SETTINGS[0]]
    assert plain == [
        llm.generate([PROMPT], SETTINGS[0], adapter=name)[0].outputs[0].token_ids for name in ADAPTERS
    ]
    assert llm.stats().num_compilations == 0


@pytest.mark.parametrize(
    "params", SETTINGS, ids=lambda p: "-".join(sorted(k for k, v in vars(p).items() if v))
)
def test_a_draw_is_from_the_adjusted_logits(llm, logits_of, params):
    """top_k=1 draws the best token: a sampled row must then give what a greedy row gives."""
    fields = vars(params) | {"temperature": 0.7, "top_k": 1}
    output = llm.generate([PROMPT], SamplingParams(**fields), adapter="all_r16")[0]
    assert_as_defined(output, params, PROMPT, "all_r16", logits_of)
    assert (
        output.outputs[0].token_ids
        == llm.generate([PROMPT], params, adapter="all_r16")[0].outputs[0].token_ids
    )


def test_penalties_keep_counting_after_a_preemption(logits_of):
    """More output than there are pages: requests are computed again, with all they had said."""
    params = greedy(max_tokens=40, frequency_penalty=0.3, repetition_penalty=1.2, min_tokens=30)
    with LLM(
        TINY_LLAMA, num_pages=8, max_num_seqs=4, max_num_batched_tokens=64, max_loras=0, warmup=False,
        compilation_cache_dir=None,
    ) as small:  # fmt: skip
        outputs = small.generate([[*PROMPT, i] for i in range(4)], params)
        assert small.stats().num_preemptions > 0
    for i, output in enumerate(outputs):
        assert_as_defined(output, params, [*PROMPT, i], None, logits_of)


@pytest.mark.parametrize("temperature", [0, 0.01, 0.7, 2])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.1}, {"top_k": 1}, {"repetition_penalty": 1.5}])
def test_logprobs_mean_the_same_whatever_the_settings(llm, logits_of, temperature, fields):
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=3, logprobs=0, ignore_eos=True, **fields
    )
    completion = llm.generate([PROMPT], params)[0].outputs[0]
    raw = log_softmax(logits_of([*PROMPT, *completion.token_ids], None)[len(PROMPT) - 1 : -1])
    for step, token in enumerate(completion.token_ids):
        assert list(completion.logprobs[step]) == [token]
        assert abs(completion.logprobs[step][token] - raw[step, token]) < 1e-5
        assert completion.logprobs[step][token] < 0


# ---- ends ----


def test_min_tokens_holds_back_eos_and_stop_ids(llm):
    longs = {"temperature": 0, "max_tokens": 20, "min_tokens": 5}
    for fields, reason in [
        ({"logit_bias": {EOS: 100}}, None),
        ({"logit_bias": {40: 100}, "stop_token_ids": [40]}, 40),
    ]:
        done = llm.generate([PROMPT], SamplingParams(**longs, **fields))[0].outputs[0]
        assert len(done.token_ids) == 6
        assert (done.finish_reason, done.stop_reason) == ("stop", reason)
        assert done.token_ids[-1] not in done.token_ids[:-1]
        assert "<|eos|>" not in done.text


def test_ignore_eos_does_not_ignore_stop_ids(llm):
    fields = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    endless = llm.generate([PROMPT], SamplingParams(**fields, logit_bias={EOS: 100}))[0].outputs[0]
    assert (endless.token_ids, endless.finish_reason) == ([EOS] * 8, "length")
    stopped = SamplingParams(**fields, logit_bias={EOS: 100}, stop_token_ids=[EOS])
    done = llm.generate([PROMPT], stopped)[0].outputs[0]
    assert (done.token_ids, done.finish_reason, done.stop_reason) == ([EOS], "stop", EOS)
    later = SamplingParams(**fields, logit_bias={EOS: 100}, stop_token_ids=[EOS], min_tokens=3)
    done = llm.generate([PROMPT], later)[0].outputs[0]
    assert len(done.token_ids) == 4
    assert EOS not in done.token_ids[:3]


def test_every_declared_eos_ends_a_text(tmp_path):
    """config.json says 1, generation_config.json [1, 11], the tokenizer has its own: all of them end."""
    folder = tmp_path / "several"
    shutil.copytree(TINY_LLAMA, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 11]}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    third = json.loads((folder / "tokenizer.json").read_text())["added_tokens"][-1]
    assert third["id"] not in (1, 11)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": third["content"]}))
    with LLM(folder, max_loras=0, warmup=False, num_pages=16, compilation_cache_dir=None) as several:
        for eos in (1, 11, third["id"]):
            push = {"temperature": 0, "max_tokens": 6, "logit_bias": {eos: 100}}
            done = several.generate([PROMPT], SamplingParams(**push))[0].outputs[0]
            assert (done.token_ids, done.finish_reason, done.stop_reason) == ([eos], "stop", None)
            done = several.generate([PROMPT], SamplingParams(**push, ignore_eos=True))[0].outputs[0]
            assert (done.token_ids, done.finish_reason) == ([eos] * 6, "length")
            done = several.generate([PROMPT], SamplingParams(**push, min_tokens=4))[0].outputs[0]
            assert len(done.token_ids) == 5
            assert not {1, 11, third["id"]} & set(done.token_ids[:4])


# ---- refusals ----


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_temperature_that_means_nothing_is_refused(value):
    with pytest.raises(ConfigError, match="temperature"):
        SamplingParams(temperature=value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logit_bias": {320: 1.0}}, "logit_bias has token id 320; allowed: 0 to 319"),
        ({"allowed_token_ids": [320]}, "allowed_token_ids has token id 320"),
        ({"allowed_token_ids": [EOS], "min_tokens": 2}, "every allowed token ends the request"),
    ],
)
def test_settings_that_the_model_cannot_serve_are_refused(llm, fields, words):
    with pytest.raises(RequestRejected, match=words):
        llm.generate([PROMPT], SamplingParams(**fields), adapter="v_only")
    assert all(status.num_running + status.num_waiting == 0 for status in llm.adapters())


# ---- seeds ----

SEEDED = SamplingParams(temperature=0.8, seed=42, max_tokens=12, ignore_eos=True)
UNSEEDED = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True)


def tokens_of(outputs):
    return [[child.token_ids for child in output.outputs] for output in outputs]


@pytest.mark.parametrize("penalised", [False, True])
def test_a_seed_gives_the_same_tokens_in_any_company(llm, penalised):
    """One and seven mates, seeded or not, on other adapters, adjusted or not; another row; a prefix hit."""
    fields = vars(SEEDED) | ({"frequency_penalty": 0.5} if penalised else {})
    params = SamplingParams(**fields)
    (alone,) = tokens_of(llm.generate([PROMPT * 4], params, adapter="all_r16", cache_salt=f"a{penalised}"))
    other = SamplingParams(**(vars(UNSEEDED) | {"presence_penalty": 1.0, "logprobs": 2}))
    for mate, num_mates, row in itertools.product((UNSEEDED, SEEDED, other), (1, 7), (0, -1)):
        asked = [mate] * num_mates
        asked.insert(row if row == 0 else num_mates, params)
        names = [ADAPTERS[i % 4] for i in range(num_mates)]
        names.insert(row if row == 0 else num_mates, "all_r16")
        outputs = llm.generate([PROMPT * 4] * len(asked), asked, adapter=names, cache_salt=f"a{penalised}")
        assert outputs[row].num_cached_tokens > 0
        assert tokens_of(outputs)[row] == alone


def test_a_seed_gives_the_same_tokens_to_a_late_arrival(llm):
    (alone,) = tokens_of(llm.generate([PROMPT], SEEDED))
    stream = llm.stream(PROMPT, SamplingParams(temperature=1, max_tokens=60, ignore_eos=True))
    next(stream)
    assert tokens_of(llm.generate([PROMPT], SEEDED)) == [alone]
    stream.close()


def test_a_seed_gives_the_same_tokens_after_a_preemption(llm):
    params = SamplingParams(temperature=0.8, seed=42, n=2, max_tokens=40, ignore_eos=True)
    prompts = [[*PROMPT, i] for i in range(4)]
    expected = tokens_of(llm.generate(prompts, params))
    with LLM(
        TINY_LLAMA, num_pages=8, max_num_seqs=4, max_num_batched_tokens=64, max_loras=0, warmup=False,
        compilation_cache_dir=None,
    ) as small:  # fmt: skip
        assert tokens_of(small.generate(prompts, params)) == expected
        assert small.stats().num_preemptions > 0


def test_children_of_a_seed_differ_from_each_other_and_not_from_run_to_run(llm):
    params = SamplingParams(temperature=0.8, seed=42, n=4, max_tokens=12, ignore_eos=True)
    (children,) = tokens_of(llm.generate([PROMPT], params))
    assert len({tuple(tokens) for tokens in children}) == 4
    assert tokens_of(llm.generate([PROMPT] * 2, [UNSEEDED, params]))[1] == children
    assert tokens_of(llm.generate([PROMPT], SEEDED))[0] == children[:1]


def test_without_a_seed_every_request_and_run_differs(llm):
    many = SamplingParams(**(vars(UNSEEDED) | {"n": 3}))
    runs = [tokens_of(llm.generate([PROMPT] * 2, many)) for _ in range(2)]
    children = [tuple(tokens) for run in runs for output in run for tokens in output]
    assert len(set(children)) == 12


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1])
def test_every_64_bit_seed_is_one_of_its_own(llm, seed):
    params = SamplingParams(temperature=1, seed=seed, max_tokens=8, ignore_eos=True)
    first, again, other = tokens_of(
        llm.generate(
            [PROMPT] * 3, [params, params, SamplingParams(**(vars(params) | {"seed": seed % 2**32 + 1}))]
        )
    )
    assert first == again != other
