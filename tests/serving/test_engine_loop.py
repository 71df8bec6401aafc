"""Whatever breaks in the engine, nobody is left waiting."""

import logging
import threading

import pytest
from golden_files import TINY_LLAMA, adapters_of

from lorajax.errors import EngineClosed
from serving import LLM, SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)


@pytest.fixture
def llm():
    with LLM(TINY_LLAMA, warmup=False, compilation_cache_dir=None, num_pages=64, max_num_seqs=4) as llm:
        yield llm


@pytest.mark.parametrize("where", ["step", "add", "abort"])
def test_a_failure_ends_every_request_with_its_cause(llm, caplog, where):
    llm.load_adapter("a", adapters_of(TINY_LLAMA)["v_only"])
    streams = [llm.stream([5, 6, 7], LONG, adapter="a") for _ in range(3)]
    for stream in streams:
        next(stream)

    def broken(*arguments):
        raise ZeroDivisionError("the device is gone")

    def break_it():
        setattr(llm._engine, where, broken)

    llm._loop.call(break_it)
    with caplog.at_level(logging.CRITICAL, "lorajax.engine"):
        if where == "add":
            with pytest.raises(EngineClosed):
                llm.generate([[1]], LONG)
        if where == "abort":
            streams.pop().close()
        for stream in streams:
            with pytest.raises(EngineClosed, match="ZeroDivisionError: the device is gone") as caught:
                list(stream)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(EngineClosed, match="the device is gone"):
            llm.generate([[1]], LONG)
    with pytest.raises(EngineClosed, match="the device is gone"):
        llm.unload_adapter("a", timeout=5)


def test_closing_ends_running_requests(llm):
    stream = llm.stream([5, 6, 7], LONG)
    next(stream)
    closing = threading.Thread(target=llm.close)
    closing.start()
    *_, last = stream
    closing.join(timeout=30)
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    with pytest.raises(EngineClosed, match="closed"):
        llm.generate([[1]], LONG)
    with pytest.raises(EngineClosed):
        llm.adapters()
    stream.close()
