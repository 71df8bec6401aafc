"""Adapters coming, going and being replaced while requests run on them."""

import shutil
import threading

import jax
import numpy as np
import pytest
from golden_files import TINY_LLAMA, adapters_of

import lorajax
from lorajax.errors import (
    AdapterBusy,
    AdapterCapacityError,
    AdapterExists,
    AdapterFormatError,
    AdapterNotFound,
    ConfigError,
)
from serving import LLM, SamplingParams

FOLDERS = adapters_of(TINY_LLAMA)
PROMPT = [(11 * i) % 300 + 2 for i in range(50)]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)


def tokens(llm, adapter, params=GREEDY, prompt=PROMPT):
    return llm.generate([prompt], params, adapter=adapter)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def solo(shared_llm):
    """Greedy tokens of each adapter on a cold cache."""
    return {
        name: shared_llm.generate([PROMPT], GREEDY, adapter=name, cache_salt="solo")[0].outputs[0].token_ids
        for name in [None, *FOLDERS]
    }


@pytest.fixture(scope="module")
def engine():
    with LLM(
        TINY_LLAMA,
        max_loras=2,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_pages=96,
        compilation_cache_dir=None,
        kv_events=True,
    ) as llm:
        yield llm


@pytest.fixture
def llm(engine):
    """The engine without adapters, before and after."""
    yield engine
    for status in engine.adapters():
        engine.unload_adapter(status.name)
    engine._loop.call(engine._engine.check_idle)
    assert engine.stats().num_adapters == engine.stats().num_resident_adapters == 0
    assert engine.stats().num_compilations == 0


def test_more_adapters_than_slots_all_keep_working(llm, solo):
    for name, folder in FOLDERS.items():
        llm.load_adapter(name, folder)
    for _ in range(3):
        for name in FOLDERS:
            assert tokens(llm, name) == solo[name]
    assert llm.stats().num_resident_adapters == 2
    outputs = llm.generate([PROMPT] * 12, GREEDY, adapter=list(FOLDERS) * 2)
    assert [o.outputs[0].token_ids for o in outputs] == [solo[name] for name in FOLDERS] * 2


def test_loads_during_decoding_leave_running_requests_alone(llm, solo):
    for name in ("attn_r8", "all_r16"):
        llm.load_adapter(name, FOLDERS[name])
    control = {name: tokens(llm, name, LONG) for name in ("attn_r8", "all_r16")}
    streams = {name: llm.stream(PROMPT, LONG, adapter=name) for name in control}
    firsts = {name: next(stream) for name, stream in streams.items()}
    assert firsts
    for round_ in range(4):
        for name in ("v_only", "layer1_only", "rslora_patterns"):
            llm.load_adapter(f"{name}-{round_}", FOLDERS[name])
    for name, stream in streams.items():
        *_, last = stream
        assert last.outputs[0].token_ids == control[name]


def test_reload_under_the_same_name_never_meets_old_pages(llm, solo):
    llm.load_adapter("a", FOLDERS["attn_r8"])
    assert tokens(llm, "a") == solo["attn_r8"]
    llm.unload_adapter("a")
    llm.load_adapter("a", FOLDERS["all_r16"])
    output = llm.generate([PROMPT], GREEDY, adapter="a")[0]
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == solo["all_r16"]


def test_replace_lets_old_requests_finish_on_the_old_weights(llm, solo):
    old_id = llm.load_adapter("a", FOLDERS["attn_r8"]).adapter_id
    control = tokens(llm, "a", LONG)
    stream = llm.stream(PROMPT, LONG, adapter="a")
    first = next(stream)
    new_id = llm.load_adapter("a", FOLDERS["all_r16"], replace=True).adapter_id
    new = llm.generate([PROMPT], GREEDY, adapter="a")[0]
    *_, last = stream
    assert old_id != new_id
    assert (first.adapter_id, last.adapter_id, new.adapter_id) == (old_id, old_id, new_id)
    assert last.outputs[0].token_ids == control
    assert (new.outputs[0].token_ids, new.num_cached_tokens) == (solo["all_r16"], 0)
    # pages that the old version finished late lie in its own namespace, and left with it
    again = llm.generate([PROMPT], GREEDY, adapter="a")[0]
    assert again.outputs[0].token_ids == solo["all_r16"]
    assert [status.adapter_id for status in llm.adapters()] == [new_id]


