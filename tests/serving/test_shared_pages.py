"""What requests share and what they never share: pages of prompts, versions, children, company."""

import pytest
from fake_server import FakeServer, alone, chunks
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.request import FinishReason
from serving.sampling_params import SamplingParams

# ---- prefix cache ----


def test_a_seen_prompt_is_not_computed_again_but_for_its_last_token():
    server = FakeServer(page_size=4)
    for prompt, cached in [([1] * 8, 0), ([1] * 8, 4), ([1] * 9, 8), ([1] * 3, 0), ([1] * 8 + [2] * 8, 8)]:
        (request,) = server.add(prompt, max_tokens=1)
        server.run()
        assert request.num_cached_tokens == cached
    assert server.scheduler.prefix_query_tokens == 8 + 8 + 9 + 3 + 16
    assert server.scheduler.prefix_hit_tokens == 4 + 8 + 8


def test_answers_are_found_as_part_of_the_next_prompt():
    server = FakeServer(page_size=4)
    (first,) = server.add([1] * 5, max_tokens=8)
    server.run()
    (second,) = server.add([1] * 5 + first.output_token_ids + [3], max_tokens=1)
    server.run()
    assert second.num_cached_tokens == 12


def test_a_chain_that_starts_in_mid_request_is_its_adapters():
    """A prompt shorter than a page has no hash at admission: its first page fills while decoding."""
    server = FakeServer(page_size=8, max_model_len=64)
    for name in ("a", "b"):
        server.registry.register(name, None)
    outputs = {}
    for adapter, salt in [("a", None), ("b", None), (None, None), (None, "s"), ("a", "s")]:
        (first,) = server.add([1, 2], max_tokens=20, adapter=adapter, cache_salt=salt)
        server.run()
        outputs[adapter, salt] = first.output_token_ids
        for other in [("a", None), ("b", None), (None, None), (None, "s"), ("a", "s")]:
            seen = [1, 2, *first.output_token_ids]
            (probe,) = server.add(seen, max_tokens=1, adapter=other[0], cache_salt=other[1])
            server.run()
            if other == (adapter, salt):
                assert probe.num_cached_tokens == 16
            elif outputs.get(other) != first.output_token_ids:
                assert probe.num_cached_tokens == 0
    server.check_idle()


def test_a_new_version_never_finds_old_pages():
    """F001: the old version still decodes while the new one is loaded, and publishes pages after that."""
    server = FakeServer(page_size=2)
    server.registry.register("a", None)
    prompt = [1, 2, 3, 4, 5, 6, 1]
    (old,) = server.add(prompt, max_tokens=10, adapter="a")
    server.step()
    server.registry.register("a", None, replace=True)
    server.collect_drained()
    (new,) = server.add(prompt, max_tokens=10, adapter="a")
    server.run()
    assert old.adapter_id != new.adapter_id
    assert new.num_cached_tokens == 0
    assert new.output_token_ids == alone(new) != old.output_token_ids
    (later,) = server.add([*prompt, *old.output_token_ids], max_tokens=1, adapter="a")
    assert not server.slots.is_resident(old.adapter_id)
    server.run()
    assert later.num_cached_tokens == 6, "the new version's own pages only"


def test_prompt_logprobs_need_the_whole_prompt():
    """F017: nothing of it comes from the cache, also under n > 1; the followers share all the same."""
    server = FakeServer(page_size=4)
    prompt = [1] * 11
    server.add(prompt, max_tokens=2)
    server.run()
    leader, follower = server.add(prompt, max_tokens=2, n=2, params=SamplingParams(n=2, prompt_logprobs=1))
    batches = []
    while server.scheduler.has_work:
        batches += chunks(server.step())
    assert batches[0] == (leader.request_id, 0, 11, True)
    assert (leader.num_cached_tokens, follower.num_cached_tokens) == (0, 8)
    server.check_idle()


def test_equal_prompts_in_one_step_end_up_on_the_same_pages():
    server = FakeServer(page_size=4)
    twins = [server.add([1] * 8, max_tokens=3)[0] for _ in range(2)]
    server.step()
    assert twins[0].page_ids[:2] == twins[1].page_ids[:2]
    server.check()
    server.run()


# ---- n > 1 ----


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("prompt", "shared"), [(18, 4), (17, 4), (20, 4)])
def test_children_share_the_prompts_pages(caching, prompt, shared):
    server = FakeServer(page_size=4, enable_prefix_caching=caching, max_num_batched_tokens=24)
    children = server.add([1] * prompt, max_tokens=6, n=4)
    server.step()  # the leader's prompt: the others wait for it
    assert server.scheduler.running == children[:1]
    server.step()
    assert server.scheduler.running == children
    assert len({tuple(child.page_ids[:shared]) for child in children}) == 1
    assert [server.pool.count(page) for page in children[0].page_ids[:shared]] == [4] * shared
    server.check()
    server.run()
    assert server.num_computed == prompt + 3 * (prompt - 4 * shared) + 4 * 5
    server.check_idle()


def test_children_wait_for_all_of_a_chunked_prompt():
    server = FakeServer(page_size=4, max_num_batched_tokens=16)
    children = server.add([1] * 30, max_tokens=6, n=3)
    for _ in range(2):
        server.step()
        assert server.scheduler.running == children[:1]
        assert server.scheduler.num_waiting == 2
    server.step()
    assert server.scheduler.running == children
    server.run()
    assert [child.num_cached_tokens for child in children] == [0, 28, 28]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("which", [0, 1, 3])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_children_do_not_need_each_other(caching, which, steps):
    server = FakeServer(page_size=4, enable_prefix_caching=caching, max_num_batched_tokens=16)
    server.registry.register("a", None)
    children = server.add([1] * 18, max_tokens=6, n=4, adapter="a")
    for _ in range(steps):
        server.step()
    server.end(children[which])
    server.check()
    server.run()
    assert [r.finish_reason is FinishReason.LENGTH for r in children] == [i != which for i in range(4)]
    server.check_idle()


def test_unload_after_n_requests_returns_at_once():
    """F005: every child counts as one user of the adapter together, and leaves with the last of them."""
    server = FakeServer(max_num_seqs=8)
    entry = server.registry.register("a", None)
    for n in (4, 1, 16, 16):
        for prompt in ([1, 2], [3]):
            server.add(prompt, n=n, max_tokens=5, adapter="a", eos=True)
    server.step()
    server.registry.start_draining("a")
    assert len(entry.users) == 8
    server.run()
    assert not entry.users
    server.check_idle()
    assert len(server.registry) == 0


# ---- company ----

REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=10),
        st.integers(1, 8),
        st.sampled_from([None, "a", "b", "c"]),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(
    requests=REQUESTS,
    num_pages=st.sampled_from([5, 8, 40]),
    caching=st.booleans(),
    page_size=st.integers(1, 4),
)
def test_outputs_are_the_same_alone_and_in_any_company(requests, num_pages, caching, page_size):
    """The server itself compares each output with the one on a machine of its own."""
    server = FakeServer(
        num_pages=num_pages * 4 // page_size,
        page_size=page_size,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        enable_prefix_caching=caching,
        adapter_patience=2,
    )
    for name in "abc":
        server.registry.register(name, None)
    for prompt, max_tokens, adapter, gap in requests:
        server.add(prompt, max_tokens=max_tokens, adapter=adapter)
        for _ in range(gap):
            server.step()
            server.check()
    server.run()
    assert len(server.ended) == len(requests)
    server.check_idle()
