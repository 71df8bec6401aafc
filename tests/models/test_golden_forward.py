"""`lorajax.forward` against the logits that transformers + PEFT give."""

import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import TINY_LLAMA, adapters_of, expected_logits, prompts_of

import lorajax

CHECKPOINTS = [TINY_LLAMA]
CASES = [(folder, adapter) for folder in CHECKPOINTS for adapter in ["base", *adapters_of(folder)]]


@pytest.mark.parametrize(("folder", "adapter"), CASES, ids=[f"{f.name}-{a}" for f, a in CASES])
def test_logits_equal_transformers_and_peft(folder, adapter):
    model, config = lorajax.load_model(folder, dtype="float32")
    weights = None if adapter == "base" else lorajax.load_adapter(adapters_of(folder)[adapter], config=config)
    expected = expected_logits(folder)
    for i, prompt in enumerate(prompts_of(folder)):
        logits = lorajax.forward(model, jnp.asarray([prompt], jnp.int32), weights)
        np.testing.assert_allclose(logits[0], expected[f"{adapter}/{i}"], atol=1e-4, rtol=0)
