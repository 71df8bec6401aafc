"""More adapters than host copies: the least recently used are read again, and are what they were."""

import shutil

import jax
import numpy as np
import pytest
from golden_files import TINY_LLAMA, adapters_of

import lorajax
from lorajax.errors import AdapterCapacityError, AdapterFormatError
from serving import LLM, SamplingParams

FOLDERS = adapters_of(TINY_LLAMA)
PROMPT = [(11 * i) % 300 + 2 for i in range(20)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def llm():
    options = {"max_num_seqs": 4, "num_pages": 64, "warmup": False, "compilation_cache_dir": None}
    with LLM(TINY_LLAMA, max_loras=1, max_cpu_loras=2, **options) as llm:
        yield llm
        llm._loop.call(llm._engine.check_idle)


def copies(llm):
    return len(llm._engine.adapters._host)


def tokens(llm, name):
    return llm.generate([PROMPT], GREEDY, adapter=name)[0].outputs[0].token_ids


def test_all_registered_adapters_keep_working(llm):
    expected = {}
    for name, folder in FOLDERS.items():
        llm.load_adapter(name, folder)
        expected[name] = tokens(llm, name)
        assert copies(llm) <= 2
    for _ in range(2):
        for name in FOLDERS:
            assert tokens(llm, name) == expected[name]
            assert copies(llm) <= 2
    assert len({tuple(t) for t in expected.values()}) == len(FOLDERS)
    assert [status.name for status in llm.adapters()] == list(FOLDERS)


def test_a_batch_over_more_adapters_than_copies(llm):
    for name, folder in FOLDERS.items():
        llm.load_adapter(name, folder)
    alone = [tokens(llm, name) for name in FOLDERS]
    outputs = llm.generate([PROMPT] * len(FOLDERS), GREEDY, adapter=list(FOLDERS))
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert copies(llm) <= 2


def test_a_source_that_is_gone_or_changed_refuses_only_its_own_requests(llm, tmp_path):
    for name in ("attn_r8", "all_r16", "v_only"):
        shutil.copytree(FOLDERS[name], tmp_path / name)
    for name in ("attn_r8", "all_r16"):
        llm.load_adapter(name, tmp_path / name)
    before = tokens(llm, "all_r16")
    for name in ("layer1_only", "rslora_patterns"):  # push both copies out
        llm.load_adapter(name, FOLDERS[name])
    shutil.rmtree(tmp_path / "attn_r8")
    with pytest.raises(AdapterFormatError, match="'attn_r8'"):
        tokens(llm, "attn_r8")
    shutil.rmtree(tmp_path / "all_r16")
    shutil.copytree(tmp_path / "v_only", tmp_path / "all_r16")
    with pytest.raises(AdapterFormatError, match="has changed"):
        tokens(llm, "all_r16")
    llm.load_adapter("all_r16", FOLDERS["all_r16"], replace=True)
    assert tokens(llm, "all_r16") == before
    assert all(status.num_running + status.num_waiting == 0 for status in llm.adapters())


def test_adapters_from_memory_stay_and_are_limited(llm):
    in_memory = [
        jax.tree.map(np.array, lorajax.load_adapter(FOLDERS[name])) for name in ("v_only", "attn_r8")
    ]
    llm.load_adapter("a", in_memory[0])
    expected = tokens(llm, "a")
    llm.load_adapter("b", in_memory[1])
    for name in ("layer1_only", "all_r16"):
        llm.load_adapter(name, FOLDERS[name])
        tokens(llm, name)
    assert tokens(llm, "a") == expected
    with pytest.raises(AdapterCapacityError, match="max_cpu_loras = 2"):
        llm.load_adapter("c", in_memory[0])
    assert llm.unload_adapter("b") == 0
    llm.load_adapter("c", in_memory[1])