def test_same_source_again_is_a_no_op_and_another_is_refused(llm):
    first = llm.load_adapter("a", FOLDERS["attn_r8"])
    assert llm.load_adapter("a", str(FOLDERS["attn_r8"])).adapter_id == first.adapter_id
    with pytest.raises(AdapterExists, match="'a'"):
        llm.load_adapter("a", FOLDERS["v_only"])
    assert [status.adapter_id for status in llm.adapters()] == [first.adapter_id]


def test_unload_waits_for_running_requests_and_refuses_new_ones(llm):
    llm.load_adapter("a", FOLDERS["attn_r8"])
    control = tokens(llm, "a", LONG)
    stream = llm.stream(PROMPT, LONG, adapter="a")
    next(stream)
    waited = []
    unloading = threading.Thread(target=lambda: waited.append(llm.unload_adapter("a")))
    unloading.start()
    while any(status.state != "draining" for status in llm.adapters()):
        pass
    with pytest.raises(AdapterNotFound):
        llm.generate([PROMPT], GREEDY, adapter="a")
    newer = llm.load_adapter("a", FOLDERS["v_only"])  # a new version beside the draining one
    *_, last = stream
    unloading.join(timeout=30)
    assert waited == [1]
    assert last.outputs[0].token_ids == control
    assert [status.adapter_id for status in llm.adapters()] == [newer.adapter_id]


def test_unload_with_a_timeout_gives_up_and_changes_nothing(llm):
    llm.load_adapter("a", FOLDERS["attn_r8"])
    stream = llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True), adapter="a")
    next(stream)
    with pytest.raises(AdapterBusy, match="1 requests"):
        llm.unload_adapter("a", timeout=0.01)
    assert tokens(llm, "a")
    stream.close()
    with pytest.raises(AdapterNotFound):
        llm.unload_adapter("nobody")


def test_unload_after_many_children(llm):
    llm.load_adapter("a", FOLDERS["attn_r8"])
    for n in (4, 8, 1, 8):
        llm.generate([PROMPT, PROMPT[:9]], SamplingParams(n=n, max_tokens=5, stop_token_ids=[7]), adapter="a")
    assert llm.unload_adapter("a", timeout=10) == 0


def test_unload_drops_the_pages_and_says_so(llm):
    events = []
    unsubscribe = llm.subscribe_kv_events(events.append)
    adapter_id = llm.load_adapter("a", FOLDERS["attn_r8"]).adapter_id
    tokens(llm, "a")
    stored = {
        h for e in events for h in getattr(e, "block_hashes", ()) if getattr(e, "adapter_id", 0) == adapter_id
    }
    assert len(stored) == 3
    events.clear()
    llm.unload_adapter("a")
    removed = {h for event in events for h in event.block_hashes}
    unsubscribe()
    assert removed == stored


def test_from_memory_and_back(llm, solo):
    weights = lorajax.load_adapter(FOLDERS["all_r16"])
    on_device = jax.tree.map(jax.numpy.asarray, weights)
    llm.load_adapter("a", on_device)
    assert tokens(llm, "a") == solo["all_r16"]


def test_the_host_copy_is_the_engines_own(llm, solo):
    weights = jax.tree.map(np.array, lorajax.load_adapter(FOLDERS["all_r16"]))
    llm.load_adapter("a", weights)
    for leaf in jax.tree.leaves(weights):
        leaf[...] = np.nan
    assert tokens(llm, "a") == solo["all_r16"]


def test_blend_is_the_weighted_sum(llm, solo):
    llm.load_adapter("a", FOLDERS["attn_r8"])
    llm.load_adapter("b", FOLDERS["v_only"])
    status = llm.blend_adapters("ab", {"a": 1.0, "b": 0.0})
    assert tokens(llm, "ab") == solo["attn_r8"]
    assert status.rank <= 16
    with pytest.raises(AdapterNotFound, match="'nobody'"):
        llm.blend_adapters("x", {"nobody": 1.0})


