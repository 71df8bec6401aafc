"""The asyncio API: concurrent streams, aborts, request ids, slow readers."""

import asyncio
import contextlib
import random
import time

import pytest
from golden_files import TINY_LLAMA, adapters_of

from lorajax.errors import AdapterNotFound, EngineClosed, RequestRejected
from serving import AsyncLLM, SamplingParams
from serving.kv_events import AllBlocksCleared
from serving.mailbox import EventMailbox

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


def test_cancelling_while_the_prompt_is_prepared_leaves_nothing(llm):
    async def run():
        for pause in (0, 0, 0.0005, 0.001, 0.002):
            tasks = [asyncio.create_task(collect(llm, "attn_r8", LONG)) for _ in range(20)]
            await asyncio.sleep(pause)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert await llm.unload_adapter("attn_r8", timeout=20) >= 0  # nobody uses it any more
        await llm.load_adapter("attn_r8", adapters_of(TINY_LLAMA)["attn_r8"])

    asyncio.run(run())


def test_an_abandoned_event_loop_does_not_stop_the_engine(llm):
    loop = asyncio.new_event_loop()
    stream = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    loop.run_until_complete(anext(stream))
    loop.close()
    try:
        assert len(asyncio.run(collect(llm, None))[-1].outputs[0].token_ids) == 12
    finally:
        with contextlib.suppress(StopIteration, GeneratorExit, RuntimeError):
            stream.aclose().send(None)


def test_what_waits_for_a_blocked_event_loop_does_not_grow(llm):
    async def run():
        outputs = []
        async for output in llm.generate(PROMPT, GREEDY):
            outputs.append(output)
            time.sleep(0.3)  # the whole event loop stands still
        return outputs

    outputs = asyncio.run(run())
    assert len(outputs) <= 3
    assert "".join(output.outputs[0].delta for output in outputs) == outputs[-1].outputs[0].text


def test_an_id_is_free_when_its_last_output_is_there(llm):
    async def run():
        stream = llm.generate(PROMPT, GREEDY, request_id="x", final_only=True)
        assert (await anext(stream)).finished
        newer = llm.generate(PROMPT, LONG, request_id="x")
        await anext(newer)
        await stream.aclose()  # a late cancel: not of the newer request
        assert not (await anext(newer)).finished
        await newer.aclose()

    asyncio.run(run())


def test_storm_of_one_id(llm):
    """Cancelled and asked again under the same id, with random pauses: no request meets another's end."""
    pauses = random.Random(5)

    async def run():
        for _ in range(200):
            stream = llm.generate(PROMPT, LONG, request_id="x", adapter=pauses.choice(NAMES))
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(pauses.choice([0, 0, 0.001, 0.004]))
            if pauses.random() < 0.5:
                await llm.abort("x")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()
        return await collect(llm, None, request_id="x")

    outputs = asyncio.run(run())
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_waiting_unloads_do_not_hold_up_requests(llm):
    async def run():
        names = [f"copy{i}" for i in range(8)]
        users = []
        for name in names:
            await llm.load_adapter(name, adapters_of(TINY_LLAMA)["v_only"])
            users.append(asyncio.create_task(collect(llm, name, LONG)))
        while sum(status.num_running + status.num_waiting for status in await llm.adapters()) < len(names):
            await asyncio.sleep(0.005)
        unloads = [asyncio.create_task(llm.unload_adapter(name)) for name in names]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(collect(llm, None), 30)
        for user in users:
            user.cancel()
        assert await asyncio.gather(*unloads) == [1] * len(names)

    asyncio.run(run())


def test_observers_see_every_output(llm):
    seen = []
    llm.observe(seen.append)

    async def run():
        stream = llm.generate(PROMPT, LONG)
        await anext(stream)
        await stream.aclose()
        await llm.stats()
        return await collect(llm, "all_r16", final_only=True)

    outputs = asyncio.run(run())
    llm._observers.remove(seen.append)
    assert [output.finished for output in outputs] == [True]
    assert [output.outputs[0].finish_reason for output in seen if output.finished] == ["abort", "length"]


def test_closing_ends_streams_and_calls():
    async def run():
        llm = AsyncLLM(TINY_LLAMA, warmup=False, num_pages=64, compilation_cache_dir=None)
        stream = llm.generate(PROMPT, LONG)
        await anext(stream)
        llm.check_health()
        await llm.close()
        *_, last = [output async for output in stream]
        assert last.outputs[0].finish_reason == "abort"
        for call in (llm.stats(), llm.load_adapter("x", "y"), llm.render_chat([]), collect(llm, None)):
            with pytest.raises(EngineClosed):
                await call
        with pytest.raises(EngineClosed):
            llm.check_health()
        await llm.close()

    asyncio.run(run())


def test_kv_events_arrive_in_order():
    options = {"warmup": False, "num_pages": 64, "compilation_cache_dir": None, "kv_events": True}

    async def run():
        async with AsyncLLM(TINY_LLAMA, **options) as llm:
            events = llm.kv_events()
            assert await anext(events) == []
            await collect(llm, None)
            (stored,) = await anext(events)
            await events.aclose()
        return stored

    stored = asyncio.run(run())
    assert list(stored.token_ids) == PROMPT[:16]


def test_a_reader_of_events_who_falls_behind_is_told():
    async def run():
        mailbox = EventMailbox(2)
        mailbox.put(AllBlocksCleared())
        mailbox.put(AllBlocksCleared())
        assert await mailbox.get() == [AllBlocksCleared()] * 2
        for _ in range(3):
            mailbox.put(AllBlocksCleared())
        with pytest.raises(RequestRejected, match="2 unread"):
            await mailbox.get()

    asyncio.run(run())
