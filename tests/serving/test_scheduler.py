"""The scheduler's rules one by one. Random lives of it: `test_scheduler_machine.py`."""

import pytest
from fake_server import EOS, FakeServer, alone, chunks, make_config, next_cell, next_token

from lorajax.errors import ConfigError, RequestRejected
from serving.request import FinishReason, RequestStatus
from serving.sampling_params import SamplingParams

# ---- prefill and decode ----


def test_a_request_prefills_once_and_then_decodes():
    server = FakeServer()
    (request,) = server.add([1, 2, 3, 4, 5], max_tokens=3)
    assert chunks(server.step()) == [("0/0", 0, 5, True)]
    for _ in range(2):
        batch = server.step()
        assert batch.decodes == [request]
        assert not batch.prefills
    assert request.finish_reason is FinishReason.LENGTH
    assert server.num_computed == 7, "the last token's KV is never computed"
    server.check_idle()


def test_long_prompts_go_in_chunks_of_whole_blocks():
    server = FakeServer(max_num_seqs=2, max_num_batched_tokens=12, prefill_block=4)
    server.add(list(range(17)), max_tokens=2)
    steps = [chunks(server.step()) for _ in range(2)]
    assert steps == [[("0/0", 0, 12, False)], [("0/0", 12, 5, True)]]


def test_a_chunk_costs_its_blocks_and_the_rest_goes_to_the_next():
    server = FakeServer(max_num_batched_tokens=20, prefill_block=4)
    server.add([0] * 5, max_tokens=1)
    server.add([1] * 9, max_tokens=1)
    server.add([2] * 1, max_tokens=1)
    assert chunks(server.step()) == [("0/0", 0, 5, True), ("1/0", 0, 9, True)]
    assert chunks(server.step()) == [("2/0", 0, 1, True)]


def test_every_decode_goes_before_prefill_and_leaves_it_a_block():
    server = FakeServer(max_num_seqs=4, max_num_batched_tokens=8, prefill_block=4)
    for number in range(3):
        server.add([number], max_tokens=12)
    server.step()
    server.step()
    server.add([5] * 20, max_tokens=1)
    for start in range(0, 20, 4):
        batch = server.step()
        assert len(batch.decodes) == 3
        assert chunks(batch) == [("3/0", start, 4, start == 16)]


def test_a_budget_without_room_for_a_prompt_is_refused():
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 11; allowed: at least max_num_seqs"):
        make_config(max_num_seqs=8, max_num_batched_tokens=11, prefill_block=4)


def test_a_started_prompt_is_finished_before_new_ones_start():
    server = FakeServer(max_num_seqs=4, max_num_batched_tokens=8, prefill_block=4)
    server.add([0] * 14, max_tokens=1)
    server.step()
    server.add([1] * 6, max_tokens=1, priority=-1)
    assert chunks(server.step()) == [("0/0", 8, 6, True)]
    assert chunks(server.step()) == [("1/0", 0, 6, True)]


def test_priority_then_arrival():
    server = FakeServer(max_num_seqs=2, max_num_batched_tokens=8)
    for priority in [1, 0, 0, -1]:
        server.add([1], priority=priority, max_tokens=1)
    order = [chunk[0] for _ in range(2) for chunk in chunks(server.step())]
    assert order == ["3/0", "1/0", "2/0", "0/0"]


# ---- ends ----


@pytest.mark.parametrize("min_tokens", [0, 2, 8])
def test_eos_and_stop_ids_end_from_min_tokens_on(min_tokens):
    server = FakeServer()
    params = SamplingParams(max_tokens=30, min_tokens=min_tokens, stop_token_ids=[3])
    requests = [
        server.add([number], max_tokens=30, params=params, eos=eos)[0]
        for number in range(7)
        for eos in (0, 1)
    ]
    server.run()
    for request in requests:
        assert request.output_token_ids == alone(request)
        last = request.output_token_ids[-1]
        if request.finish_reason is FinishReason.STOP:
            assert last in (EOS, 3)
            assert request.stop_reason == (3 if last == 3 else None)
            assert len(request.output_token_ids) >= min_tokens
        else:
            assert request.finish_reason is FinishReason.LENGTH
            assert len(request.output_token_ids) == 30
    assert {r.finish_reason for r in requests} >= {FinishReason.STOP}


def test_a_stop_at_the_last_token_is_a_stop():
    server = FakeServer()
    first = next_token(next_cell("", 1, 0, None))
    (request,) = server.add([1], max_tokens=1, params=SamplingParams(stop_token_ids=[first]))
    server.run()
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, first)


def test_the_engine_may_end_a_request_for_a_stop_string():
    server = FakeServer()
    (request,) = server.add([1], max_tokens=9)
    server.step()
    server.scheduler.finish(request, FinishReason.STOP, "end")
    server.scheduler.finish(request, FinishReason.ABORT)
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "end")
    server.check()
    assert not server.scheduler.has_work


