"""`lorajax.forward` is differentiable in the adapter, and equal to what the engine serves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import TINY_LLAMA, adapters_of

import lorajax
from lorajax.errors import AdapterFormatError


@pytest.fixture(scope="module")
def loaded():
    model, config = lorajax.load_model(TINY_LLAMA, dtype="float32")
    return model, lorajax.load_adapter(adapters_of(TINY_LLAMA)["all_r16"], config=config)


TOKENS = np.array([[5, 9, 200, 31], [7, 7, 100, 2]], np.int32)


def loss(model, adapter):
    logits = lorajax.forward(model, jnp.asarray(TOKENS), adapter)
    return -jnp.mean(jax.nn.log_softmax(logits)[:, :-1, 0])


def test_gradient_is_the_slope(loaded):
    """Along random directions, against central differences."""
    model, adapter = loaded
    gradient = jax.grad(loss, argnums=1)(model, adapter)
    key = jax.random.key(0)
    for path in ("layers.0.self_attn.v_proj", "layers.1.mlp.down_proj", "layers.2.mlp.gate_proj"):
        for name in ("a", "b"):
            leaf = getattr(adapter.modules[path], name)
            key, used = jax.random.split(key)
            direction = jax.random.normal(used, leaf.shape)
            expected = jnp.vdot(getattr(gradient.modules[path], name), direction)

            def moved(step, path=path, name=name, leaf=leaf, direction=direction):
                module = adapter.modules[path]
                values = {"a": module.a, "b": module.b, name: leaf + step * direction}
                edited = type(module)(**values, scaling=module.scaling)
                return loss(model, lorajax.AdapterWeights(modules={**adapter.modules, path: edited}))

            step = 1e-2
            slope = (moved(step) - moved(-step)) / (2 * step)
            np.testing.assert_allclose(slope, expected, rtol=3e-2, atol=2e-5)


def test_no_adapter_and_a_zero_adapter_are_the_base(loaded):
    model, adapter = loaded
    base = lorajax.forward(model, jnp.asarray(TOKENS))
    zero = jax.tree.map(jnp.zeros_like, adapter)
    np.testing.assert_array_equal(base, lorajax.forward(model, jnp.asarray(TOKENS), zero))


def test_a_model_with_slots_gives_the_same(loaded):
    model, adapter = loaded
    plain = lorajax.forward(model, jnp.asarray(TOKENS), adapter)
    wrapped, _ = lorajax.load_model(TINY_LLAMA, dtype="float32")
    lorajax.add_lora(wrapped, lorajax.LoRAConfig(num_slots=3, max_rank=8))
    np.testing.assert_array_equal(plain, lorajax.forward(wrapped, jnp.asarray(TOKENS), adapter))


def test_rows_are_independent_sequences(loaded):
    model, adapter = loaded
    both = lorajax.forward(model, jnp.asarray(TOKENS), adapter)
    for row in range(2):
        alone = lorajax.forward(model, jnp.asarray(TOKENS[row : row + 1]), adapter)
        np.testing.assert_allclose(both[row], alone[0], atol=1e-5)


def test_an_adapter_of_another_model_is_refused(loaded):
    model, adapter = loaded
    foreign = lorajax.AdapterWeights(
        modules={"layers.9.mlp.up_proj": adapter.modules["layers.0.mlp.up_proj"]}
    )
    with pytest.raises(AdapterFormatError, match=r"layers\.9"):
        lorajax.forward(model, jnp.asarray(TOKENS), foreign)
