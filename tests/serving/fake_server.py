"""A server without a device: the real scheduling half, and a model whose KV cells can be looked into.

A cell holds what a real KV cell depends on: a digest of every token up to it, the adapter, and the salt
(which must part tenants though it does not change KV). The next token is a function of the last cell. So
a page that belongs to another sequence, adapter or tenant, a missing or an overwritten cell shows at once.
"""

import hashlib
import itertools
from collections.abc import Sequence

from serving.adapter_registry import AdapterRegistry
from serving.adapter_slots import AdapterSlots
from serving.kv_events import KvEventStream, replay
from serving.page_pool import PagePool
from serving.prefix_cache import PrefixCache
from serving.request import FinishReason, Request, RequestStatus
from serving.sampling_params import SamplingParams
from serving.scheduler import ScheduledBatch, Scheduler, SchedulerConfig

EOS = 0
VOCAB = 7


def next_cell(previous: str, token: int, adapter_id: int, salt: str | None) -> str:
    return hashlib.md5(f"{previous}|{token}|{adapter_id}|{salt}".encode()).hexdigest()


def next_token(cell: str) -> int:
    return int(cell, 16) % VOCAB


def alone(request: Request) -> list[int]:
    """What the request gives on a machine of its own."""
    cell = ""
    for token in request.prompt_token_ids:
        cell = next_cell(cell, token, request.adapter_id, request.cache_salt)
    outputs: list[int] = []
    ends = {*request.eos_token_ids, *(request.params.stop_token_ids or ())}
    while len(outputs) < request.max_tokens:
        token = next_token(cell)
        outputs.append(token)
        if token in ends and len(outputs) >= request.params.min_tokens:
            break
        cell = next_cell(cell, token, request.adapter_id, request.cache_salt)
    return outputs


def chunks(batch: ScheduledBatch) -> list[tuple[str, int, int, bool]]:
    """A batch's prefill chunks: request id, first token, number of tokens, whether it samples."""
    return [(c.request.request_id, c.start, c.num_tokens, c.samples) for c in batch.prefills]


def make_config(**changes) -> SchedulerConfig:
    settings = {
        "page_size": 4,
        "num_pages": 64,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 24,
        "max_loras": 2,
        "max_queue": 1000,
        "prefill_block": 4,
    }
    return SchedulerConfig(**(settings | changes))