def test_no_tokens_wanted_is_a_prefill_alone():
    server = FakeServer()
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    (request,) = server.add(list(range(30)), max_tokens=0, params=params)
    assert chunks(server.step()) == [("0/0", 0, 24, False)]
    assert chunks(server.step()) == [("0/0", 24, 6, False)]
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == []
    server.check_idle()


def test_update_returns_who_ended():
    server = FakeServer()
    (short,), (long,) = server.add([1], max_tokens=1), server.add([2], max_tokens=2)
    for expected in ([short], [long]):
        batch = server.scheduler.schedule()
        assert server.scheduler.update(batch, server._run(batch)) == expected


# ---- refusals ----


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "changes", "reason"),
    [
        (0, 4, {}, "0 prompt tokens"),
        (3, -1, {}, "max_tokens -1"),
        (60, 5, {}, "60 prompt tokens and max_tokens 5 make 65; allowed: max_model_len = 64"),
        (65, 0, {}, "make 65"),
        (10, 8, {"num_pages": 4}, "needs KV for 17 tokens; allowed: 4 pages of 4 tokens"),
        (17, 0, {"num_pages": 4}, "needs KV for 17 tokens"),
    ],
)
def test_what_can_never_run_is_refused_with_the_reason(prompt, max_tokens, changes, reason):
    server = FakeServer(**changes)
    with pytest.raises(RequestRejected, match=reason):
        server.add([1] * prompt, max_tokens=max_tokens)
    server.add([1], max_tokens=2)
    server.run()
    server.check_idle()


@pytest.mark.parametrize(("prompt", "max_tokens"), [(64, 0), (63, 1), (1, 63)])
def test_a_request_that_just_fits_runs(prompt, max_tokens):
    server = FakeServer(num_pages=16)
    (request,) = server.add([1] * prompt, max_tokens=max_tokens)
    server.run()
    assert len(request.output_token_ids) == max_tokens
    server.check_idle()


@pytest.mark.parametrize(("num_pages", "longest"), [(4, 17), (16, 64), (100, 64)])
def test_the_longest_request_is_known(num_pages, longest):
    server = FakeServer(num_pages=num_pages)
    assert server.config.max_request_len == longest
    server.add([1], max_tokens=longest - 1)
    with pytest.raises(RequestRejected):
        server.add([1], max_tokens=longest)


def test_an_adapter_without_slots_is_refused():
    server = FakeServer(max_loras=0)
    server.registry.register("a", None)
    with pytest.raises(RequestRejected, match="max_loras is 0"):
        server.add([1], adapter="a")
    server.check_idle()


def test_a_full_queue_refuses_and_recovers():
    server = FakeServer(max_queue=3, max_num_seqs=1)
    for _ in range(3):
        server.add([1], max_tokens=2)
    with pytest.raises(RequestRejected, match="3 requests are waiting; allowed: max_queue = 3"):
        server.add([1], max_tokens=2)
    server.step()
    server.add([1], max_tokens=2)
    with pytest.raises(RequestRejected):
        server.add([1], n=2)
    server.run()
    server.check_idle()


def test_a_live_id_is_refused_and_a_late_abort_finds_nobody_else():
    server = FakeServer()
    (first,) = server.add([1], max_tokens=5)
    twin = type(first)(request_id=first.request_id, prompt_token_ids=[2], params=first.params)
    for request_id in (first.request_id, ""):
        twin.request_id = request_id
        with pytest.raises(RequestRejected, match="request id"):
            server.scheduler.add(twin)
    twin.request_id = first.request_id
    server.step()
    server.end(first)
    assert not server.scheduler.abort(first.request_id)
    server.scheduler.add(twin)
    server.scheduler.finish(first, FinishReason.ABORT)  # a late end of the first, by its handle
    assert twin.status is RequestStatus.WAITING
    server.run()
    assert twin.finish_reason is FinishReason.LENGTH
    server.check()


def test_one_id_can_be_cancelled_and_used_again_for_ever():
    """F020: in every phase, and on different adapters; nothing is left of any of them."""
    server = FakeServer(num_pages=6, max_loras=1)
    for name in "ab":
        server.registry.register(name, None)
    (background,) = server.add([6], max_tokens=12, adapter="a")
    for turn in range(300):
        adapter_id = turn % 3
        request = type(background)(
            request_id="x",
            prompt_token_ids=[1] * (1 + turn % 9),
            params=background.params,
            adapter_id=adapter_id,
        )
        server.scheduler.add(request)
        for _ in range(turn % 4):
            server.step()
        server.check()
        server.scheduler.abort("x")
        assert not server.scheduler.abort("x")
        if background.status is RequestStatus.FINISHED:
            (background,) = server.add([6], max_tokens=12, adapter="a")
    server.run()
    server.check_idle()


# ---- aborts and deadlines ----


