"""Metrics of outputs made by hand: exact counts, bounded labels, nothing left of ended requests."""

import pytest

from serving.metrics import OTHER, EngineMetrics
from serving.outputs import AdapterStatus, CompletionOutput, EngineStats, RequestMetrics, RequestOutput

STATS = EngineStats(
    **dict.fromkeys(EngineStats.__dataclass_fields__, 0) | {"num_pages": 8, "num_free_pages": 6}
)


def output(request_id, num_tokens, *, finished, adapter=None):
    completion = CompletionOutput(
        index=0,
        text="",
        delta="",
        token_ids=[1] * num_tokens,
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="stop" if finished else None,
        stop_reason=None,
    )
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=[1, 2, 3],
        prompt_logprobs=None,
        adapter=adapter,
        adapter_id=0,
        outputs=[completion],
        finished=finished,
        num_cached_tokens=0,
        metrics=RequestMetrics(
            queue_time=0.5, time_to_first_token=1.0, time_per_output_token=0.25, end_to_end_time=3.0
        ),
    )


def status(name, *, running=0, waiting=0):
    return AdapterStatus(
        name=name,
        adapter_id=1,
        rank=1,
        target_modules=(),
        num_parameters=0,
        state="host",
        num_running=running,
        num_waiting=waiting,
        pinned=False,
        source="",
    )


def values(metrics, adapters=()):
    lines = metrics.render(STATS, list(adapters)).decode().splitlines()
    return {
        name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))
    }


def test_counts_of_two_requests():
    metrics = EngineMetrics("base")
    for request_id, adapter in (("1", None), ("2", "a")):
        metrics.observe(output(request_id, 1, finished=False, adapter=adapter))
        metrics.observe(output(request_id, 2, finished=False, adapter=adapter))
        metrics.observe(output(request_id, 2, finished=True, adapter=adapter))
    assert not metrics._last
    found = values(metrics, [status("a", waiting=1)])
    assert found["lorajax:inter_token_latency_seconds_count"] == 2
    assert found["lorajax:time_to_first_token_seconds_sum"] == 2.0
    assert found["lorajax:e2e_request_latency_seconds_sum"] == 6.0
    assert found["lorajax:request_queue_time_seconds_sum"] == 1.0
    for adapter in ("base", "a"):
        assert found[f'lorajax:adapter_requests_total{{adapter="{adapter}"}}'] == 1
        assert found[f'lorajax:adapter_generation_tokens_total{{adapter="{adapter}"}}'] == 2
    assert found["lorajax:kv_cache_usage_perc"] == pytest.approx(0.25)
    assert (found["lorajax:num_adapters_waiting"], found["lorajax:num_adapters_running"]) == (1, 0)
    assert metrics.by_adapter()["a"] == {
        "num_requests": 1,
        "num_prompt_tokens": 3,
        "num_output_tokens": 2,
        "mean_time_to_first_token": 1.0,
        "mean_end_to_end_time": 3.0,
    }


def test_labels_are_bounded_and_leave_with_their_adapters():
    metrics = EngineMetrics("base", max_adapters=3)
    for i in range(10):
        metrics.observe(output(str(i), 1, finished=True, adapter=f"adapter{i}"))
    assert set(metrics.by_adapter()) == {"adapter0", "adapter1", "adapter2", OTHER}
    assert metrics.by_adapter()[OTHER]["num_requests"] == 7
    found = values(metrics, [status("adapter1")])
    assert 'lorajax:adapter_requests_total{adapter="adapter1"}' in found
    assert 'lorajax:adapter_requests_total{adapter="adapter0"}' not in found
    metrics.observe(output("x", 1, finished=True, adapter="adapter9"))
    assert set(metrics.by_adapter()) == {"adapter1", "adapter9", OTHER}


def test_two_engines_do_not_share_their_metrics():
    first, second = EngineMetrics("base"), EngineMetrics("base")
    first.observe(output("1", 1, finished=True))
    assert values(second)["lorajax:time_to_first_token_seconds_count"] == 0
