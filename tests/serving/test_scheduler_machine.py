"""Random lives of a scheduling half, checked after every transition: limits, content of pages, outputs."""

import contextlib

import pytest
from fake_server import FakeServer
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lorajax.errors import RequestRejected
from serving.sampling_params import SamplingParams

NAMES = ["a", "b", "c", "d"]


class ServingMachine(RuleBasedStateMachine):
    """Requests, aborts, deadlines, adapters coming and going, and steps, in any order."""

    server: FakeServer

    @initialize(
        num_pages=st.sampled_from([4, 6, 12, 40]),
        page_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        spare=st.integers(4, 20),
        max_loras=st.integers(0, 3),
        spare_slots=st.integers(0, 2),
        caching=st.booleans(),
        patience=st.sampled_from([0, 1, 8]),
    )
    def start(self, num_pages, page_size, max_num_seqs, spare, max_loras, spare_slots, caching, patience):
        self.server = FakeServer(
            num_pages=num_pages,
            page_size=page_size,
            max_model_len=30,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare,
            max_loras=max_loras,
            max_queue=12,
            enable_prefix_caching=caching,
            num_slots=(max_loras or 1) + spare_slots,
            adapter_patience=patience,
        )
        for name in NAMES[:2]:
            self.server.registry.register(name, None)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_tokens=st.integers(0, 12),
        adapter=st.sampled_from([None, *NAMES]),
        n=st.integers(1, 3),
        eos=st.booleans(),
        priority=st.integers(0, 2),
        cache_salt=st.sampled_from([None, None, "s"]),
        deadline=st.one_of(st.none(), st.integers(0, 20)),
        whole_prompt=st.booleans(),
    )
    def add(self, prompt, max_tokens, adapter, n, eos, priority, cache_salt, deadline, whole_prompt):
        server = self.server
        if adapter is not None and server.registry.find(adapter) is None:
            return
        needed = -(-max(len(prompt), len(prompt) + max_tokens - 1) // server.config.page_size)
        fits = needed <= server.config.num_pages
        has_room = server.scheduler.num_waiting + n <= server.config.max_queue
        with contextlib.nullcontext() if fits and has_room else pytest.raises(RequestRejected):
            server.add(
                prompt,
                max_tokens=max_tokens,
                adapter=adapter,
                n=n,
                eos=eos,
                params=SamplingParams(n=n, prompt_logprobs=1 if whole_prompt else None),
                priority=priority,
                cache_salt=cache_salt,
                deadline=None if deadline is None else server.now + deadline,
            )

    @precondition(lambda self: self.server.scheduler.has_work)
    @rule(data=st.data())
    def abort(self, data):
        live = sorted(self.server.scheduler._live)
        self.server.end(self.server.scheduler.get(data.draw(st.sampled_from(live))))

    @rule(name=st.sampled_from(NAMES))
    def load(self, name):
        self.server.registry.register(name, None, replace=True)
        self.server.collect_drained()

    @rule(name=st.sampled_from(NAMES))
    def keep(self, name):
        entry = self.server.registry.find(name)
        if entry is not None:
            self.server.slots.keep(entry.adapter_id)

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name):
        if self.server.registry.find(name) is not None:
            entry = self.server.registry.start_draining(name)
            self.server.collect_drained()
            if not entry.users:
                assert not self.server.slots.is_resident(entry.adapter_id)

    @rule()
    def clear_cache(self):
        self.server.cache.clear()

    @rule(times=st.integers(1, 8))
    def step(self, times):
        for _ in range(times):
            self.server.step()
            self.server.now += 1
            self.server.check()

    @precondition(lambda self: self.server.scheduler.has_work)
    @rule(data=st.data())
    def step_with_abort(self, data):
        live = sorted(self.server.scheduler._live)
        self.server.step([self.server.scheduler.get(data.draw(st.sampled_from(live)))])

    @invariant()
    def holds(self):
        if hasattr(self, "server"):
            self.server.check()

    def teardown(self):
        if hasattr(self, "server"):
            self.server.run()
            self.server.check_idle()


HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def machine(max_examples: int, steps: int) -> type:
    test = type(f"Machine{max_examples}", (ServingMachine,), {}).TestCase
    test.settings = settings(
        max_examples=max_examples, stateful_step_count=steps, deadline=None, suppress_health_check=HEALTH
    )
    return test


class TestScheduler(machine(60, 50)):
    """About three thousand transitions."""


@pytest.mark.slow
class TestSchedulerAtLength(machine(1000, 100)):
    """About a hundred thousand transitions."""
