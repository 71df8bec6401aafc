"""The HTTP server over loopback, asked by OpenAI's own client and by hand."""

import contextlib
import json
import threading
import time

import httpx
import openai
import pytest
from event_loop_thread import EventLoopThread
from golden_files import TINY_LLAMA, adapters_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorajax.errors import ConfigError
from serving import AsyncLLM, SamplingParams
from serving.adapter_roots import AdapterRoots
from serving.http.app import build_app
from serving.http.server import HttpConfig, HttpServer

BASE = TINY_LLAMA.name
ROOT = TINY_LLAMA / "adapters"
PROMPT = [(7 * i) % 300 + 2 for i in range(20)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "ab"}]
EXTRA = {"ignore_eos": True}
ENGINE = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_pages": 160,
    "compilation_cache_dir": None,
    "warmup": False,
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
def serving(thread, app):
    async def start():
        server = HttpServer(app, HttpConfig(port=0))
        return server, await server.start()

    server, port = thread.run(start())
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        thread.run(server.stop(grace=5))


@pytest.fixture(scope="module")
def address(thread, engine):
    app = build_app(
        engine, roots=AdapterRoots([ROOT]), allow_runtime_lora_updating=True, max_body_bytes=1 << 18
    )
    with serving(thread, app) as (address, _):
        yield address


@pytest.fixture
def http(address, engine):
    with httpx.Client(base_url=address, timeout=60) as http:
        yield http
    wait_until(lambda: not engine._live)
    engine._llm._loop.call(engine._llm._engine.check_idle)


@pytest.fixture
def client(address, http):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- completions ----


@pytest.mark.parametrize("model", [BASE, "attn_r8"])
def test_completions_are_the_python_apis(client, engine, model):
    adapter = None if model == BASE else model
    expected = engine._llm.generate([PROMPT], GREEDY, adapter=adapter)[0]
    answer = client.completions.create(
        model=model, prompt=PROMPT, temperature=0, max_tokens=12, logprobs=3, extra_body=EXTRA
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (expected.outputs[0].text, "length", 0)
    assert (answer.model, answer.object) == (model, "text_completion")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        20,
        12,
        32,
    )
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 12
    assert choice.logprobs.text_offset[0] == 0
    for chosen, logprob, best in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert best[chosen] == logprob == max(best.values()) <= 0


def test_streamed_completions_join_to_the_whole(client):
    asked = {"model": "attn_r8", "prompt": PROMPT, "seed": 3, "max_tokens": 12, "n": 2, "logprobs": 1}
    whole = client.completions.create(**asked, extra_body=EXTRA)
    events = list(
        client.completions.create(
            **asked, extra_body=EXTRA, stream=True, stream_options={"include_usage": True}
        )
    )
    assert (events[-1].choices, events[-1].usage.completion_tokens) == ([], whole.usage.completion_tokens)
    for choice in whole.choices:
        parts = [part for event in events for part in event.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [t for part in parts for t in part.logprobs.tokens] == choice.logprobs.tokens
        assert [o for part in parts for o in part.logprobs.text_offset] == choice.logprobs.text_offset
        assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
    assert {event.id for event in events} == {events[0].id}


def test_several_prompts(client):
    prompts = [PROMPT, PROMPT[:5], PROMPT[3:]]
    asked = {"model": BASE, "temperature": 0, "max_tokens": 6, "n": 2, "extra_body": EXTRA}
    alone = [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in prompts]
    together = client.completions.create(prompt=prompts, **asked)
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == [text for text in alone for _ in range(2)]
    texts = dict.fromkeys(range(6), "")
    for event in client.completions.create(prompt=prompts, stream=True, **asked):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [text for text in alone for _ in range(2)]


def test_stop_and_text_prompts(client):
    whole = (
        client.completions.create(model=BASE, prompt="ab", temperature=0, extra_body=EXTRA).choices[0].text
    )
    middle = whole[3:6]
    choice = client.completions.create(model=BASE, prompt="ab", temperature=0, stop=middle).choices[0]
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(middle)], "stop")


# ---- chat ----


def test_chat_is_the_python_apis(client, engine):
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    expected = engine._llm.chat([MESSAGES], params, adapter="attn_r8")[0].outputs[0].text
    asked = {"model": "attn_r8", "temperature": 0, "max_tokens": 9, "extra_body": EXTRA}
    answer = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **asked)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    assert len(choice.logprobs.content) == 9 and len(choice.logprobs.content[0].top_logprobs) == 2
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    again = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **asked)
    assert again.choices[0].message.content == expected
    events = list(client.chat.completions.create(messages=MESSAGES, stream=True, **asked))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == expected
    assert events[-1].choices[0].finish_reason == "length"
    assert events[0].object == "chat.completion.chunk"


def test_a_chat_takes_the_room_that_is_left(client):
    answer = client.chat.completions.create(model=BASE, messages=MESSAGES, extra_body=EXTRA)
    assert answer.usage.total_tokens == 512
    short = client.chat.completions.create(
        model=BASE, messages=MESSAGES, max_completion_tokens=3, extra_body=EXTRA
    )
    assert short.usage.completion_tokens == 3