class FakeServer:
    """Steps requests; checks every cell that a step reads, every limit, and every output."""

    def __init__(self, *, num_slots: int | None = None, **config_changes):
        self.config = make_config(**config_changes)
        self.now = 0.0
        self.events: list = []
        stream = KvEventStream()
        stream.subscribe(self.events.append)
        self.pool = PagePool(self.config.num_pages)
        enabled = self.config.enable_prefix_caching
        self.cache = PrefixCache(self.pool, self.config.page_size, stream, enabled=enabled)
        self.slots = AdapterSlots(self.config.max_loras if num_slots is None else num_slots)
        self.registry = AdapterRegistry()
        self.scheduler = Scheduler(
            self.config, pool=self.pool, cache=self.cache, slots=self.slots, clock=lambda: self.now
        )
        self.cells: dict[tuple[int, int], str] = {}
        self.slot_content: dict[int, int] = {}
        self.started_at: dict[Request, int] = {}
        self.num_steps = 0
        self.num_computed = 0  # tokens, recomputed ones counted again
        self.ended: list[Request] = []
        self._numbers = itertools.count()

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        adapter: str | None = None,
        n: int = 1,
        eos: bool = False,
        params: SamplingParams | None = None,
        **fields,
    ) -> list[Request]:
        """Queue a request and its followers; nothing stays of one that is refused."""
        params = params or SamplingParams(n=n)
        group = str(next(self._numbers))
        adapter_id = 0 if adapter is None else self.registry.acquire(adapter, group).adapter_id
        children: list[Request] = []
        for index in range(n):
            child = Request(
                request_id=f"{group}/{index}",
                group_id=group,
                child_index=index,
                leader=children[0] if children else None,
                score_from=None if params.prompt_logprobs is None or children else 1,
                prompt_token_ids=list(prompt),
                params=params,
                adapter_id=adapter_id,
                adapter_name=adapter,
                eos_token_ids=(EOS,) if eos else (),
                max_tokens=max_tokens,
                **fields,
            )
            try:
                self.scheduler.add(child)
            except Exception:
                for added in children:
                    self.end(added)
                self.registry.release(adapter_id, group)
                raise
            children.append(child)
        return children

    def end(self, request: Request) -> None:
        assert self.scheduler.abort(request.request_id)
        self._ended(request)

    def step(self, abort_between: Sequence[Request] = ()) -> ScheduledBatch:
        """One step. abort_between: requests that are aborted while it runs."""
        live = self.scheduler.has_work
        batch = self.scheduler.schedule()
        self.num_steps += 1
        for request in batch.ended:
            self._ended(request)
        assert batch.decodes or batch.prefills or batch.ended or not live, "a step without progress"
        self._check_limits(batch)
        for write in batch.slot_writes:
            self.slot_content[write.slot] = write.adapter_id
        sampled = self._run(batch)
        for request in abort_between:
            if request.status is not RequestStatus.FINISHED:
                self.end(request)
        for request in self.scheduler.update(batch, sampled):
            self._ended(request)
        return batch

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nobody is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"requests are left after {max_steps} steps")

    def check(self) -> None:
        self.scheduler.check_invariants()
        self.registry.check_invariants()
        assert replay(self.events) == self.cache.block_hashes

    def check_idle(self) -> None:
        self.check()
        assert not self.scheduler.has_work
        assert self.pool.num_available == self.pool.num_pages
        assert not self.scheduler._turns.placed
        assert not any(entry.users for entry in self.registry)

    def collect_drained(self) -> None:
        for entry in self.registry.drained():
            self.slots.drop(entry.adapter_id)
            self.cache.drop_adapter(entry.adapter_id)
            self.registry.remove(entry)

    def _ended(self, request: Request) -> None:
        expected = alone(request)
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert request.output_token_ids == expected
        else:
            assert request.output_token_ids == expected[: len(request.output_token_ids)]
        self.ended.append(request)
        group = [r for r in self.scheduler._live.values() if r.group_id == request.group_id]
        if not group:
            self.registry.release(request.adapter_id, request.group_id)
            self.collect_drained()

    def _check_limits(self, batch: ScheduledBatch) -> None:
        config, block = self.config, self.config.prefill_block
        rows = [*batch.decodes, *(chunk.request for chunk in batch.prefills)]
        assert len(set(rows)) == len(rows) <= config.max_num_seqs
        assert set(self.scheduler.running) >= set(rows)
        assert not set(self.scheduler.running) & set(batch.preempted), "preempted and started at once"
        padded = sum(-(-chunk.num_tokens // block) * block for chunk in batch.prefills)
        assert len(batch.decodes) + padded <= config.max_num_batched_tokens
        adapters = {r.adapter_id for r in self.scheduler.running} - {0}
        assert len(adapters) <= (config.max_loras or self.slots.num_slots)
        assert all(chunk.num_tokens > 0 for chunk in batch.prefills)
        first = next(iter(self.scheduler._queue), None)
        has_budget = len(batch.decodes) + padded + block <= config.max_num_batched_tokens
        has_seat = len(self.scheduler.running) < config.max_num_seqs
        if first is not None and not first.adapter_id and has_budget and has_seat and not batch.preempted:
            needed = -(-first.num_tokens // config.page_size)
            needed += sum(map(self.scheduler._will_grow, self.scheduler.running))
            assert needed > self.pool.num_available, "base waits for pages alone, never for the cap"

    def _run(self, batch: ScheduledBatch) -> list[tuple[Request, int]]:
        """The model: reads each row's cells from its pages, writes the new ones, draws tokens."""
        chunks = [(r, r.num_tokens - 1, 1, True) for r in batch.decodes]
        chunks += [(c.request, c.start, c.num_tokens, c.samples) for c in batch.prefills]
        written: set[tuple[int, int]] = set()
        sampled = []
        for request, start, count, samples in chunks:
            self.started_at.setdefault(request, self.num_steps)
            assert self.slot_content.get(request.slot, 0) == request.adapter_id, "another adapter's slot"
            assert start == request.num_computed_tokens
            cell = ""
            for position, token in enumerate(request.token_ids(0, start + count)):
                place = (
                    request.page_ids[position // self.config.page_size],
                    position % self.config.page_size,
                )
                cell = next_cell(cell, token, request.adapter_id, request.cache_salt)
                if position >= start:
                    assert self.pool.count(place[0]) == 1, "a page that others read is written"
                    assert place not in written
                    written.add(place)
                    self.cells[place] = cell
                    self.num_computed += 1
                assert self.cells[place] == cell, "a row reads KV that is not its own"
            if samples:
                sampled.append((request, next_token(cell)))
        return sampled
