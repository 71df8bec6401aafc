"""Which requests run in the next step, on which pages and slots. Touches no device.

`schedule` decides and reserves, `update` takes the step's tokens. Between the two, requests may still be
added and ended; `update` passes over those that ended.

Invariants: a RUNNING request holds the pages of all its known tokens, and a pin on its adapter's slot; a
WAITING or FINISHED one holds neither. A running request either prefills, or decodes one token in every step;
a step that cannot finish a prompt has no budget left for another, so between steps at most one is unfinished.
The distinct adapters among running requests, hence in a step, never exceed `max_loras` (see `adapter_turns`).
As long as there are live requests, every step makes progress.
"""

import bisect
import time
from collections.abc import Callable, Iterable

from lorajax.errors import QueueFull, RequestRejected
from serving.adapter_slots import AdapterSlots
from serving.adapter_turns import AdapterTurns
from serving.block_hash import block_hash, extend_chain, namespace_keys
from serving.page_pool import PagePool
from serving.prefix_cache import CachedBlock, PrefixCache
from serving.request import FinishReason, Request, RequestStatus, order_of
from serving.scheduled_batch import PrefillChunk, ScheduledBatch
from serving.scheduler_config import SchedulerConfig
from serving.waiting_queue import WaitingQueue

__all__ = ["PrefillChunk", "ScheduledBatch", "Scheduler", "SchedulerConfig"]


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
        self._max_pages = -(-config.max_model_len // config.page_size)
        self._turns = AdapterTurns(slots, max_places=config.max_loras, patience=config.adapter_patience)
        self.running: list[Request] = []  # in the order of priority, then arrival
        self._prefilling: list[Request] = []  # of these: those with known tokens to compute
        self._queue = WaitingQueue()
        self._followers: dict[Request, list[Request]] = {}  # leader -> waiting for its prompt's pages
        self._live: dict[str, Request] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._num_arrivals = 0
        self.num_preemptions = self.prefix_query_tokens = self.prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_waiting(self) -> int:
        return len(self._live) - len(self.running)

    @property
    def waiting(self) -> list[Request]:
        """Live requests that do not run, in the order of priority, then arrival."""
        waiting = [r for r in self._live.values() if r.status is RequestStatus.WAITING]
        return sorted(waiting, key=order_of)

    def get(self, request_id: str) -> Request | None:
        """A live request by its id."""
        return self._live.get(request_id)

    # ---- coming and going ----

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestRejected if it can never run, or the queue is full."""
        if not request.request_id or request.request_id in self._live:
            raise RequestRejected(f"request id {request.request_id!r} is empty or in use; allowed: a new one")
        if self.num_waiting >= self.config.max_queue:
            raise QueueFull(
                f"{self.num_waiting} requests are waiting; allowed: max_queue = {self.config.max_queue}"
            )
        self._check_fits(request)
        request.arrival, self._num_arrivals = self._num_arrivals, self._num_arrivals + 1
        request.status = RequestStatus.WAITING
        request.namespace_keys = namespace_keys(request.adapter_id, request.cache_salt)
        request.end_token_ids = frozenset((*request.eos_token_ids, *(request.params.stop_token_ids or ())))
        self._live[request.request_id] = request
        if request.deadline is not None:
            bisect.insort(self._deadlines, (request.deadline, request.arrival, request))
        self._enqueue(request)

    def _check_fits(self, request: Request) -> None:
        config, prompt, output = self.config, request.num_prompt_tokens, request.max_tokens
        if prompt < 1 or output < 0:
            raise RequestRejected(
                f"the request has {prompt} prompt tokens and max_tokens {output}; allowed: at least 1, and 0"
            )
        if prompt + output > config.max_model_len:
            raise RequestRejected(
                f"{prompt} prompt tokens and max_tokens {output} make {prompt + output}; allowed: "
                f"max_model_len = {config.max_model_len}"
            )
        needed = max(prompt, prompt + output - 1)  # the last token's KV is never written
        if needed > config.num_pages * config.page_size:
            raise RequestRejected(
                f"the request needs KV for {needed} tokens; allowed: {config.num_pages} pages of "
                f"{config.page_size} tokens"
            )
        if request.adapter_id and not self.slots.num_slots:
            raise RequestRejected("the request names an adapter; allowed: none, since max_loras is 0")

    def abort(self, request_id: str) -> bool:
        """End a request now, and free all it holds. False if no such request is live."""
        request = self._live.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT)
        return request is not None

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request and free all it holds. One that has ended already stays as it is."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.RUNNING:
            self._stop_running(request)
        else:
            self._dequeue(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._live[request.request_id]
        if request.deadline is not None:
            entry = (request.deadline, request.arrival, request)
            del self._deadlines[bisect.bisect_left(self._deadlines, entry)]
        self._release_followers(request)

    def _enqueue(self, request: Request) -> None:
        """A follower waits beside the queue until its leader's pages can be shared."""
        leader = request.leader
        if leader is not None and leader.status is not RequestStatus.FINISHED and not leader.prompt_computed:
            self._followers.setdefault(leader, []).append(request)
        else:
            self._queue.add(request)

    def _dequeue(self, request: Request) -> None:
        followers = () if request.leader is None else self._followers.get(request.leader, ())
        if request in followers:
            self._followers[request.leader].remove(request)  # pyright: ignore[reportArgumentType]
        else:
            self._queue.remove(request)

    def _release_followers(self, leader: Request) -> None:
        for follower in self._followers.pop(leader, ()):
            self._queue.add(follower)

    def _stop_running(self, request: Request) -> None:
        """Take a running request's pages and pin."""
        self.cache.release(request.page_ids)
        request.drop_pages()
        self._turns.stop(request)
        position = bisect.bisect_left(self.running, order_of(request), key=order_of)
        assert self.running[position] is request
        del self.running[position]
        if request in self._prefilling:
            self._prefilling.remove(request)

    # ---- a step ----

    def schedule(self) -> ScheduledBatch:
        """The next step's batch: a token of every decoding request, then prefill with what remains."""
        batch = ScheduledBatch()
        if self._deadlines:
            self._end_late_requests(batch)
        self._turns.next_step(self._queue)
        self._schedule_decodes(batch)
        blocks = (self.config.max_num_batched_tokens - len(batch.decodes)) // self.config.prefill_block
        for request in self._prefilling:
            if not blocks:
                break
            blocks -= self._add_chunk(batch, request, blocks)
        if not batch.preempted:  # pages are short: nobody new
            self._admit(batch, blocks)
        prefetched = self._turns.prefetch(self._queue) if len(self._queue) else None
        if prefetched is not None:
            batch.slot_writes.append(prefetched)
        return batch

    def _end_late_requests(self, batch: ScheduledBatch) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._deadlines[0][2]
            self.finish(request, FinishReason.ABORT, "deadline")
            batch.ended.append(request)

    def _schedule_decodes(self, batch: ScheduledBatch) -> None:
        """One token each, and a page where the last one is full: taken from the youngest if there is none."""
        size, running = self.config.page_size, RequestStatus.RUNNING
        unfinished = self._prefilling  # one at most
        decodes = [r for r in self.running if r not in unfinished] if unfinished else self.running.copy()
        for request in [r for r in decodes if r.num_computed_tokens == len(r.page_ids) * size]:
            while request.status is running and not self.pool.num_available:
                self._preempt(self.running[-1], batch)
            if request.status is running:
                request.add_page(self.cache.allocate())
        batch.decodes = [r for r in decodes if r.status is running] if batch.preempted else decodes

    def _preempt(self, request: Request, batch: ScheduledBatch) -> None:
        """Back to the queue; its tokens are computed again (or found in the cache) when it resumes."""
        self._stop_running(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        batch.preempted.append(request)
        self._queue.add(request)

    def _add_chunk(self, batch: ScheduledBatch, request: Request, blocks: int) -> int:
        """Schedule a request's next tokens, of at most so many blocks; returns how many blocks they take."""
        start, end = request.num_computed_tokens, request.num_tokens
        size = min(end - start, blocks * self.config.prefill_block)
        samples = start + size == end and request.max_tokens > 0
        batch.prefills.append(PrefillChunk(request, start, size, samples))
        return -(-size // self.config.prefill_block)

    def _admit(self, batch: ScheduledBatch, blocks: int) -> None:
        """Start waiting requests in order, passing over those whose adapter has no place.

        Each leaves a page to every running request that will need one more: else it would soon be preempted
        for that page, and its prompt computed again.
        """
        if not blocks or not len(self._queue) or len(self.running) >= self.config.max_num_seqs:
            return
        num_reserved = sum(map(self._will_grow, self.running))
        while blocks and len(self.running) < self.config.max_num_seqs:
            request = self._turns.first_to_start(self._queue)
            if request is None or not self._start(request, batch, num_reserved):
                return  # pages are short: later ones must not take them from this one
            num_reserved += self._will_grow(request)
            blocks -= self._add_chunk(batch, request, blocks)

    def _will_grow(self, request: Request) -> bool:
        """Whether a running request can come to need a page more than it has."""
        longest = len(request.prompt_token_ids) + request.max_tokens - 1
        return longest > len(request.page_ids) * self.config.page_size

    def _start(self, request: Request, batch: ScheduledBatch, num_reserved: int) -> bool:
        """Move a waiting request to running, with all its pages and its slot; False if pages lack."""
        num_available = self.pool.num_available - num_reserved
        if num_available < 1:
            return False  # not even for the one page that is never shared
        shared = self._shared_pages(request)
        num_new = -(-request.num_tokens // self.config.page_size) - len(shared)
        # shared pages without a user count as available until they are taken
        if num_new + sum(not self.pool.count(page_id) for page_id in shared) > num_available:
            return False
        self._queue.remove(request)
        self.cache.share(shared)
        own = [self.cache.allocate() for _ in range(num_new)]
        request.take_pages(shared + own, self._max_pages)
        request.num_computed_tokens = len(shared) * self.config.page_size
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_query_tokens += request.num_prompt_tokens
            self.prefix_hit_tokens += request.num_cached_tokens
        write = self._turns.start(request)
        if write is not None:
            batch.slot_writes.append(write)
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=order_of)
        self._prefilling.append(request)
        return True

    # ---- shared pages ----

    def _shared_pages(self, request: Request) -> list[int]:
        """Pages whose KV the request need not compute. Its last token is always computed, for its logits.

        Nor are tokens whose next token's log-probability the request wants: these come with their logits.
        """
        size, leader = self.config.page_size, request.leader
        most = request.num_tokens - 1
        if request.score_from is not None:
            most = min(most, request.score_from - 1)
        if self.config.enable_prefix_caching:
            tokens = request.token_ids(0, request.num_tokens)
            extend_chain(request.block_hashes, tokens, size, request.namespace_keys)
            return self.cache.match(tokens, request.block_hashes, request.namespace_keys, most)
        if leader is not None and leader.status is RequestStatus.RUNNING and leader.prompt_computed:
            return leader.page_ids[: (request.num_prompt_tokens - 1) // size]
        return []

    def _commit_pages(self, request: Request, first_token: int) -> None:
        """Publish the pages that the tokens from `first_token` on have filled."""
        if not self.config.enable_prefix_caching:
            return
        size, pages, hashes = self.config.page_size, request.page_ids, request.block_hashes
        for page in range(first_token // size, request.num_computed_tokens // size):
            tokens = tuple(request.token_ids(page * size, (page + 1) * size))
            parent_hash = hashes[page - 1] if page else b""
            if len(hashes) == page:
                hashes.append(block_hash(parent_hash, tokens, request.namespace_keys))
            block = CachedBlock(
                page_id=pages[page],
                parent_page=pages[page - 1] if page else None,
                block_hash=hashes[page],
                parent_hash=parent_hash,
                token_ids=tokens,
                keys=request.namespace_keys,
                adapter_id=request.adapter_id,
                adapter_name=request.adapter_name,
            )
            committed = self.cache.commit(block)
            if committed != pages[page]:
                request.replace_page(page, committed)

    # ---- results ----

    def update(self, batch: ScheduledBatch, sampled: Iterable[tuple[Request, int]]) -> list[Request]:
        """Account for a step that ran: KV of its tokens exists, and `sampled` requests have a new token.

        Ends requests that drew a stop token or reached max_tokens, and returns them. Requests that ended
        while the step ran are passed over.
        """
        size, running = self.config.page_size, RequestStatus.RUNNING
        ended: list[Request] = []
        for request in batch.decodes:
            if request.status is running:
                num_computed = request.num_computed_tokens = request.num_computed_tokens + 1
                if not num_computed % size:
                    self._commit_pages(request, num_computed - 1)
        for chunk in batch.prefills:
            if chunk.request.status is running:
                self._account_chunk(chunk, ended)
        for request, token_id in sampled:
            if request.status is running:
                outputs = request.output_token_ids
                outputs.append(token_id)
                if token_id in request.end_token_ids or len(outputs) >= request.max_tokens:
                    self._stop_by_token(request, token_id, ended)
        return ended

    def _account_chunk(self, chunk: PrefillChunk, ended: list[Request]) -> None:
        request = chunk.request
        request.num_computed_tokens += chunk.num_tokens
        self._commit_pages(request, chunk.start)
        if request.num_computed_tokens < request.num_tokens:
            return
        self._prefilling.remove(request)
        self._release_followers(request)
        if not request.max_tokens:
            self.finish(request, FinishReason.LENGTH)
            ended.append(request)

    def _stop_by_token(self, request: Request, token_id: int, ended: list[Request]) -> None:
        num_outputs, params = len(request.output_token_ids), request.params
        if token_id in request.end_token_ids and num_outputs >= params.min_tokens:
            # EOS has no stop reason; a stop token of the user's is its own
            self.finish(request, FinishReason.STOP, None if token_id in request.eos_token_ids else token_id)
        elif num_outputs >= request.max_tokens:
            self.finish(request, FinishReason.LENGTH)
        else:
            return
        ended.append(request)

    def check_invariants(self) -> None:
        """Raise if anything that must hold between steps does not. For tests, and an idle engine."""
        for part in (self.pool, self.cache, self.slots, self._queue):
            part.check_invariants()
        queued = [*self._queue, *(r for followers in self._followers.values() for r in followers)]
        assert sorted(queued, key=order_of) == self.waiting
        assert all(leader.status is not RequestStatus.FINISHED for leader in self._followers)
        assert all(
            not r.page_ids and not r.page_row.size and not r.slot and not r.num_computed_tokens
            for r in queued
        )
        assert self.running == sorted(self.running, key=order_of)
        assert all(r.status is RequestStatus.RUNNING for r in self.running)
        assert {*queued, *self.running} == set(self._live.values())
        adapters = [r.adapter_id for r in self.running if r.adapter_id]
        assert self._turns.placed == {a: adapters.count(a) for a in adapters}
        assert not self.config.max_loras or len(set(adapters)) <= self.config.max_loras
        assert all(r.slot == (self.slots.slot_of(r.adapter_id) or 0) for r in self.running)
        held = [page for r in self.running for page in r.page_ids]
        assert all(self.pool.count(page) == held.count(page) for page in range(self.config.num_pages))
        assert len(self._prefilling) <= 1, "a prompt was started before another was finished"
        decoding = set(self.running) - set(self._prefilling)
        assert len(decoding) == len(self.running) - len(self._prefilling)
        assert all(r.num_computed_tokens == r.num_tokens - 1 and r.output_token_ids for r in decoding)
        for request in self.running:
            assert len(set(request.page_ids)) == len(request.page_ids)
            assert request.page_row[: len(request.page_ids)].tolist() == request.page_ids
            assert not request.page_row[len(request.page_ids) :].any()
            assert len(request.page_ids) * self.config.page_size >= request.num_tokens - 1
            assert request.num_computed_tokens < request.num_tokens
        assert len(self._deadlines) == sum(r.deadline is not None for r in self._live.values())