# ---- refusals ----


def test_an_unknown_model_is_not_found(client):
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError) as raised:
            client.completions.create(model="typo", prompt="a", stream=stream)
        assert raised.value.body["code"] == "model_not_found"
        assert raised.value.body["param"] == "model"
        assert "'typo'" in raised.value.body["message"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("typo")


OK = {"model": BASE, "prompt": "a", "max_tokens": 1}
OK_CHAT = {"model": BASE, "messages": MESSAGES, "max_tokens": 1}


@pytest.mark.parametrize(
    ("route", "change", "param"),
    [
        ("completions", {"prompt": None}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [[]]}, None),
        ("completions", {"prompt": ["a", 1]}, "prompt"),
        ("completions", {"prompt": [True]}, "prompt"),
        ("completions", {"prompt": {"a": 1}}, "prompt"),
        ("completions", {"prompt": ["a"] * 257}, "prompt"),
        ("completions", {"prompt": [320]}, None),
        ("completions", {"prompt": "\ud800"}, "prompt"),
        ("completions", {"model": None}, "model"),
        ("completions", {"model": 3}, "model"),
        ("completions", {"temperature": "hot"}, "temperature"),
        ("completions", {"temperature": -1}, "temperature"),
        ("completions", {"temperature": True}, "temperature"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"max_tokens": 1.5}, "max_tokens"),
        ("completions", {"max_tokens": 5000}, None),
        ("completions", {"n": 0}, "n"),
        ("completions", {"n": 65}, "n"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"stop": [""]}, "stop"),
        ("completions", {"stop": [1]}, "stop"),
        ("completions", {"stop_token_ids": ["a"]}, "stop_token_ids"),
        ("completions", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("completions", {"logit_bias": {"1": "x"}}, "logit_bias"),
        ("completions", {"seed": "x"}, "seed"),
        ("completions", {"stream": 1}, "stream"),
        ("completions", {"suffix": "x"}, "suffix"),
        ("completions", {"echo": True}, "echo"),
        ("completions", {"no_such_field": 1}, "no_such_field"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": ["a"]}, "messages"),
        ("chat/completions", {"messages": [{"content": "a"}]}, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", {"tools": [1]}, "tools"),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_fields_are_named(http, route, change, param, stream):
    body = {**(OK if route == "completions" else OK_CHAT), "stream": stream, **change}
    answer = http.post(f"/v1/{route}", content=json.dumps(body))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b"\xff\xfe", 400),
        (b'{"temperature": NaN}', 400),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"temperature": ' + b"9" * 400 + b', "model": "x", "prompt": "a"}', 400),
        (b"[" * 100_000, 400),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", 400),
        (b'{"prompt": "' + b"a" * (1 << 18) + b'"}', 413),
    ],
)
def test_bad_bodies(http, content, status):
    for route in ("completions", "chat/completions", "load_lora_adapter"):
        answer = http.post(f"/v1/{route}", content=content)
        assert answer.status_code == status, answer.text[:200]
        assert answer.json()["error"]["message"]


def test_routes_that_are_not_there(http):
    assert http.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    answer = http.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FUZZED = [
    "model",
    "prompt",
    "messages",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "logprobs",
    "logit_bias",
    "allowed_token_ids",
    "presence_penalty",
    "repetition_penalty",
    "stream",
    "stream_options",
    "max_tokens",
    "priority",
    "cache_salt",
    "tools",
    "top_logprobs",
    "echo",
    "ignore_eos",
    "user",
    "response_format",
]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    route=st.sampled_from(["completions", "chat/completions"]),
    change=st.dictionaries(st.sampled_from(FUZZED), json_values, min_size=1, max_size=2),
)
def test_no_body_is_the_servers_fault(http, route, change):
    body = {**(OK if route == "completions" else OK_CHAT), **change}
    answer = http.post(f"/v1/{route}", content=json.dumps(body))
    assert answer.status_code < 500, answer.text


# ---- ways to end ----


