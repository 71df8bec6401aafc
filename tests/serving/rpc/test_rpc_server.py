"""The gRPC server over loopback: answers equal the Python API's, and every way a call can end."""

import contextlib
import subprocess
import sys
import threading
import time

import grpc
import pytest
from event_loop_thread import EventLoopThread
from golden_files import TINY_LLAMA, adapters_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from serving import AsyncLLM, SamplingParams
from serving.adapter_roots import AdapterRoots
from serving.outputs import ScoreOutput
from serving.rpc import lorajax_pb2 as pb
from serving.rpc import lorajax_pb2_grpc as pb_grpc
from serving.rpc.client import RpcClient, main
from serving.rpc.messages import from_sampling_params
from serving.rpc.server import RpcConfig, RpcServer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
LARGE = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, logprobs=20, n=6)
PROMPT = [(7 * i) % 300 + 2 for i in range(20)]
ROOT = TINY_LLAMA / "adapters"
ENGINE = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_pages": 160,
    "compilation_cache_dir": None,
    "warmup": False,
    "kv_events": True,
}


@pytest.fixture(scope="module")
def thread():
    thread = EventLoopThread()
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def engine(thread):
    engine = AsyncLLM(TINY_LLAMA, adapters={"attn_r8": adapters_of(TINY_LLAMA)["attn_r8"]}, **ENGINE)
    yield engine
    thread.run(engine.close())


@contextlib.contextmanager
def serving(thread, engine, **config):
    async def start():
        server = RpcServer(engine, RpcConfig(port=0, **config), roots=AdapterRoots([ROOT]))
        return server, await server.start()

    server, port = thread.run(start())
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        thread.run(server.stop(grace=0))


@pytest.fixture(scope="module")
def target(thread, engine):
    with serving(thread, engine, max_message_bytes=1 << 18) as (address, _):
        yield address


@pytest.fixture
def client(target, engine):
    with RpcClient(target, timeout=60) as client:
        yield client
    wait_until(lambda: not engine._live)
    engine._llm._loop.call(engine._llm._engine.check_idle)


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def fails_with(code, words=""):
    with pytest.raises(grpc.RpcError) as raised:
        yield raised
    assert raised.value.code() is code, raised.value
    assert words in raised.value.details()


# ---- answers ----


@pytest.mark.parametrize("adapter", [None, "attn_r8"])
def test_an_answer_is_the_python_apis(client, engine, adapter):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    expected = engine._llm.generate([PROMPT], params, adapter=adapter)[0]
    response = client.generate(PROMPT, params, adapter=adapter, request_id="mine")
    (completion,) = response.completions
    wanted = expected.outputs[0]
    assert (completion.text, list(completion.token_ids)) == (wanted.text, wanted.token_ids)
    assert completion.finish_reason == pb.FINISH_REASON_LENGTH
    assert completion.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-4)
    for position, step in zip(completion.logprobs, wanted.logprobs, strict=True):
        assert [(p.token_id, p.token) for p in position.logprobs] == [
            (token, value.decoded_token) for token, value in step.items()
        ]
        assert [p.logprob for p in position.logprobs] == pytest.approx(list(step.values()), abs=1e-5)
    assert (response.adapter, response.adapter_id) == (adapter or "", expected.adapter_id)
    assert (response.request_id, list(response.prompt_token_ids)) == ("mine", PROMPT)
    assert 0 < response.metrics.time_to_first_token <= response.metrics.end_to_end_time


def test_chunks_join_to_the_answer(client):
    params = SamplingParams(temperature=1, seed=5, n=3, max_tokens=20, ignore_eos=True, logprobs=2)
    whole = client.generate(PROMPT, params, adapter="attn_r8")
    chunks = list(client.stream(PROMPT, params, adapter="attn_r8"))
    for completion in whole.completions:
        parts = [p for chunk in chunks for p in chunk.completions if p.index == completion.index]
        assert "".join(part.text for part in parts) == completion.text
        assert [t for part in parts for t in part.token_ids] == list(completion.token_ids)
        positions = [p for part in parts for p in part.logprobs]
        assert [p.logprobs[0].token_id for p in positions] == list(completion.token_ids)
        assert [p.logprobs[0].logprob for p in positions] == pytest.approx(
            [p.logprobs[0].logprob for p in completion.logprobs], abs=1e-5
        )
        assert [p.finish_reason for p in parts if p.finish_reason] == [pb.FINISH_REASON_LENGTH]
        assert parts[-1].finish_reason == completion.finish_reason
    assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert {(chunk.adapter, chunk.num_prompt_tokens) for chunk in chunks} == {("attn_r8", len(PROMPT))}
    assert chunks[-1].metrics.end_to_end_time > 0


