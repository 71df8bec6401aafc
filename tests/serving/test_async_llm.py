"""The asyncio API: concurrent streams, aborts, request ids, slow readers."""

import asyncio

import pytest
from golden_files import TINY_LLAMA, adapters_of

from lorajax.errors import AdapterNotFound, EngineClosed, RequestRejected
from serving import AsyncLLM, SamplingParams

NAMES = [None, "attn_r8", "all_r16"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
PROMPT = [(7 * i) % 300 + 2 for i in range(20)]


@pytest.fixture(scope="module")
def engine():
    adapters = {name: adapters_of(TINY_LLAMA)[name] for name in NAMES[1:]}
    options = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_pages": 160,
        "compilation_cache_dir": None,
    }
    engine = AsyncLLM(TINY_LLAMA, adapters=adapters, warmup=False, **options)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def llm(engine):
    yield engine
    engine._llm._loop.call(engine._llm._engine.check_idle)
    assert not engine._live


async def collect(llm, adapter, params=GREEDY, **options):
    return [output async for output in llm.generate(PROMPT, params, adapter=adapter, **options)]


def test_concurrent_streams_equal_the_synchronous_ones(llm):
    async def all_at_once():
        return await asyncio.gather(*(collect(llm, name) for name in NAMES * 3))

    expected = [o.outputs[0] for o in llm._llm.generate([PROMPT] * 3, GREEDY, adapter=NAMES)]
    for outputs, completion in zip(asyncio.run(all_at_once()), expected * 3, strict=True):
        assert outputs[-1].outputs[0].token_ids == completion.token_ids
        assert "".join(output.outputs[0].delta for output in outputs) == completion.text
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_a_slow_reader_gets_joined_outputs(llm):
    async def run():
        outputs = []
        async for output in llm.generate(PROMPT, GREEDY):
            outputs.append(output)
            await asyncio.sleep(0.2)
        return outputs

    outputs = asyncio.run(run())
    assert len(outputs) < 12
    assert "".join(output.outputs[0].delta for output in outputs) == outputs[-1].outputs[0].text


def test_closing_and_cancelling_abort(llm):
    async def run():
        stream = llm.generate(PROMPT, LONG, adapter="attn_r8")
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(collect(llm, "all_r16", LONG))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await llm.stats()

    stats = asyncio.run(run())
    assert stats.num_running == stats.num_waiting == 0


def test_abort_by_id_ends_the_iterator(llm):
    async def run():
        outputs = []
        async for output in llm.generate(PROMPT, LONG, request_id="x"):
            outputs.append(output)
            if len(outputs) == 2:
                await llm.abort("x")
        await llm.abort("x")
        await llm.abort("unknown")
        return outputs

    outputs = asyncio.run(run())
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert {output.request_id for output in outputs} == {"x"}


def test_an_id_in_use_is_refused_and_can_be_used_again(llm):
    async def run():
        stream = llm.generate(PROMPT, LONG, request_id="x")
        await anext(stream)
        with pytest.raises(RequestRejected, match="'x'"):
            await collect(llm, None, request_id="x")
        with pytest.raises(RequestRejected, match="empty"):
            await collect(llm, None, request_id="")
        await stream.aclose()
        for _ in range(20):  # abort, and at once the same id again
            stream = llm.generate(PROMPT, LONG, request_id="x")
            await anext(stream)
            await llm.abort("x")
            await stream.aclose()
        return await collect(llm, None, request_id="x")

    assert len(asyncio.run(run())[-1].outputs[0].token_ids) == 12


def test_bad_requests_and_adapters(llm):
    async def run():
        with pytest.raises(AdapterNotFound):
            await collect(llm, "typo")
        with pytest.raises(RequestRejected):
            [_ async for _ in llm.generate([], GREEDY)]
        status = await llm.load_adapter("v", adapters_of(TINY_LLAMA)["v_only"])
        (*_, last) = await collect(llm, "v")
        assert last.adapter_id == status.adapter_id
        assert await llm.unload_adapter("v", timeout=10) == 0
        assert {status.name for status in await llm.adapters()} == set(NAMES[1:])

    asyncio.run(run())


def test_closed():
    async def run():
        async with AsyncLLM(TINY_LLAMA, warmup=False, num_pages=8, compilation_cache_dir=None) as small:
            pass
        with pytest.raises(EngineClosed):
            await collect(small, None)

    asyncio.run(run())