def test_a_pinned_adapter_keeps_its_slot(llm, solo):
    llm.load_adapter("a", FOLDERS["attn_r8"], pinned=True)
    tokens(llm, "a")
    for name in ("v_only", "all_r16", "layer1_only"):
        llm.load_adapter(name, FOLDERS[name])
        assert tokens(llm, name) == solo[name]
        states = {status.name: status.state for status in llm.adapters()}
        assert states["a"] == "resident"
    with pytest.raises(AdapterCapacityError, match="pinned"):
        llm.load_adapter("b", FOLDERS["v_only"], pinned=True)  # no slot would be left for the others


@pytest.mark.parametrize(
    "name", ["", "../x", "/etc", "a/b", "a\0b", "%2e%2e", "~x", ".hidden", " a ", "x" * 129, "ä", 3]
)
def test_names_that_are_no_names(llm, name):
    with pytest.raises(AdapterFormatError, match="adapter name"):
        llm._engine.adapters.registry.check_name(name)


def test_a_failed_load_leaves_no_trace(llm, solo, tmp_path):
    llm.load_adapter("good", FOLDERS["attn_r8"])
    stream = llm.stream(PROMPT, GREEDY, adapter="good")
    next(stream)
    broken = tmp_path / "broken"
    shutil.copytree(FOLDERS["attn_r8"], broken)
    data = (broken / "adapter_model.safetensors").read_bytes()
    for damaged in (
        b"",
        data[: len(data) // 2],
        b"version https://git-lfs.github.com/spec/v1\n",
        b"\xff" * 64,
    ):
        (broken / "adapter_model.safetensors").write_bytes(damaged)
        with pytest.raises(AdapterFormatError, match="'bad'") as caught:
            llm.load_adapter("bad", broken)
        assert str(tmp_path) not in str(caught.value)
    (broken / "adapter_model.safetensors").rename(broken / "adapter_model.bin")
    with pytest.raises(AdapterFormatError, match="pickle"):
        llm.load_adapter("bad", broken)
    with pytest.raises(AdapterFormatError):
        llm.load_adapter("bad", tmp_path / "nowhere")
    *_, last = stream
    assert last.outputs[0].token_ids == solo["attn_r8"]
    assert [status.name for status in llm.adapters()] == ["good"]


def test_limits(llm):
    weights = lorajax.load_adapter(FOLDERS["attn_r8"])
    tripled = type(weights)(
        modules={
            path: type(module)(
                a=np.concatenate([module.a] * 3), b=np.concatenate([module.b] * 3, axis=1), scaling=1.0
            )
            for path, module in weights.modules.items()
        }
    )
    with pytest.raises(AdapterCapacityError, match=r"24.*16"):
        llm.load_adapter("wide", tripled)


def test_adapter_of_another_model(llm):
    other = TINY_LLAMA.parent / "qwen2_bias_untied" / "adapters" / "all_r16"
    foreign = jax.tree.map(lambda leaf: np.pad(leaf, ((0, 0), (0, 1))), lorajax.load_adapter(other))
    with pytest.raises(AdapterFormatError, match="'foreign'"):
        llm.load_adapter("foreign", foreign)


def test_lora_off_refuses_adapters_and_serves_the_base(solo):
    with LLM(TINY_LLAMA, max_loras=0, warmup=False, compilation_cache_dir=None, num_pages=32) as off:
        assert tokens(off, None) == solo[None]
        with pytest.raises(ConfigError, match="max_loras is 0"):
            off.load_adapter("a", FOLDERS["attn_r8"])


def test_concurrent_loads_of_one_name_register_once(llm):
    outcomes = []

    def load():
        outcomes.append(llm.load_adapter("a", FOLDERS["all_r16"]).adapter_id)

    threads = [threading.Thread(target=load) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(outcomes) == 6
    assert len(set(outcomes)) == 1
