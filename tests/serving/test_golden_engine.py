"""The engine's own prefill and decode, token by token, against the logits of transformers + PEFT."""

import numpy as np
import pytest
from golden_files import TINY_LLAMA, adapters_of, expected_logits, prompts_of

from serving.config import EngineConfig
from serving.engine_builder import build_engine
from serving.request import Request
from serving.sampling_params import SamplingParams


def teacher_forced_logits(engine, sequences):
    """Run all (name, adapter_id, tokens, first) at once, forcing the tokens: (name, position, logits) each.

    The first `first` tokens of a sequence are its prompt, the rest are fed one decode at a time.
    """
    scheduler, builder, runner = engine._scheduler, engine._builder, engine._runner
    forced = {}
    for number, (name, adapter_id, tokens, first) in enumerate(sequences):
        rest = len(tokens) - first + 1
        request = Request(
            request_id=str(number),
            prompt_token_ids=tokens[:first],
            params=SamplingParams(max_tokens=rest, temperature=0),
            adapter_id=adapter_id,
            max_tokens=rest,
        )
        forced[request.request_id] = (name, tokens)
        scheduler.add(request)
    while scheduler.has_work:
        batch = scheduler.schedule()
        for write in batch.slot_writes:
            runner.write_slot(write.slot, engine.adapters.packed(write.adapter_id))
        sampled = []
        for padded in [
            *([builder.build_decode(batch.decodes)] if batch.decodes else []),
            *([builder.build_prefill(batch.prefills)] if batch.prefills else []),
        ]:
            rows = np.asarray(runner.logits(padded))
            for row, request in enumerate(padded.sampled):
                name, tokens = forced[request.request_id]
                position = request.num_tokens - 1
                yield name, position, rows[row]
                sampled.append((request, tokens[position + 1] if position + 1 < len(tokens) else 0))
        scheduler.update(batch, sampled)


@pytest.mark.parametrize("first", [1, 5, 40], ids=lambda first: f"prompt-of-{first}")
@pytest.mark.parametrize("max_loras", [6, 2], ids=lambda n: f"max_loras-{n}")
def test_all_adapters_in_one_batch(first, max_loras):
    engine = build_engine(
        TINY_LLAMA,
        EngineConfig(
            max_loras=max_loras,
            max_num_seqs=32,
            max_num_batched_tokens=64,
            num_pages=160,
            warmup=False,
            compilation_cache_dir=None,
        ),
    )
    expected = expected_logits(TINY_LLAMA)
    ids = {"base": 0}
    for name, path in adapters_of(TINY_LLAMA).items():
        ids[name] = engine.adapters.load(name, path).adapter_id
    sequences = [
        (f"{name}/{i}", adapter_id, prompt, min(first, len(prompt)))
        for i, prompt in enumerate(prompts_of(TINY_LLAMA))
        for name, adapter_id in ids.items()
    ]
    checked = 0
    for name, position, logits in teacher_forced_logits(engine, sequences):
        np.testing.assert_allclose(logits, expected[name][position], atol=1e-4, rtol=0, err_msg=name)
        checked += 1
    assert checked == sum(len(tokens) - begin + 1 for _, _, tokens, begin in sequences)
