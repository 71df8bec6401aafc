"""SmolLM2-135M and its four adapters, in one batch, against transformers + PEFT."""

import jax
import pytest
from golden_files import smollm2_answers

from serving import LLM, SamplingParams
from serving.demo import find_smollm2, unpack_adapters

NEAR_TIE = 0.05
"""Where the best two logits are closer than this, rounding decides which is drawn."""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    adapters = unpack_adapters(tmp_path_factory.mktemp("adapters"))
    with LLM(find_smollm2(), adapters=adapters, max_lora_rank=32, max_model_len=256, max_num_seqs=32) as llm:
        yield llm


def test_one_mixed_batch_equals_transformers_and_peft(smollm2):
    answers = smollm2_answers()
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=2)
    outputs = smollm2.generate(
        [answer["prompt_token_ids"] for answer in answers],
        params,
        adapter=[answer["adapter"] for answer in answers],
    )
    exact = 0
    for answer, output in zip(answers, outputs, strict=True):
        ours, theirs = output.outputs[0], answer["token_ids"]
        for i, (token, expected) in enumerate(zip(ours.token_ids, theirs, strict=False)):
            chosen, runner_up = list(ours.logprobs[i].values())[:2]
            if token != expected:
                assert chosen - runner_up < NEAR_TIE, (
                    f"{answer['adapter']}: {answer['question']} at token {i}"
                )
                break
            assert abs(chosen - answer["logprobs"][i]) < 2e-3
        else:
            assert len(ours.token_ids) == len(theirs)
            assert ours.text == answer["text"]
            exact += 1
    assert exact >= 0.9 * len(answers)
    assert {output.adapter for output in outputs} == {None, "caps", "json", "pirate", "yesno"}


def test_chat_renders_the_prompts_that_the_model_was_trained_on(smollm2):
    for answer in smollm2_answers():
        message = {"role": "user", "content": answer["question"]}
        assert smollm2.render_chat([message]) == answer["prompt_token_ids"]


def test_nothing_compiles_in_any_mix(smollm2):
    before = smollm2.stats().num_compilations
    prompts = [list(range(10, 10 + length)) for length in (1, 15, 16, 17, 100, 3, 40)]
    params = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=0.7, top_k=5, max_tokens=4, seed=1),
        SamplingParams(temperature=0.7, top_p=0.5, max_tokens=2),
        SamplingParams(temperature=0, logprobs=3, max_tokens=5),
        SamplingParams(temperature=1.0, min_p=0.1, max_tokens=3, n=2),
        SamplingParams(temperature=0, max_tokens=6, stop="e"),
        SamplingParams(temperature=0, max_tokens=2, stop_token_ids=[5]),
    ]
    names = [None, "caps", "json", "pirate", "yesno", None, "caps"]
    with jax.no_tracing():
        outputs = smollm2.generate(prompts, params, adapter=names)
        smollm2.blend_adapters("half", {"caps": 0.5, "pirate": 0.5})
        outputs += smollm2.generate(prompts[:2], params[:2], adapter=["half", "json"])
        assert smollm2.unload_adapter("half") == 0
    assert all(output.finished for output in outputs)
    assert smollm2.stats().num_compilations == before == 0


def test_loading_while_tokens_stream_changes_none_of_them(smollm2):
    prompt = smollm2.render_chat([{"role": "user", "content": "Tell me about horses."}])
    params = SamplingParams(temperature=0, max_tokens=24)
    alone = smollm2.generate([prompt], params, adapter="pirate")[0].outputs[0]
    deltas = []
    for number, output in enumerate(smollm2.stream(prompt, params, adapter="pirate")):
        deltas.append(output.outputs[0].delta)
        if number in (3, 6):
            smollm2.blend_adapters(f"extra-{number}", {"caps": 1.0, "pirate": 0.5})
    assert output.outputs[0].token_ids == alone.token_ids
    assert "".join(deltas) == alone.text == output.outputs[0].text
    for number in (3, 6):
        smollm2.unload_adapter(f"extra-{number}")


def test_sampling_settings_have_their_effect(smollm2):
    prompt = smollm2.render_chat([{"role": "user", "content": "Write one sentence about the sea."}])
    hot = SamplingParams(temperature=1.5, max_tokens=8)
    assert len({tuple(o.outputs[0].token_ids) for o in smollm2.generate([prompt] * 4, hot)}) > 1
    greedy = smollm2.generate([prompt], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids
    for one in (SamplingParams(top_k=1, max_tokens=8), SamplingParams(top_p=1e-6, max_tokens=8)):
        assert smollm2.generate([prompt], one)[0].outputs[0].token_ids == greedy
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=8)
    first, second = (smollm2.generate([prompt], seeded)[0].outputs[0].token_ids for _ in range(2))
    assert first == second
