"""The Python API on a tiny model: the same tokens in any company, and every way a request can end."""

import itertools
import threading

import pytest
from golden_files import TINY_LLAMA, adapters_of, prompts_of

from lorajax.errors import (
    AdapterNotFound,
    ConfigError,
    EngineClosed,
    RequestRejected,
)
from serving import LLM, EngineConfig, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NAMES = [None, *adapters_of(TINY_LLAMA)]
PROMPTS = [
    [2 + (7 * i * j + i) % 300 for j in range(length)] for i, length in enumerate((1, 5, 16, 17, 33, 60))
]


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(shared_llm):
    """Greedy tokens of every (prompt, adapter), each request on its own."""
    return {
        (i, name): shared_llm.generate([prompt], GREEDY, adapter=name)[0].outputs[0].token_ids
        for i, prompt in enumerate(PROMPTS)
        for name in NAMES
    }


def test_adapters_differ_from_the_base_and_each_other(alone):
    answers = [tuple(itertools.chain(*(alone[i, name] for i in range(len(PROMPTS))))) for name in NAMES]
    assert len(set(answers)) == len(NAMES)


@pytest.mark.parametrize("order", ["as it is", "reversed", "by adapter"])
def test_any_mix_gives_each_request_its_solo_tokens(llm, alone, order):
    asked = list(itertools.product(range(len(PROMPTS)), NAMES))
    if order == "reversed":
        asked.reverse()
    if order == "by adapter":
        asked.sort(key=lambda pair: str(pair[1]))
    outputs = llm.generate([PROMPTS[i] for i, _ in asked], GREEDY, adapter=[name for _, name in asked])
    assert [output.adapter for output in outputs] == [name for _, name in asked]
    for (i, name), output in zip(asked, outputs, strict=True):
        assert output.outputs[0].token_ids == alone[i, name]
        assert output.num_cached_tokens % 16 == 0


def test_a_prefix_hit_changes_nothing(llm, alone):
    salted = llm.generate([PROMPTS[5]], GREEDY, adapter="attn_r8", cache_salt="fresh")[0]
    again = llm.generate([PROMPTS[5]], GREEDY, adapter="attn_r8", cache_salt="fresh")[0]
    assert (salted.num_cached_tokens, again.num_cached_tokens) == (0, 48)
    assert tokens_of([salted, again]) == [alone[5, "attn_r8"]] * 2


def test_a_prompt_of_whole_pages_still_computes_its_last_token(llm, alone):
    first, second = (llm.generate([PROMPTS[2]], GREEDY, cache_salt="whole")[0] for _ in range(2))
    assert second.num_cached_tokens == 0  # its one page holds the last token
    assert tokens_of([first, second]) == [alone[2, None]] * 2


def test_arrivals_while_others_run(llm, alone):
    """Requests that join a running batch one by one, from several threads."""
    results = {}

    def ask(i, name):
        results[i, name] = llm.generate([PROMPTS[i]], GREEDY, adapter=name)[0].outputs[0].token_ids

    asked = list(itertools.product(range(len(PROMPTS)), NAMES[:4]))
    threads = [threading.Thread(target=ask, args=pair) for pair in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == {pair: alone[pair] for pair in asked}


def test_streamed_deltas_join_to_the_whole(llm):
    whole = llm.generate([PROMPTS[3]], GREEDY, adapter="v_only")[0].outputs[0]
    outputs = list(llm.stream(PROMPTS[3], GREEDY, adapter="v_only"))
    assert "".join(output.outputs[0].delta for output in outputs) == whole.text
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 13))
    assert outputs[-1].outputs[0].token_ids == whole.token_ids


def test_closing_a_stream_aborts_its_request(llm):
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()
    assert llm.stats().num_running == 0


def test_seeded_requests_repeat_in_any_company(llm):
    params = SamplingParams(temperature=0.9, seed=42, max_tokens=10, ignore_eos=True)
    (alone,) = tokens_of(llm.generate([PROMPTS[1]], params, adapter="all_r16"))
    others = [SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)] * 6
    for row in (0, 3, 6):
        mixed = [*others[:row], params, *others[row:]]
        outputs = llm.generate([PROMPTS[1]] * 7, mixed, adapter="all_r16")
        assert tokens_of(outputs)[row] == alone
        assert len({tuple(tokens) for tokens in tokens_of(outputs)}) > 1


def test_children_of_one_seed_differ_and_repeat(llm):
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=8, ignore_eos=True)
    first, second = (llm.generate([PROMPTS[4]], params, adapter="v_only")[0] for _ in range(2))
    children = [tuple(child.token_ids) for child in first.outputs]
    assert len(set(children)) == 4
    assert [tuple(child.token_ids) for child in second.outputs] == children
    assert [child.index for child in first.outputs] == [0, 1, 2, 3]


