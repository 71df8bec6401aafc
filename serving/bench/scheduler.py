"""Host cost of a decode step: scheduler and batch builder with a runner that computes nothing.

`lorajax bench scheduler` prints a table. A cell is the median over steps. Requests stand at
different places within their pages, so that each step fills, hashes and commits its share of them.
"""

import dataclasses
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from serving.adapter_registry import AdapterRegistry
from serving.adapter_slots import AdapterSlots
from serving.batch_builder import BatchBuilder
from serving.buckets import make_buckets
from serving.config import PREFILL_BLOCK
from serving.kv_events import KvEventStream
from serving.page_pool import PagePool
from serving.prefix_cache import PrefixCache
from serving.request import Request
from serving.sampling_params import SamplingParams
from serving.scheduler import Scheduler, SchedulerConfig

PAGE_SIZE = 16
MAX_MODEL_LEN = 4096
PARAMS = SamplingParams(temperature=0.0, max_tokens=2048)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCost:
    """Microseconds per step of each part, at so many running requests, adapters and cached pages."""

    num_running: int
    num_adapters: int
    num_cached_pages: int
    schedule: float
    build: float
    update: float

    @property
    def per_request(self) -> float:
        """Microseconds per running request and step."""
        return (self.schedule + self.build + self.update) / self.num_running


def measure(
    num_running: int,
    num_adapters: int,
    *,
    num_registered: int = 0,
    num_pages: int = 100_000,
    num_cached_pages: int = 0,
    num_steps: int = 20 * PAGE_SIZE,
) -> HostCost:
    """Decode `num_running` requests for `num_steps` steps. num_cached_pages: filled before, without users."""
    registry = AdapterRegistry()
    for number in range(max(num_adapters, num_registered)):
        registry.register(f"adapter-{number}", None)
    config = SchedulerConfig(
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running + 8192,
        max_loras=num_adapters,
        max_queue=2 * num_running,
        prefill_block=PREFILL_BLOCK,
    )
    pool = PagePool(num_pages)
    cache = PrefixCache(pool, PAGE_SIZE, KvEventStream(), enabled=True)
    slots = AdapterSlots(num_adapters)
    scheduler = Scheduler(config, pool=pool, cache=cache, slots=slots)
    builder = BatchBuilder(
        buckets=make_buckets(num_running, config.max_num_batched_tokens, deterministic=False),
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_pages=MAX_MODEL_LEN // PAGE_SIZE,
        lora=True,
    )
    draw = random.Random(0).randrange
    numbers = itertools.count()

    def add(prompt_len: int, max_tokens: int) -> None:
        number = next(numbers)
        request_id = str(number)
        entry = registry.acquire(f"adapter-{number % num_adapters}", request_id)
        prompt = [draw(30_000) for _ in range(prompt_len)]
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=PARAMS,
            max_tokens=max_tokens,
            adapter_id=entry.adapter_id,
            adapter_name=entry.name,
        )
        scheduler.add(request)

    def step() -> tuple[float, float, float]:
        begin = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        if batch.decodes:
            builder.build_decode(batch.decodes)
        built = time.perf_counter()
        sampled = [(request, draw(30_000)) for request in batch.decodes]
        sampled += [(chunk.request, draw(30_000)) for chunk in batch.prefills if chunk.samples]
        drawn = time.perf_counter()
        scheduler.update(batch, sampled)
        return scheduled - begin, built - scheduled, time.perf_counter() - drawn

    while len(cache) < num_cached_pages:
        add(MAX_MODEL_LEN - PAGE_SIZE, 1)
        while scheduler.has_work:
            step()
    for number in range(num_running):  # at different places within their pages, as requests are
        add(PAGE_SIZE + number % PAGE_SIZE, PARAMS.max_tokens or 0)
    while scheduler.num_waiting or len(scheduler.schedule().prefills):
        step()
    parts = [statistics.median(part) * 1e6 for part in zip(*(step() for _ in range(num_steps)), strict=True)]
    return HostCost(
        num_running=num_running,
        num_adapters=num_adapters,
        num_cached_pages=len(cache),
        schedule=parts[0],
        build=parts[1],
        update=parts[2],
    )


def report(costs: Sequence[HostCost], console: Console) -> None:
    """Print a table of measurements."""
    table = Table(title="host cost of a decode step, microseconds")
    for heading in (
        "running",
        "adapters",
        "cached pages",
        "schedule",
        "build",
        "update",
        "all, per request",
    ):
        table.add_column(heading, justify="right")
    for cost in costs:
        table.add_row(
            *map(str, (cost.num_running, cost.num_adapters, cost.num_cached_pages)),
            *(f"{value:.1f}" for value in (cost.schedule, cost.build, cost.update)),
            f"{cost.per_request:.2f}",
        )
    console.print(table)


def main(json_path: str | None = None) -> None:
    """All the sizes that matter; about half a minute. json_path: where to write the figures as well."""
    console = Console()
    costs = [measure(running, adapters) for running in (1, 64, 256, 1024) for adapters in (4, 64)]
    costs.append(measure(256, 4, num_cached_pages=50_000))
    costs.append(measure(256, 4, num_registered=10_000))
    report(costs, console)
    if json_path is not None:
        Path(json_path).write_text(json.dumps([dataclasses.asdict(cost) for cost in costs], indent=1))


if __name__ == "__main__":
    main()
