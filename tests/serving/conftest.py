"""One warm engine on the tiny Llama with its six adapters, shared by the tests that leave it as it was."""

import pytest
from golden_files import TINY_LLAMA, adapters_of

from serving import LLM

SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "compilation_cache_dir": None, "num_pages": 96}
"""Few, small buckets: a tiny engine warms up in seconds."""


@pytest.fixture(scope="session")
def shared_llm():
    with LLM(TINY_LLAMA, adapters=adapters_of(TINY_LLAMA), max_loras=6, **SMALL) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm):
    """The shared engine; afterwards nothing may be left of a test's requests."""
    yield shared_llm
    shared_llm._loop.call(shared_llm._engine.check_idle)
