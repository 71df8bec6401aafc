"""Which requests run in the next step, on which pages and slots. Touches no device.

`schedule` decides and reserves, `update` takes the step's tokens; between the two nothing else may
change the batch's requests but `abort`, which is honoured by `update`.

Invariants: a RUNNING request holds the pages of all its scheduled tokens and a pin on its adapter's
slot; a WAITING or FINISHED one holds neither. The distinct adapters among running requests never exceed
`max_loras` (0: no cap), so neither do those of a step. The base model is never counted.
"""

import bisect
import dataclasses
import heapq
import time
from collections.abc import Callable, Iterable

from lorajax.errors import RequestRejected
from serving.adapter_slots import AdapterSlots, SlotWrite
from serving.adapter_turns import AdapterTurns
from serving.block_hash import NamespaceKeys, block_hash, extend_chain, namespace_keys
from serving.page_pool import PagePool
from serving.prefix_cache import PrefixCache
from serving.request import FinishReason, Request, RequestStatus


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits; see `EngineConfig`. prefill_block: tokens to which each prefill chunk is padded."""

    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int
    max_queue: int
    prefill_block: int
    enable_prefix_caching: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, start + num_tokens) of a request. samples: they reach its last known token."""

    request: Request
    start: int
    num_tokens: int
    samples: bool


@dataclasses.dataclass(kw_only=True)
class ScheduledBatch:
    """What one step runs. slot_writes come first; ended: requests whose deadline has passed."""

    decodes: list[Request] = dataclasses.field(default_factory=list)
    prefills: list[PrefillChunk] = dataclasses.field(default_factory=list)
    slot_writes: list[SlotWrite] = dataclasses.field(default_factory=list)
    preempted: list[Request] = dataclasses.field(default_factory=list)
    ended: list[Request] = dataclasses.field(default_factory=list)


