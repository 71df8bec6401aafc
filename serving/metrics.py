"""Prometheus metrics of one engine, in a registry of their own. Needs the extra `lorajax[http]`.

Times are seconds. Series with the label `adapter` are bounded in number: beyond the limit, adapters share
the label `_other`; those of adapters that are gone are removed. The base model's label is its own name,
which no adapter can have.
"""

import collections
import threading
import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.outputs import AdapterStatus, EngineStats, RequestOutput

OTHER = "_other"
"""Not a valid name of an adapter."""

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_REQUEST = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class EngineMetrics:
    """Hand `observe` to `AsyncLLM.observe`; `render` gives the text that Prometheus reads.

    base_name: the base model's. max_adapters: most different labels of adapters.
    """

    def __init__(self, base_name: str, *, max_adapters: int = 200):
        self._base, self._max = base_name, max_adapters
        self._lock = threading.Lock()  # guards _labels and _last
        self._labels: set[str] = set()
        self._last: dict[str, tuple[float, int]] = {}  # request -> time and tokens of its last output
        self.registry = CollectorRegistry()
        self._snapshot = _Snapshot()
        self.registry.register(self._snapshot)

        def histogram(name: str, meaning: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"lorajax:{name}", meaning, labels, buckets=buckets, registry=self.registry)

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"lorajax:{name}", meaning, labels, registry=self.registry)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN
        )
        self._between = histogram(
            "inter_token_latency_seconds", "Between the tokens of streamed requests.", _PER_TOKEN
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time per token, first excluded.",
            _PER_TOKEN,
        )
        self._end_to_end = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST
        )
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step.", _FIRST_TOKEN)
        self._ended = counter("requests", "Requests that ended.", "finish_reason")
        self._adapter_requests = counter("adapter_requests", "Requests that ended.", "adapter")
        self._adapter_prompt = counter("adapter_prompt_tokens", "Prompt tokens.", "adapter")
        self._adapter_generated = counter("adapter_generation_tokens", "Generated tokens.", "adapter")
        self._adapter_first_token = histogram(
            "adapter_time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN, "adapter"
        )
        self._adapter_end_to_end = histogram(
            "adapter_e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST, "adapter"
        )
        self._of_adapters = (
            self._adapter_requests,
            self._adapter_prompt,
            self._adapter_generated,
            self._adapter_first_token,
            self._adapter_end_to_end,
        )

    def observe(self, output: RequestOutput) -> None:
        """Take an output of a request. Thread-safe."""
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        now = time.monotonic()
        with self._lock:
            last = self._last.pop(output.request_id, None)
            if not output.finished:
                self._last[output.request_id] = (now, num_tokens)
        if last is not None and num_tokens > last[1]:
            # tokens of one step come at once, one for each completion
            self._between.observe(now - last[0])
        if output.finished:
            self._observe_end(output, num_tokens)

    def _observe_end(self, output: RequestOutput, num_tokens: int) -> None:
        times, label = output.metrics, self._label(output.adapter)
        if times.time_to_first_token is not None:
            self._first_token.observe(times.time_to_first_token)
            self._adapter_first_token.labels(label).observe(times.time_to_first_token)
        if times.time_per_output_token is not None:
            self._per_token.observe(times.time_per_output_token)
        if times.queue_time is not None:
            self._queue.observe(times.queue_time)
        self._end_to_end.observe(times.end_to_end_time)
        self._adapter_end_to_end.labels(label).observe(times.end_to_end_time)
        self._ended.labels(output.outputs[0].finish_reason or "error").inc()
        self._adapter_requests.labels(label).inc()
        self._adapter_prompt.labels(label).inc(len(output.prompt_token_ids))
        self._adapter_generated.labels(label).inc(num_tokens)

    def _label(self, adapter: str | None) -> str:
        label = self._base if adapter is None else adapter
        with self._lock:
            if label in self._labels or label == self._base:
                return label
            if len(self._labels) >= self._max:
                return OTHER
            self._labels.add(label)
            return label

    def render(self, stats: EngineStats, adapters: Sequence[AdapterStatus]) -> bytes:
        """All metrics in Prometheus' text format. Adapters that are not listed lose their series."""
        self._forget_all_but({status.name for status in adapters})
        self._snapshot.stats, self._snapshot.adapters = stats, adapters
        return generate_latest(self.registry)

    def by_adapter(self) -> dict[str, dict[str, float]]:
        """Counts and mean latencies per label of adapter."""
        found: dict[str, dict[str, float]] = collections.defaultdict(dict)
        for metric in self._of_adapters:
            for family in metric.collect():
                for sample in family.samples:
                    if sample.name.endswith(("_total", "_sum", "_count")):
                        found[sample.labels["adapter"]][sample.name.removeprefix("lorajax:adapter_")] = (
                            sample.value
                        )
        return {label: _readable(values) for label, values in found.items()}

    def _forget_all_but(self, names: set[str]) -> None:
        with self._lock:
            gone = self._labels - names
            self._labels -= gone
        for label in gone:
            for metric in self._of_adapters:
                metric.remove(label)


def _readable(values: dict[str, float]) -> dict[str, float]:
    def mean(name: str) -> float:
        count = values.get(f"{name}_count", 0)
        return values[f"{name}_sum"] / count if count else 0.0

    return {
        "num_requests": values.get("requests_total", 0),
        "num_prompt_tokens": values.get("prompt_tokens_total", 0),
        "num_output_tokens": values.get("generation_tokens_total", 0),
        "mean_time_to_first_token": mean("time_to_first_token_seconds"),
        "mean_end_to_end_time": mean("e2e_request_latency_seconds"),
    }


class _Snapshot(Collector):
    """The engine's own counts, as they were when they were asked for."""

    stats: EngineStats | None = None
    adapters: Sequence[AdapterStatus] = ()

    def collect(self) -> Iterator[Metric]:
        if self.stats is None:
            return
        stats, adapters = self.stats, self.adapters
        for name, meaning, value in (
            ("num_requests_running", "Sequences in the batch.", stats.num_running),
            ("num_requests_waiting", "Sequences that wait.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", _share_in_use(stats)),
            ("num_adapters_host", "Adapters registered.", stats.num_adapters),
            ("num_adapters_resident", "Adapters in a slot of the device.", stats.num_resident_adapters),
            ("num_adapters_running", "Adapters with requests in the batch.", _count(adapters, "num_running")),
            ("num_adapters_waiting", "Adapters with requests that wait.", _count(adapters, "num_waiting")),
        ):
            yield GaugeMetricFamily(f"lorajax:{name}", meaning, value=value)
        for name, meaning, value in (
            ("prompt_tokens", "Prompt tokens of accepted requests.", stats.num_prompt_tokens),
            ("generation_tokens", "Generated tokens.", stats.num_output_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_query_tokens),
            ("prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hit_tokens),
            ("num_preemptions", "Sequences put back to wait.", stats.num_preemptions),
            ("engine_steps", "Steps of the engine.", stats.num_steps),
            (
                "compilations",
                "Programs compiled after warm-up; more than 0 is a defect.",
                stats.num_compilations,
            ),
        ):
            yield CounterMetricFamily(f"lorajax:{name}", meaning, value=value)


def _share_in_use(stats: EngineStats) -> float:
    return 1 - stats.num_free_pages / stats.num_pages


def _count(adapters: Sequence[AdapterStatus], field: str) -> int:
    return sum(getattr(status, field) > 0 for status in adapters)