def test_logprobs_are_of_the_raw_logits(llm):
    greedy = SamplingParams(temperature=0, max_tokens=3, logprobs=4, ignore_eos=True)
    hot = SamplingParams(temperature=2.0, seed=1, max_tokens=3, logprobs=4, ignore_eos=True)
    reference = llm.generate([PROMPTS[4]], greedy)[0].outputs[0].logprobs[0]
    sampled = llm.generate([PROMPTS[4]], hot)[0].outputs[0].logprobs[0]
    shared = set(reference) & set(sampled)
    assert len(shared) >= 4
    for token in shared:
        assert abs(reference[token] - sampled[token]) < 1e-5
        assert reference[token] <= 0
    best = max(reference, key=reference.get)
    assert (reference[best].rank, reference[best].logprob) == (1, reference[best])


def test_stop_string_and_stop_id(llm):
    whole = llm.generate([PROMPTS[5]], GREEDY)[0].outputs[0]
    stop_id = whole.token_ids[4]
    by_id = llm.generate(
        [PROMPTS[5]], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop_id])
    )[0]
    assert by_id.outputs[0].token_ids == whole.token_ids[: whole.token_ids.index(stop_id) + 1]
    assert (by_id.outputs[0].finish_reason, by_id.outputs[0].stop_reason) == ("stop", stop_id)
    middle = whole.text[3:6]
    by_text = llm.generate([PROMPTS[5]], SamplingParams(temperature=0, max_tokens=12, stop=[middle]))[0]
    assert by_text.outputs[0].text == whole.text[: whole.text.index(middle)]
    assert (by_text.outputs[0].finish_reason, by_text.outputs[0].stop_reason) == ("stop", middle)


def test_finish_by_length_and_exact_limits(llm):
    room = llm._engine._max_model_len - 500
    output = llm.generate([[5] * 500], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == room
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        ([], {}, RequestRejected, "empty"),
        ([320], {}, RequestRejected, "0 to 319"),
        ([-1], {}, RequestRejected, "0 to 319"),
        ([True, 3], {}, RequestRejected, "0 to 319"),
        ([5] * 512, {}, RequestRejected, "511"),
        ([5] * 505, {"sampling_params": SamplingParams(max_tokens=8)}, RequestRejected, "512"),
        ([5], {"adapter": "typo"}, AdapterNotFound, "'typo'"),
        ([5], {"adapter": ""}, AdapterNotFound, "''"),
        ([5], {"adapter": "ALL_r16"}, AdapterNotFound, "ALL_r16"),
        ([5], {"adapter": ["v_only", "v_only"]}, RequestRejected, "2 entries"),
    ],
)
def test_a_bad_request_is_one_typed_error_and_disturbs_nobody(llm, alone, prompt, options, error, words):
    good = llm.stream(PROMPTS[1], GREEDY, adapter="attn_r8")
    first = next(good)
    with pytest.raises(error, match=words):
        llm.generate([prompt], **options)
    *_, last = good
    assert first.outputs[0].token_ids == alone[1, "attn_r8"][:1]
    assert last.outputs[0].token_ids == alone[1, "attn_r8"]


def test_one_bad_prompt_of_many_starts_none(llm):
    finished = llm.stats().num_finished
    with pytest.raises(AdapterNotFound):
        llm.generate(PROMPTS[:3], GREEDY, adapter=["v_only", "attn_r8", "nobody"])
    assert llm.stats().num_finished == finished
    assert all(status.num_running + status.num_waiting == 0 for status in llm.adapters())


def test_unknown_options_are_refused(llm):
    with pytest.raises(TypeError, match="max_lorras"):
        LLM(TINY_LLAMA, max_lorras=4)
    with pytest.raises(ConfigError, match="config"):
        LLM(TINY_LLAMA, config=EngineConfig(), max_loras=2)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


def test_results_and_times_of_an_output(llm):
    output = llm.generate([PROMPTS[3]], GREEDY, adapter="v_only")[0]
    assert output.prompt is None
    assert output.prompt_token_ids == PROMPTS[3]
    assert output.adapter_id > 0
    times = output.metrics
    assert 0 <= times.queue_time <= times.time_to_first_token <= times.end_to_end_time


def test_text_prompts_use_the_tokenizer(llm):
    prompt = "ab"
    output = llm.generate(prompt, GREEDY)[0]
    assert output.prompt == prompt
    assert output.prompt_token_ids == llm._engine.tokenizer.encode(prompt)


def test_closed_engine(tmp_path):
    small = LLM(TINY_LLAMA, warmup=False, compilation_cache_dir=None, num_pages=8)
    small.close()
    small.close()
    with pytest.raises(EngineClosed):
        small.generate([prompts_of(TINY_LLAMA)[1]], GREEDY)