def test_text_prompts_and_defaults(client, engine):
    response = client.generate("ab", SamplingParams(seed=1, max_tokens=None, stop=["zz"], top_k=-1))
    assert list(response.prompt_token_ids) == engine._llm._engine.tokenizer.encode("ab")
    raw = pb_grpc.GenerationStub(client._channel).Generate(pb.GenerateRequest(text="ab"))
    assert len(raw.completions) == 1 and len(raw.completions[0].token_ids) <= 16


def test_stop_reasons(client):
    whole = client.generate(PROMPT, GREEDY).completions[0]
    stop_id = whole.token_ids[4]
    by_id = client.generate(PROMPT, SamplingParams(temperature=0, stop_token_ids=[stop_id])).completions[0]
    assert (by_id.finish_reason, by_id.WhichOneof("stop_reason")) == (pb.FINISH_REASON_STOP, "stop_token_id")
    assert by_id.stop_token_id == stop_id
    middle = whole.text[3:6]
    by_text = client.generate(PROMPT, SamplingParams(temperature=0, stop=[middle])).completions[0]
    assert (by_text.WhichOneof("stop_reason"), by_text.stop_string) == ("stop_string", middle)


def test_a_slow_reader_gets_several_tokens_per_chunk(client, target):
    """More than the connection's buffers take; the reader goes on when all is generated."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT), sampling_params=from_sampling_params(LARGE)
    )
    with grpc.insecure_channel(target, options) as channel:
        stream = pb_grpc.GenerationStub(channel).GenerateStream(request)
        chunks = [next(stream)]
        wait_until(lambda: client.stats().num_running == 0)
        chunks += stream
    assert len(chunks) < LARGE.max_tokens / 2
    assert sum(len(c.token_ids) for chunk in chunks for c in chunk.completions) == 6 * LARGE.max_tokens
    assert max(chunk.ByteSize() for chunk in chunks) < 1 << 18
    assert chunks[-1].finished


# ---- refusals ----


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "text or token_ids"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), grpc.StatusCode.INVALID_ARGUMENT, "empty"),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**31])),
            grpc.StatusCode.INVALID_ARGUMENT,
            "0 to 319",
        ),
        (pb.GenerateRequest(text="a", adapter="typo"), grpc.StatusCode.NOT_FOUND, "'typo'"),
        (pb.GenerateRequest(text="a", adapter=" attn_r8 "), grpc.StatusCode.NOT_FOUND, "' attn_r8 '"),
        (
            pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(temperature=-1)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature",
        ),
        (
            pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(temperature=float("nan"))),
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature",
        ),
        (
            pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(max_tokens=0)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "max_tokens",
        ),
        (
            pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(max_tokens=1, fill_context=True)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "fill_context",
        ),
    ],
)
def test_bad_requests(client, request_, code, words):
    stub = pb_grpc.GenerationStub(client._channel)
    with fails_with(code, words):
        stub.Generate(request_)
    with fails_with(code, words):
        list(stub.GenerateStream(request_))


def test_large_messages_are_refused_and_large_answers_come_in_parts(client):
    with fails_with(grpc.StatusCode.RESOURCE_EXHAUSTED, "GenerateStream"):
        client.generate(PROMPT, LARGE)
    assert (
        sum(len(c.logprobs) for chunk in client.stream(PROMPT, LARGE) for c in chunk.completions) == 6 * 200
    )
    with fails_with(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger"):
        client.generate("a" * (1 << 18), GREEDY)


def test_score_says_that_it_is_not_there(client, engine, monkeypatch):
    if not hasattr(engine, "score"):
        with fails_with(grpc.StatusCode.UNIMPLEMENTED, "score"):
            client.score([1], [2])

    async def score(prompts, completions, *, adapter):
        assert (prompts, completions, adapter) == ([[1, 2]], ["x"], "attn_r8")
        return [ScoreOutput(token_ids=[3], logprobs=[-0.5], cumulative_logprob=-0.5)]

    monkeypatch.setattr(engine, "score", score, raising=False)
    response = client.score([1, 2], "x", adapter="attn_r8")
    assert (list(response.token_ids), list(response.logprobs), response.adapter) == ([3], [-0.5], "attn_r8")
    with fails_with(grpc.StatusCode.INVALID_ARGUMENT, "completion_text"):
        pb_grpc.GenerationStub(client._channel).Score(pb.ScoreRequest(prompt_text="a"))


def test_an_unexpected_error_tells_nothing(client, engine, monkeypatch):
    async def stats():
        raise OSError("/secret/place")

    monkeypatch.setattr(engine, "stats", stats)
    with fails_with(grpc.StatusCode.INTERNAL) as raised:
        client.stats()
    assert "secret" not in raised.value.details()


# ---- ways to end ----


def test_cancelled_and_expired_calls_abort(client, engine):
    stub = pb_grpc.GenerationStub(client._channel)
    long = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT),
        adapter="attn_r8",
        sampling_params=pb.SamplingParams(ignore_eos=True, fill_context=True),
    )
    call = stub.GenerateStream(long)
    next(call)
    call.cancel()
    future = stub.Generate.future(long)
    wait_until(lambda: engine._live)
    future.cancel()
    with fails_with(grpc.StatusCode.DEADLINE_EXCEEDED):
        stub.Generate(long, timeout=0.2)
    with fails_with(grpc.StatusCode.DEADLINE_EXCEEDED):
        list(stub.GenerateStream(long, timeout=0.2))
    stream = client.stream(PROMPT, LONG)
    next(stream)
    stream.close()


def test_a_client_that_vanishes_aborts(client, target, engine):
    script = (
        "import sys; from serving.rpc import lorajax_pb2 as pb, lorajax_pb2_grpc as g; import grpc, os\n"
        f"stub = g.GenerationStub(grpc.insecure_channel({target!r}))\n"
        "params = pb.SamplingParams(ignore_eos=True, fill_context=True)\n"
        "next(stub.GenerateStream(pb.GenerateRequest(text='a', sampling_params=params))); os._exit(3)"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=TINY_LLAMA.parents[3], timeout=120)
    assert ended.returncode == 3
    wait_until(lambda: client.stats().num_running == 0, seconds=5)


def test_an_id_in_use(client):
    stream = client.stream(PROMPT, LONG, request_id="x")
    next(stream)
    with fails_with(grpc.StatusCode.INVALID_ARGUMENT, "'x'"):
        client.generate(PROMPT, GREEDY, request_id="x")
    stream.close()


def test_stopping_lets_running_calls_end_and_refuses_new_ones(thread, engine):
    with serving(thread, engine) as (address, server), RpcClient(address, timeout=60) as client:
        events = client.kv_events()
        stream = client.stream(PROMPT, LONG)
        next(stream)
        stopping = threading.Thread(target=lambda: thread.run(server.stop(grace=30)))
        stopping.start()
        with RpcClient(address, timeout=5) as late, fails_with(grpc.StatusCode.UNAVAILABLE):
            time.sleep(0.2)
            late.generate(PROMPT, GREEDY)
        *_, last = stream
        assert last.completions[0].finish_reason == pb.FINISH_REASON_LENGTH
        for _ in events:
            pass
        stopping.join(timeout=20)
        assert not stopping.is_alive()


# ---- adapters, events, stats ----


def test_adapters_come_and_go(client):
    status = client.load_adapter("fresh", "v_only")
    assert (status.name, status.source, status.state) == ("fresh", "v_only", "host")
    response = client.generate(PROMPT, GREEDY, adapter="fresh")
    assert (response.adapter, response.adapter_id) == ("fresh", status.adapter_id)
    with fails_with(grpc.StatusCode.ALREADY_EXISTS):
        client.load_adapter("fresh", "all_r16")
    assert client.load_adapter("fresh", str(ROOT / "v_only")).adapter_id == status.adapter_id
    replaced = client.load_adapter("fresh", "all_r16", replace=True)
    assert replaced.adapter_id > status.adapter_id
    listed = {adapter.name: adapter.source for adapter in client.adapters()}
    assert listed == {"attn_r8": "attn_r8", "fresh": "all_r16"}
    assert client.unload_adapter("fresh") == 0
    with fails_with(grpc.StatusCode.NOT_FOUND):
        client.unload_adapter("fresh")


def test_an_unload_that_waits_too_long_is_undone(client):
    stream = client.stream(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True), adapter="attn_r8")
    next(stream)
    with fails_with(grpc.StatusCode.UNAVAILABLE, "attn_r8"):
        client.unload_adapter("attn_r8", timeout=0.05)
    stream.close()
    for timeout in (-1.0, float("nan"), float("inf")):
        with fails_with(grpc.StatusCode.INVALID_ARGUMENT, "timeout"):
            client.unload_adapter("attn_r8", timeout=timeout)
    assert client.generate(PROMPT, GREEDY, adapter="attn_r8").adapter == "attn_r8"


@pytest.mark.parametrize(
    "source",
    [
        "",
        "/etc",
        "..",
        "../..",
        "v_only/../../..",
        "~",
        "~root",
        "a\0b",
        "nowhere",
        "/tmp/nowhere",
        "x" * 5000,
    ],
)
def test_sources_outside_of_the_roots(client, source):
    with pytest.raises(grpc.RpcError) as raised:
        client.load_adapter("bad", source)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(ROOT.parent) not in raised.value.details()
    assert [adapter.name for adapter in client.adapters()] == ["attn_r8"]


def test_a_link_out_of_the_root(thread, engine, tmp_path):
    (tmp_path / "link").symlink_to(ROOT / "v_only")

    async def start():
        server = RpcServer(engine, RpcConfig(port=0), roots=AdapterRoots([tmp_path]))
        return server, await server.start()

    server, port = thread.run(start())
    with (
        RpcClient(f"127.0.0.1:{port}") as client,
        fails_with(grpc.StatusCode.INVALID_ARGUMENT, "outside"),
    ):
        client.load_adapter("bad", "link")
    thread.run(server.stop(0))


def test_without_roots_nothing_is_loaded(thread, engine):
    async def start():
        server = RpcServer(engine, RpcConfig(port=0))
        return server, await server.start()

    server, port = thread.run(start())
    with RpcClient(f"127.0.0.1:{port}") as client:
        with fails_with(grpc.StatusCode.INVALID_ARGUMENT, "adapter root"):
            client.load_adapter("bad", str(ROOT / "v_only"))
        assert [adapter.source for adapter in client.adapters()] == ["attn_r8"]
    thread.run(server.stop(0))


def test_stats_and_events(client):
    before = client.stats()
    events = client.kv_events()
    salted = client.generate(PROMPT, GREEDY, cache_salt="a")
    assert salted.num_cached_tokens == 0
    stored = next(events).block_stored
    assert list(stored.token_ids) == PROMPT[:16]
    assert (len(stored.block_hashes), stored.adapter_id, stored.HasField("parent_block_hash")) == (
        1,
        0,
        False,
    )
    after = client.stats()
    assert after.num_finished == before.num_finished + 1
    assert after.num_output_tokens == before.num_output_tokens + 12
    events.cancel()


# ---- health, reflection, credentials ----


def test_health_and_reflection(client):
    health = health_pb2_grpc.HealthStub(client._channel)
    for service in ("", "lorajax.v1.Generation"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(client._channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]))
    names = {service.name for service in answer.list_services_response.service}
    assert {"lorajax.v1.Generation", "lorajax.v1.Adapters", "lorajax.v1.Engine"} <= names


def test_a_stopped_engine_is_not_healthy(thread):
    engine = AsyncLLM(TINY_LLAMA, **ENGINE)
    with serving(thread, engine) as (address, _), RpcClient(address) as client:
        thread.run(engine.close())
        health = health_pb2_grpc.HealthStub(client._channel)
        wait_until(
            lambda: (
                health.Check(health_pb2.HealthCheckRequest()).status
                == health_pb2.HealthCheckResponse.NOT_SERVING
            )
        )
        with fails_with(grpc.StatusCode.UNAVAILABLE, "closed"):
            client.generate(PROMPT, GREEDY)


def test_bearer_token(thread, engine):
    with serving(thread, engine, token="s3cret") as (address, _):
        with RpcClient(address, token="s3cret") as client:
            assert client.generate(PROMPT, GREEDY).completions
        for token in (None, "", "S3cret", "s3cret "):
            with RpcClient(address, token=token) as client:
                with fails_with(grpc.StatusCode.UNAUTHENTICATED):
                    client.generate(PROMPT, GREEDY)
                with fails_with(grpc.StatusCode.UNAUTHENTICATED):
                    list(client.stream(PROMPT, GREEDY))
                health = health_pb2_grpc.HealthStub(client._channel)
                assert health.Check(health_pb2.HealthCheckRequest()).status == 1


def test_tls(thread, engine, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    with serving(thread, engine, certificate=certificate, key=key) as (address, _):
        with RpcClient(address, root_certificates=certificate, timeout=30) as client:
            assert client.generate(PROMPT, GREEDY).completions
        with RpcClient(address, timeout=5) as client, fails_with(grpc.StatusCode.UNAVAILABLE):
            client.generate(PROMPT, GREEDY)


# ---- the command ----


def test_the_client_command(client, target, capsys):
    expected = client.generate("ab", SamplingParams(temperature=0, max_tokens=5), adapter="attn_r8")
    assert main([target, "--prompt", "ab", "--adapter", "attn_r8", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == expected.completions[0].text + "\n"
    assert main([target]) == 0
    assert capsys.readouterr().out.startswith("attn_r8\trank 8\t")
    assert main([target, "--prompt", "ab", "--adapter", "typo"]) == 2
    assert capsys.readouterr().err.startswith("NOT_FOUND: no adapter named 'typo'")
    assert main([target, "--prompt", "ab", "--temperature", "-1"]) == 2
    assert "temperature" in capsys.readouterr().err