def test_clients_that_hang_up_abort(http, address, engine):
    long = {"model": "attn_r8", "prompt": PROMPT, "max_tokens": 490, "n": 8, "ignore_eos": True}
    with httpx.Client(base_url=address) as other:
        with pytest.raises(httpx.ReadTimeout):
            other.post("/v1/completions", json=long, timeout=0.3)
        wait_until(lambda: not engine._live, seconds=5)
        with other.stream("POST", "/v1/completions", json={**long, "stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert engine._live
    wait_until(lambda: not engine._live, seconds=5)
    wait_until(lambda: http.get("/v1/lora_stats").json()["engine"]["num_running"] == 0, seconds=5)


def test_an_error_in_mid_stream_is_an_event(thread):
    engine = AsyncLLM(TINY_LLAMA, **ENGINE)
    app = build_app(engine)
    with serving(thread, app) as (address, _), httpx.Client(base_url=address, timeout=60) as http:
        assert http.get("/health").status_code == 200

        def fail():
            raise OSError("/secret")

        body = {"model": BASE, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            engine._llm._loop._post(fail)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "unavailable"
        answer = http.get("/health")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        answer = http.post("/v1/completions", json=OK)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    thread.run(engine.close())


def test_stopping_lets_running_answers_end(thread, engine):
    with serving(thread, build_app(engine)) as (address, server):
        body = {"model": BASE, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            stopping = threading.Thread(target=lambda: thread.run(server.stop()))
            stopping.start()
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        stopping.join(timeout=20)
        assert not stopping.is_alive()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/health")


def test_a_taken_port(thread, engine, address):
    server = HttpServer(build_app(engine), HttpConfig(port=int(address.rpartition(":")[2])))
    with pytest.raises(ConfigError, match="cannot listen"):
        thread.run(server.start())


# ---- models, adapters, metrics ----


def test_models(client):
    models = {model.id: model for model in client.models.list()}
    assert list(models) == [BASE, "attn_r8"]
    assert (models["attn_r8"].parent, models[BASE].parent) == (BASE, None)
    assert models[BASE].max_model_len == 512
    assert client.models.retrieve("attn_r8") == models["attn_r8"]


def test_adapters_come_and_go(http, client):
    load = {"lora_name": "fresh", "lora_path": "v_only"}
    loaded = http.post("/v1/load_lora_adapter", json=load).json()
    assert (loaded["name"], loaded["source"]) == ("fresh", "v_only")
    assert http.post("/v1/load_lora_adapter", json=load).json()["adapter_id"] == loaded["adapter_id"]
    answer = http.post("/v1/load_lora_adapter", json={**load, "lora_path": "all_r16"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "adapter_exists")
    assert client.completions.create(model="fresh", prompt="a").model == "fresh"
    statuses = http.get("/v1/lora_adapters").json()["data"]
    assert [(s["name"], s["source"]) for s in statuses] == [("attn_r8", "attn_r8"), ("fresh", "v_only")]
    assert http.get("/v1/lora_stats").json()["adapters"]["fresh"]["num_requests"] == 1
    assert 'adapter="fresh"' in http.get("/metrics").text
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "fresh"}).json()["num_waited_for"] == 0
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "fresh"}).status_code == 404
    assert 'adapter="fresh"' not in http.get("/metrics").text


@pytest.mark.parametrize("source", ["/etc", "..", "v_only/../../..", "~", "a\0b", "nowhere", "x" * 5000, ""])
def test_sources_outside_of_the_roots(http, source):
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": source})
    assert answer.status_code == 400
    assert str(ROOT.parent) not in answer.text
    for name in ("", "../x", "a/b", BASE, "x" * 200):
        answer = http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": "v_only"})
        assert answer.status_code == 400


def test_loading_is_off_unless_allowed(thread, engine):
    with serving(thread, build_app(engine, roots=AdapterRoots([ROOT]))) as (address, _):
        for route, body in (
            ("load_lora_adapter", {"lora_name": "x", "lora_path": "v_only"}),
            ("unload_lora_adapter", {"lora_name": "attn_r8"}),
        ):
            answer = httpx.post(f"{address}/v1/{route}", json=body)
            assert (answer.status_code, "--allow-runtime-lora-updating" in answer.text) == (403, True)


def test_metrics(http, client):
    def values():
        lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    before = values()
    asked = {"model": "attn_r8", "prompt": PROMPT, "max_tokens": 12, "extra_body": EXTRA}
    list(client.completions.create(**asked, stream=True))
    client.completions.create(**asked)
    after = values()

    def grown(name):
        return after[name] - before.get(name, 0)

    assert grown("lorajax:time_to_first_token_seconds_count") == 2
    assert grown("lorajax:e2e_request_latency_seconds_count") == 2
    assert grown("lorajax:request_queue_time_seconds_count") == 2
    assert grown("lorajax:inter_token_latency_seconds_count") == 11  # of the streamed one
    assert grown("lorajax:prompt_tokens_total") == 40
    assert grown("lorajax:generation_tokens_total") == 24
    assert grown('lorajax:adapter_requests_total{adapter="attn_r8"}') == 2
    assert grown('lorajax:adapter_generation_tokens_total{adapter="attn_r8"}') == 24
    assert grown('lorajax:requests_total{finish_reason="length"}') == 2
    assert grown("lorajax:prefix_cache_queries_total") == 40
    assert after["lorajax:num_requests_running"] == after["lorajax:num_requests_waiting"] == 0
    assert after["lorajax:num_adapters_host"] == 1
    assert 0 <= after["lorajax:kv_cache_usage_perc"] < 1


def test_bearer_token(thread, engine):
    with serving(thread, build_app(engine, token="s3cret")) as (address, _):
        with openai.OpenAI(base_url=f"{address}/v1", api_key="s3cret", max_retries=0) as client:
            assert client.models.list().data
        with openai.OpenAI(base_url=f"{address}/v1", api_key="S3cret", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
            with pytest.raises(openai.AuthenticationError):
                client.completions.create(model=BASE, prompt="a")
        assert httpx.get(f"{address}/metrics").status_code == 401
        assert httpx.get(f"{address}/health").status_code == 200
