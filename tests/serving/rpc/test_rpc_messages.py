"""Messages of `lorajax.proto`: nothing is lost on the way, and the generated code is the proto's."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import serving.rpc
from lorajax.errors import RequestRejected
from serving.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from serving.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from serving.rpc import lorajax_pb2 as pb
from serving.rpc.messages import (
    MAX_POSITIONS,
    ChunkWriter,
    from_sampling_params,
    to_event,
    to_sampling_params,
)
from serving.sampling_params import SamplingParams

small = st.floats(-2, 2, allow_nan=False)
ids = st.lists(st.integers(0, 2**31), min_size=1, max_size=4)
FIELDS = {
    "n": st.integers(1, 64),
    "temperature": st.floats(0, 100),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(-1, 1000),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "max_tokens": st.none() | st.integers(10, 10**6),
    "min_tokens": st.integers(0, 10),
    "stop": st.text(min_size=1) | st.lists(st.text(min_size=1), min_size=1, max_size=3),
    "stop_token_ids": ids,
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
    "presence_penalty": small,
    "frequency_penalty": small,
    "repetition_penalty": st.floats(0.1, 10),
    "logit_bias": st.dictionaries(st.integers(0, 2**31), small, min_size=1, max_size=4),
    "allowed_token_ids": ids,
    "skip_special_tokens": st.booleans(),
}


@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_sampling_params_travel(fields):
    params = SamplingParams(**fields)
    sent = pb.SamplingParams.FromString(from_sampling_params(params).SerializeToString())
    arrived = to_sampling_params(sent)
    assert arrived.stop_strings == params.stop_strings
    assert dataclasses.replace(arrived, stop=None) == dataclasses.replace(params, stop=None)


def test_every_setting_has_a_field():
    names = {field.name for field in dataclasses.fields(SamplingParams)} - {"structured_output"}
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == names | {"fill_context"}
    assert names == set(FIELDS)
    with pytest.raises(RequestRejected, match="structured_output"):
        from_sampling_params(SamplingParams(structured_output={}))


def output(num_tokens, delta, finished, num_prompt_logprobs=0, ended=()):
    logprobs = [{i: Logprob(-0.5, rank=1, decoded_token="x")} for i in range(num_tokens)]
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1] * num_prompt_logprobs,
        prompt_logprobs=[None, *logprobs][:num_prompt_logprobs] or None,
        adapter="a",
        adapter_id=3,
        outputs=[
            CompletionOutput(
                index=index,
                text="",
                delta=delta,
                token_ids=list(range(num_tokens)),
                cumulative_logprob=-1.0,
                logprobs=logprobs,
                finish_reason="stop" if finished or index in ended else None,
                stop_reason="s" if finished or index in ended else None,
            )
            for index in range(3)
        ],
        finished=finished,
        num_cached_tokens=0,
        metrics=RequestMetrics(
            queue_time=None, time_to_first_token=None, time_per_output_token=None, end_to_end_time=1.0
        ),
    )


@given(st.lists(st.integers(0, 700), min_size=1, max_size=4))
def test_chunks_are_small_and_join_to_the_whole(lengths):
    lengths = sorted(lengths)
    prompt = min(lengths[0], 600)
    writer, chunks = ChunkWriter(), []
    for i, length in enumerate(lengths):
        last = i == len(lengths) - 1
        chunks += writer.chunks(output(length, f"[{i}]", last, num_prompt_logprobs=prompt))
    assert all(
        len(chunk.prompt_logprobs) + sum(len(c.logprobs) for c in chunk.completions) <= MAX_POSITIONS
        for chunk in chunks
    )
    assert sum(len(chunk.prompt_logprobs) for chunk in chunks) == prompt
    for index in range(3):
        parts = [c for chunk in chunks for c in chunk.completions if c.index == index]
        assert [token for part in parts for token in part.token_ids] == list(range(lengths[-1]))
        assert sum(len(part.logprobs) for part in parts) == lengths[-1]
        assert "".join(part.text for part in parts) == "".join(f"[{i}]" for i in range(len(lengths)))
        assert [part.finish_reason for part in parts if part.finish_reason] == [pb.FINISH_REASON_STOP]
    assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_the_end_of_a_completion_is_sent_once():
    writer = ChunkWriter()
    outputs = [output(2, "a", False), output(2, "", False, ended=(1,)), output(2, "", False, ended=(0, 1))]
    chunks = [chunk for item in (*outputs, output(2, "", True)) for chunk in writer.chunks(item)]
    assert [[c.index for c in chunk.completions] for chunk in chunks] == [[0, 1, 2], [1], [0], [2]]
    assert [c.finish_reason for chunk in chunks[1:] for c in chunk.completions] == [pb.FINISH_REASON_STOP] * 3


def test_events():
    stored = BlockStored(
        block_hashes=(b"a", b"b"),
        parent_block_hash=b"p",
        token_ids=(1, 2),
        block_size=1,
        adapter_id=4,
        adapter_name="x",
    )
    message = to_event(stored).block_stored
    assert (list(message.block_hashes), message.parent_block_hash) == ([b"a", b"b"], b"p")
    assert (list(message.token_ids), message.block_size) == ([1, 2], 1)
    assert (message.adapter_id, message.adapter_name) == (4, "x")
    assert list(to_event(BlockRemoved(block_hashes=(b"a",))).block_removed.block_hashes) == [b"a"]
    assert to_event(AllBlocksCleared()).WhichOneof("event") == "all_blocks_cleared"


def test_the_generated_code_is_the_protos(tmp_path):
    tools = pytest.importorskip("grpc_tools", reason="needs grpcio-tools==1.71.2, as `make proto`")
    assert tools is not None
    folder = Path(serving.rpc.__file__).parent
    command = "-I . --python_out=OUT --pyi_out=OUT --grpc_python_out=OUT serving/rpc/lorajax.proto"
    arguments = command.replace("OUT", str(tmp_path)).split(" ")
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", *arguments], cwd=folder.parents[1], check=True, timeout=60
    )
    written = sorted((tmp_path / "serving" / "rpc").iterdir())
    assert [path.name for path in written] == ["lorajax_pb2.py", "lorajax_pb2.pyi", "lorajax_pb2_grpc.py"]
    for path in written:
        assert path.read_text() == (folder / path.name).read_text()