@pytest.mark.parametrize("when", ["waiting", "deferred", "prefilling", "decoding", "in a step", "preempted"])
def test_an_abort_frees_everything_at_once(when):
    server = FakeServer(max_loras=1, num_pages=12, max_num_batched_tokens=12)
    server.registry.register("a", None)
    server.registry.register("b", None)
    (other,) = server.add([9], max_tokens=12, adapter="b" if when == "deferred" else "a")
    if when != "waiting":
        server.step()
    prompt = [1] * (20 if when == "prefilling" else 5)
    (request,) = server.add(prompt, max_tokens=9, adapter="a")
    if when in ("prefilling", "decoding", "in a step", "preempted"):
        server.step()
    if when == "preempted":
        batch = server.scheduler.schedule()
        server.scheduler._preempt(request, batch)
        batch.decodes.remove(request)
        server.scheduler.update(batch, server._run(batch))
    if when == "in a step":
        server.step([request])
    else:
        server.end(request)
    assert request.status is RequestStatus.FINISHED
    assert not request.page_ids
    assert request.slot == 0
    server.check()
    server.run()
    assert other.finish_reason is FinishReason.LENGTH
    server.check_idle()


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_an_abort_while_a_step_runs_discards_what_it_computed(num_steps):
    server = FakeServer(page_size=1)
    (request,) = server.add([1, 2, 3], max_tokens=9)
    (other,) = server.add([1, 2, 4], max_tokens=9)
    for _ in range(num_steps):
        server.step()
    server.step([request])
    assert len(request.output_token_ids) == num_steps
    assert request.finish_reason is FinishReason.ABORT
    assert len(other.output_token_ids) == num_steps + 1
    server.check()
    server.run()
    server.check_idle()


def test_a_deadline_ends_waiting_and_running_requests():
    server = FakeServer(max_num_seqs=1)
    (running,) = server.add([1], max_tokens=30, deadline=3.0)
    (waiting,) = server.add([2], max_tokens=30, deadline=2.0)
    (patient,) = server.add([3], max_tokens=2, deadline=1e9)
    ended = []
    for _ in range(8):
        ended += [(server.now, request) for request in server.step().ended]
        server.now += 1
    assert ended == [(2.0, waiting), (3.0, running)]
    assert (running.finish_reason, running.stop_reason) == (FinishReason.ABORT, "deadline")
    assert patient.finish_reason is FinishReason.LENGTH
    server.check_idle()


# ---- preemption ----


def test_the_youngest_gives_way_and_resumes_with_the_same_tokens():
    server = FakeServer(num_pages=6, page_size=4, enable_prefix_caching=False)
    requests = [server.add([number] * 4, max_tokens=12)[0] for number in range(3)]
    preempted = []
    while server.scheduler.has_work:
        preempted += server.step().preempted
    assert preempted[0] is requests[2]
    assert requests[0] not in preempted
    assert [r.output_token_ids for r in requests] == [alone(r) for r in requests]
    server.check_idle()


def test_a_less_urgent_request_gives_way_first():
    server = FakeServer(num_pages=6, page_size=4)
    requests = [server.add([number] * 4, max_tokens=12, priority=-number)[0] for number in range(3)]
    server.run()
    assert requests[0].num_preemptions > 0
    assert not requests[2].num_preemptions


def test_a_preempted_request_finds_its_pages_again():
    def num_computed(caching: bool) -> int:
        server = FakeServer(num_pages=8, page_size=4, max_num_seqs=2, enable_prefix_caching=caching)
        server.add([1] * 9, max_tokens=16)
        (younger,) = server.add([2] * 9, max_tokens=16)
        server.run()
        assert younger.num_preemptions == 1
        assert younger.num_cached_tokens == 0, "what its prompt found when it first started"
        return server.num_computed

    assert 2 * 24 < num_computed(caching=True) < num_computed(caching=False)


def test_a_newcomer_leaves_pages_for_the_running_to_grow():
    """Without that, each admission would soon be taken back, and its prompt computed again."""
    server = FakeServer(num_pages=40, page_size=4, max_num_seqs=8)
    for number in range(40):
        server.add([number % 7] * (5 + number % 9), max_tokens=8 + number % 12)
    server.run()
    assert server.scheduler.num_preemptions <= 2


def test_no_page_is_left_to_those_that_need_none():
    server = FakeServer(num_pages=8, page_size=4, max_num_seqs=8, max_num_batched_tokens=40)
    for number in range(8):
        server.add([number], max_tokens=4)  # the last token needs no KV: a page is enough
    server.step()
    assert len(server.scheduler.running) == 8
    server.run()
    assert not server.scheduler.num_preemptions


def test_a_newcomer_leaves_a_page_to_each_that_will_grow():
    server = FakeServer(num_pages=6, page_size=4)
    requests = [server.add([number] * 7, max_tokens=4)[0] for number in range(3)]
    for _ in range(2):  # of six pages two requests hold two each; two are theirs to grow into
        server.step()
        assert requests[2].status is RequestStatus.WAITING
    server.run()
    assert not server.scheduler.num_preemptions