def _order(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


class Scheduler:
    """Continuous batching with chunked prefill, preemption by recomputation and fair adapter turns."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        pool: PagePool,
        cache: PrefixCache,
        slots: AdapterSlots,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config, self.pool, self.cache, self.slots = config, pool, cache, slots
        self._clock = clock
        self._turns = AdapterTurns()
        self.waiting: list[Request] = []  # both in the order of priority, then arrival
        self.running: list[Request] = []
        self._live: dict[str, Request] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._running_adapters: dict[int, int] = {}
        self._num_arrivals = 0
        self.num_preemptions = self.prefix_query_tokens = self.prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    # ---- coming and going ----

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestRejected if it can never run, or the queue is full."""
        if request.request_id in self._live:
            raise RequestRejected(f"request id {request.request_id!r} is in use")
        if len(self.waiting) >= self.config.max_queue:
            raise RequestRejected(
                f"{len(self.waiting)} requests are waiting; allowed: max_queue = {self.config.max_queue}"
            )
        self._check_fits(request)
        request.arrival, self._num_arrivals = self._num_arrivals, self._num_arrivals + 1
        request.status = RequestStatus.WAITING
        self._live[request.request_id] = request
        bisect.insort(self.waiting, request, key=_order)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.arrival, request))

    def _check_fits(self, request: Request) -> None:
        config, prompt = self.config, request.num_prompt_tokens
        longest = prompt + request.max_tokens
        if prompt < 1 or request.max_tokens < 0:
            raise RequestRejected(
                f"the request has {prompt} prompt tokens and max_tokens {request.max_tokens}; allowed: 1 or more"
            )
        if longest > config.max_model_len:
            raise RequestRejected(
                f"{prompt} prompt tokens and max_tokens {request.max_tokens} make {longest}; allowed: "
                f"max_model_len = {config.max_model_len}"
            )
        # the last token's KV is never written
        if max(prompt, longest - 1) > config.num_pages * config.page_size:
            raise RequestRejected(
                f"the request needs KV for {longest - 1} tokens; allowed: {config.num_pages} pages of "
                f"{config.page_size} tokens"
            )

    def get(self, request_id: str) -> Request | None:
        """A live request by its id."""
        return self._live.get(request_id)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request and free all it holds. One that has ended already stays as it is."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.RUNNING:
            self._release_resources(request)
            self._remove(self.running, request)
        else:
            self._remove(self.waiting, request)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._live[request.request_id]

    def _remove(self, requests: list[Request], request: Request) -> None:
        position = bisect.bisect_left(requests, _order(request), key=_order)
        assert requests[position] is request
        del requests[position]

    def _release_resources(self, request: Request) -> None:
        # last page first: a prefix is worth more to others than its end
        for page_id in reversed(request.page_ids):
            self.cache.release(page_id)
        request.page_ids.clear()
        adapter = request.adapter_id
        if adapter:
            self.slots.unpin(adapter)
            request.slot = 0
            self._running_adapters[adapter] -= 1
            if not self._running_adapters[adapter]:
                del self._running_adapters[adapter]
                self._turns.left(adapter)

    # ---- a step ----

    def schedule(self) -> ScheduledBatch:
        """The next step's batch. Decodes come first; prefill takes what remains of the budget."""
        batch = ScheduledBatch()
        self._end_overdue(batch)
        self._turns.next_step(self.waiting, self._num_free_places())
        self._schedule_decodes(batch)
        blocks = (self.config.max_num_batched_tokens - len(batch.decodes)) // self.config.prefill_block
        blocks = self._continue_prefills(batch, blocks)
        if not batch.preempted:  # pages are short: nobody new
            self._admit(batch, blocks)
        return batch

    def _end_overdue(self, batch: ScheduledBatch) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            request = heapq.heappop(self._deadlines)[2]
            if request.status is not RequestStatus.FINISHED:
                self.finish(request, FinishReason.ABORT, "deadline")
                batch.ended.append(request)

    def _schedule_decodes(self, batch: ScheduledBatch) -> None:
        position = 0
        while position < len(self.running):  # preemption shortens the list from its end
            request = self.running[position]
            position += 1
            needed = request.num_tokens
            if request.num_computed_tokens == needed - 1 and self._reserve(request, needed, batch):
                batch.decodes.append(request)

    def _continue_prefills(self, batch: ScheduledBatch, blocks: int) -> int:
        position = 0
        while position < len(self.running) and blocks:
            request = self.running[position]
            position += 1
            if request.num_computed_tokens < request.num_tokens - 1:
                size = self._chunk_size(request, blocks)
                if self._reserve(request, request.num_computed_tokens + size, batch):
                    blocks -= self._add_chunk(batch, request, size)
        return blocks

    def _chunk_size(self, request: Request, blocks: int) -> int:
        return min(request.num_tokens - request.num_computed_tokens, blocks * self.config.prefill_block)

    def _add_chunk(self, batch: ScheduledBatch, request: Request, size: int) -> int:
        """Schedule the next `size` tokens; returns how many blocks they take."""
        start = request.num_computed_tokens
        samples = start + size == request.num_tokens and request.max_tokens > 0
        batch.prefills.append(PrefillChunk(request, start, size, samples))
        return -(-size // self.config.prefill_block)

    def _reserve(self, request: Request, num_tokens: int, batch: ScheduledBatch) -> bool:
        """Give a running request pages for its first `num_tokens` tokens, preempting the youngest.

        False if the request itself was the youngest and had to go.
        """
        pages = -(-num_tokens // self.config.page_size)
        while len(request.page_ids) < pages:
            if self.pool.num_available:
                request.page_ids.append(self.cache.allocate())
                continue
            victim = self.running[-1]
            self._preempt(victim, batch)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, batch: ScheduledBatch) -> None:
        """Back to the queue; its tokens are computed again (or found in the cache) when it resumes."""
        if request in batch.decodes:  # a younger one that was scheduled before an older one's prefill
            batch.decodes.remove(request)
        batch.prefills = [chunk for chunk in batch.prefills if chunk.request is not request]
        self._release_resources(request)
        self._remove(self.running, request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        batch.preempted.append(request)
        bisect.insort(self.waiting, request, key=_order)

    def _admit(self, batch: ScheduledBatch, blocks: int) -> None:
        """Start waiting requests in order. One that only lacks an adapter's place is passed over."""
        config = self.config
        admitted: list[Request] = []
        for request in self.waiting:
            if not blocks or len(self.running) >= config.max_num_seqs:
                break
            leader = request.leader
            if (
                leader is not None
                and leader.status is not RequestStatus.FINISHED
                and not leader.prompt_computed
            ):
                continue
            if request.adapter_id and not self._has_place(request):
                self._turns.defer(request)
                continue
            if not self._start(request, batch):
                break  # pages are short: later ones must not take them from this one
            admitted.append(request)
            blocks -= self._add_chunk(batch, request, self._chunk_size(request, blocks))
            assert self._reserve(request, self._scheduled_end(batch), batch)
        for request in admitted:
            self._remove(self.waiting, request)

    @staticmethod
    def _scheduled_end(batch: ScheduledBatch) -> int:
        chunk = batch.prefills[-1]
        return chunk.start + chunk.num_tokens

    def _has_place(self, request: Request) -> bool:
        if request.adapter_id in self._running_adapters:
            return not self._turns.is_leaving(request.adapter_id)
        return self._turns.may_enter(request, self._num_free_places()) and self.slots.can_pin(
            request.adapter_id
        )

    def _num_free_places(self) -> int:
        """Adapters that could still join the running ones."""
        cap, slots = self.config.max_loras, self.slots.num_available
        return min(cap - len(self._running_adapters), slots) if cap else slots

    def _start(self, request: Request, batch: ScheduledBatch) -> bool:
        """Move a waiting request to running, with its cached pages and its slot; False if pages lack."""
        cached = self._cached_pages(request)
        pages = -(-request.num_tokens // self.config.page_size)
        # cached pages without a user are available too, until they are shared
        idle = sum(self.pool.count(page_id) == 0 for page_id in cached)
        if pages - len(cached) > self.pool.num_available - idle:
            return False
        for page_id in cached:
            self.pool.share(page_id)
        request.page_ids.extend(cached)
        num_cached = len(cached) * self.config.page_size
        request.num_computed_tokens = num_cached
        if not request.num_preemptions:
            request.num_cached_tokens = num_cached
            self.prefix_query_tokens += request.num_prompt_tokens
            self.prefix_hit_tokens += num_cached
        if request.adapter_id:
            request.slot, write = self.slots.pin(request.adapter_id)
            if write is not None:
                batch.slot_writes.append(write)
            if request.adapter_id not in self._running_adapters:
                self._turns.entered(request.adapter_id)
            self._running_adapters[request.adapter_id] = self._running_adapters.get(request.adapter_id, 0) + 1
        request.first_deferred_step = None
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=_order)
        return True

    # ---- prefix cache ----

    @staticmethod
    def _keys(request: Request) -> NamespaceKeys:
        return namespace_keys(request.adapter_id, request.cache_salt)

    def _cached_pages(self, request: Request) -> list[int]:
        """Pages to reuse. The last token is always computed: its logits are needed."""
        if not self.config.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return []
        tokens = request.token_ids(0, request.num_tokens)
        extend_chain(request.block_hashes, tokens, self.config.page_size, self._keys(request))
        return self.cache.match(tokens, request.block_hashes, self._keys(request), request.num_tokens - 1)

    def _commit_pages(self, request: Request, first_token: int) -> None:
        """Publish the pages that the tokens from `first_token` on have filled."""
        if not self.config.enable_prefix_caching:
            return
        size = self.config.page_size
        for page in range(first_token // size, request.num_computed_tokens // size):
            tokens = request.token_ids(page * size, (page + 1) * size)
            parent = request.block_hashes[page - 1] if page else b""
            if len(request.block_hashes) == page:
                request.block_hashes.append(block_hash(parent, tokens, self._keys(request)))
            self.cache.commit(
                request.page_ids[page],
                request.block_hashes[page],
                parent,
                tokens,
                self._keys(request),
                request.adapter_id,
                request.adapter_name,
            )

    # ---- results ----

    def update(self, batch: ScheduledBatch, sampled: Iterable[tuple[Request, int]]) -> None:
        """Account for a step that ran: KV of its tokens exists, and `sampled` requests have a new token.

        Ends requests that drew a stop token or reached max_tokens. Requests that ended while the step
        ran are passed over.
        """
        for request in batch.decodes:
            if request.status is RequestStatus.RUNNING:
                request.num_computed_tokens += 1
                if request.num_computed_tokens % self.config.page_size == 0:
                    self._commit_pages(request, request.num_computed_tokens - 1)
        for chunk in batch.prefills:
            if chunk.request.status is RequestStatus.RUNNING:
                chunk.request.num_computed_tokens += chunk.num_tokens
                self._commit_pages(chunk.request, chunk.start)
                if not chunk.request.max_tokens and chunk.request.prompt_computed:
                    self.finish(chunk.request, FinishReason.LENGTH)
        for request, token_id in sampled:
            if request.status is RequestStatus.RUNNING:
                request.output_token_ids.append(token_id)
                self._stop_by_token(request, token_id)

    def _stop_by_token(self, request: Request, token_id: int) -> None:
        num_outputs, params = len(request.output_token_ids), request.params
        if num_outputs >= params.min_tokens:
            if token_id in request.eos_token_ids:
                return self.finish(request, FinishReason.STOP)
            if token_id in params.stop_token_ids:
                return self.finish(request, FinishReason.STOP, token_id)
        if num_outputs >= request.max_tokens:
            self.finish(request, FinishReason.LENGTH)

    def check_invariants(self) -> None:
        """Raise if anything that must hold does not. For tests, between steps."""
        self.pool.check_invariants()
        self.cache.check_invariants()
        self.slots.check_invariants()
        assert self.waiting == sorted(self.waiting, key=_order) and self.running == sorted(
            self.running, key=_order
        )
        assert {id(r) for r in self._live.values()} == {id(r) for r in [*self.waiting, *self.running]}
        assert all(r.status is RequestStatus.WAITING and not r.page_ids and not r.slot for r in self.waiting)
        assert all(r.status is RequestStatus.RUNNING for r in self.running)
        adapters = [r.adapter_id for r in self.running if r.adapter_id]
        assert self._running_adapters == {a: adapters.count(a) for a in adapters}
        assert not self.config.max_loras or len(self._running_adapters) <= self.config.max_loras
        held = [page for r in self.running for page in r.page_ids]
        assert all(self.pool.count(page) == held.count(page) for page in range(self.config.num_pages))
        for request in self.running:
            pages = -(-max(request.num_computed_tokens, 1) // self.config.page_size)
            assert len(set(request.page_ids)) == len(request.page_ids) >= pages
            assert 0 <= request.num_computed_tokens < request.num_tokens
