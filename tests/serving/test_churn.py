"""Adapters under fire: thousands of requests while adapters come, go and are replaced."""

import random
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from golden_files import TINY_LLAMA, adapters_of

import lorajax
from lorajax.errors import AdapterNotFound
from serving import LLM, SamplingParams

NUM_NAMES, NUM_CONTENTS, NUM_REQUESTS, IN_FLIGHT = 64, 80, 10_000, 48
PROMPTS = [[(13 * i + 7 * j) % 300 + 2 for j in range(length)] for i, length in enumerate((1, 9, 17, 40))]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def random_adapter(seed):
    """Another adapter on q and v, of a rank from 1 to 16."""
    rng = np.random.default_rng(seed)
    template = lorajax.load_adapter(adapters_of(TINY_LLAMA)["attn_r8"])
    rank = int(rng.integers(1, 17))
    modules = {}
    for path, module in template.modules.items():
        if path.endswith(("q_proj", "v_proj")):
            a = rng.standard_normal((rank, module.a.shape[1]), np.float32) * 0.3
            b = rng.standard_normal((module.b.shape[0], rank), np.float32) * 0.3
            modules[path] = type(module)(a=a, b=b, scaling=1.0)
    return lorajax.AdapterWeights(modules=modules)


@pytest.fixture(scope="module")
def contents():
    return [random_adapter(seed) for seed in range(NUM_CONTENTS)]


@pytest.fixture
def llm():
    with LLM(
        TINY_LLAMA,
        max_loras=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_pages=40,
        compilation_cache_dir=None,
    ) as llm:
        yield llm


@pytest.mark.slow
def test_every_output_is_its_adapters_solo_output(llm, contents):
    solo = {}
    for number, weights in enumerate(contents):
        llm.load_adapter("solo", weights, replace=True)
        for i, prompt in enumerate(PROMPTS):
            solo[number, i] = llm.generate([prompt], GREEDY, adapter="solo")[0].outputs[0].token_ids
    llm.unload_adapter("solo")
    for i, prompt in enumerate(PROMPTS):
        solo[None, i] = llm.generate([prompt], GREEDY)[0].outputs[0].token_ids
    assert len({tuple(tokens) for tokens in solo.values()}) > NUM_CONTENTS

    rng = random.Random(0)
    content_of_id, loaded = {0: None}, []
    zipf = [1 / (rank + 1) for rank in range(NUM_NAMES)]

    def load(name, replace):
        number = rng.randrange(NUM_CONTENTS)
        status = llm.load_adapter(name, contents[number], replace=replace)
        content_of_id[status.adapter_id] = number
        if name not in loaded:
            loaded.append(name)

    for number in range(NUM_NAMES):
        load(f"adapter-{number}", replace=False)
    streams, unloads, submitted, finished, aborted = {}, {}, 0, 0, 0
    with ThreadPoolExecutor(4) as unloading:
        while finished + aborted < NUM_REQUESTS:
            while len(streams) < IN_FLIGHT and submitted < NUM_REQUESTS:
                i = rng.randrange(len(PROMPTS))
                name = rng.choices([None, *loaded], [0.3, *zipf[: len(loaded)]])[0]
                prepared = llm._engine.prepare(
                    PROMPTS[i], GREEDY, name, request_id=str(submitted), final_only=True
                )
                (stream,) = llm._loop.submit([prepared])
                streams[submitted] = (stream, i)
                submitted += 1
            if rng.random() < 0.10:
                llm._loop.abort(str(rng.choice(list(streams))))
            if rng.random() < 0.05:
                load(rng.choice(loaded), replace=True)
            if rng.random() < 0.03 and len(loaded) > 32:
                name = loaded.pop(rng.randrange(len(loaded)))
                unloads[name] = unloading.submit(llm.unload_adapter, name)
            if rng.random() < 0.03:
                missing = sorted(name for name in unloads if unloads[name].done() and name not in loaded)
                if missing:
                    load(rng.choice(missing), replace=False)
            oldest = min(streams)
            stream, i = streams.pop(oldest)
            *_, output = stream
            if output.outputs[0].finish_reason == "abort":
                aborted += 1
            else:
                finished += 1
                assert output.outputs[0].token_ids == solo[content_of_id[output.adapter_id], i], oldest
    assert all(unload.result() >= 0 for unload in unloads.values())
    assert len(unloads) > NUM_NAMES // 2
    assert finished > 0.8 * NUM_REQUESTS
    assert aborted > 0.02 * NUM_REQUESTS
    for status in llm.adapters():
        assert (status.num_running, status.num_waiting) == (0, 0)
        llm.unload_adapter(status.name)
    llm._loop.call(llm._engine.check_idle)
    stats = llm.stats()
    assert stats.num_adapters == stats.num_resident_adapters == stats.num_compilations == 0
    assert stats.num_free_pages == stats.num_pages
    with pytest.raises(AdapterNotFound):
        llm.generate([PROMPTS[0]], GREEDY, adapter=loaded[0])


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def device_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.slow
def test_memory_is_flat_over_500_loads_and_unloads(llm):
    folders = list(adapters_of(TINY_LLAMA).values())

    def cycle(number):
        name = f"fresh-{number}"
        llm.load_adapter(name, folders[number % len(folders)])
        llm.generate([PROMPTS[number % len(PROMPTS)]], GREEDY, adapter=name)
        assert llm.unload_adapter(name) == 0

    for number in range(100):
        cycle(number)
    host, device = resident_bytes(), device_bytes()
    for number in range(100, 600):
        cycle(number)
    assert device_bytes() == device
    grown = resident_bytes() - host
    print(f"resident memory grew by {grown / 2**20:.2f} MiB over 500 loads and unloads")
    assert grown < 3 * 2**20
