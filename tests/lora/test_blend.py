import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from adapter_files import TOY, lora_tensors, write_adapter
from hypothesis import given, settings
from hypothesis import strategies as st

from lorajax.errors import AdapterFormatError, ConfigError
from lorajax.lora.blend import blend_adapters
from lorajax.lora.peft import load_peft
from lorajax.lora.weights import AdapterWeights, LoRAModule

PATHS = ("layers.0.self_attn.q_proj", "lm_head")


def module(rank, scaling, seed, dtype=np.float32, d_in=5, d_out=7):
    rng = np.random.default_rng(seed)
    return LoRAModule(
        a=rng.standard_normal((rank, d_in)).astype(dtype),
        b=rng.standard_normal((d_out, rank)).astype(dtype),
        scaling=scaling,
    )


def delta(adapter, path):
    """The update in float64, by the definition."""
    if path not in adapter.modules:
        return np.zeros((7, 5))
    one = adapter.modules[path]
    return one.scaling * (np.asarray(one.b, np.float64) @ np.asarray(one.a, np.float64))


adapters = st.builds(
    lambda paths, rank, scaling, seed: AdapterWeights(
        modules={path: module(rank, scaling, seed + i) for i, path in enumerate(paths)}
    ),
    st.lists(st.sampled_from(PATHS), min_size=1, max_size=2, unique=True),
    st.integers(1, 4),
    st.sampled_from([1.0, 2.0, 0.3, -1.5, 0.0]),
    st.integers(0, 99),
)


@settings(deadline=None)
@given(st.lists(st.tuples(adapters, st.sampled_from([1, 0.5, -2.0, 0.37, 0, 1e-3])), min_size=1, max_size=4))
def test_a_blend_is_the_weighted_sum(parts):
    if all(weight == 0 for _, weight in parts):
        return
    blend = blend_adapters(parts)
    for path in PATHS:
        expected = sum(weight * delta(adapter, path) for adapter, weight in parts)
        np.testing.assert_allclose(delta(blend, path), expected, rtol=1e-5, atol=1e-5)
        kept = [adapter for adapter, weight in parts if weight != 0 and path in adapter.modules]
        ranks = sum(adapter.modules[path].rank for adapter in kept)
        assert (blend.modules[path].rank if kept else 0) == ranks


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("weights", [(1, 1), (0.3, 0.3), (2, 0.5), (1, -4)])
def test_equal_and_power_of_two_factors_are_exact_in_the_factors_own_dtype(dtype, weights):
    first, second = (AdapterWeights(modules={"lm_head": module(2, 1.7, seed, dtype)}) for seed in (0, 1))
    found = blend_adapters([(first, weights[0]), (second, weights[1])]).modules["lm_head"]
    assert found.a.dtype == found.b.dtype == dtype
    expected = weights[0] * delta(first, "lm_head") + weights[1] * delta(second, "lm_head")
    exact = found.scaling * (found.b.astype(np.float64) @ found.a.astype(np.float64))
    np.testing.assert_allclose(exact, expected, rtol=1e-12, atol=1e-12)


def test_other_factors_are_folded_in_float32():
    first, second = (
        AdapterWeights(modules={"lm_head": module(2, 1.0, seed, ml_dtypes.bfloat16)}) for seed in (0, 1)
    )
    blend = blend_adapters([(first, 1.0), (second, 0.3)])
    assert blend.modules["lm_head"].b.dtype == np.float32
    expected = delta(first, "lm_head") + 0.3 * delta(second, "lm_head")
    np.testing.assert_allclose(delta(blend, "lm_head"), expected, rtol=1e-6, atol=1e-6)


def test_one_part_keeps_its_arrays():
    adapter = AdapterWeights(modules={"lm_head": module(2, 3.0, 0)})
    found = blend_adapters([(adapter, 0.1), (adapter, 0)]).modules["lm_head"]
    assert found.a is adapter.modules["lm_head"].a
    assert found.scaling == 0.1 * 3.0


def test_an_adapter_minus_itself_is_nothing():
    adapter = AdapterWeights(modules={"lm_head": module(2, 3.0, 0)})
    assert not delta(blend_adapters([(adapter, 1), (adapter, -1)]), "lm_head").any()


def test_arrays_of_jax_and_scalings_of_zero():
    one = LoRAModule(a=jnp.ones((1, 5)), b=jnp.ones((7, 1)), scaling=0.0)
    blend = blend_adapters(
        [(AdapterWeights(modules={"lm_head": one}), 1), (AdapterWeights(modules={"lm_head": one}), 2)]
    )
    assert blend.modules["lm_head"].rank == 2
    assert not delta(blend, "lm_head").any()


@pytest.mark.parametrize("weights", [[], [0, 0.0], [float("nan")], [float("inf"), 1], [1e39]])
def test_weights_that_make_no_adapter(weights):
    adapter = AdapterWeights(modules={"lm_head": module(2, 3.0, 0)})
    with pytest.raises(ConfigError, match="blend"):
        blend_adapters([(adapter, weight) for weight in weights])


def test_adapters_of_different_models():
    parts = [(AdapterWeights(modules={"lm_head": module(2, 1.0, 0, d_in=d_in)}), 1.0) for d_in in (5, 6)]
    with pytest.raises(AdapterFormatError, match="lm_head: the adapters differ"):
        blend_adapters(parts)


def test_a_blend_can_be_saved(tmp_path):
    first = load_peft(write_adapter(tmp_path / "a"), TOY)
    second = load_peft(
        write_adapter(tmp_path / "b", lora_tensors(("v_proj", "up_proj"), 3, seed=9), r=3), TOY
    )
    blend = blend_adapters([(first, 0.3), (second, 0.7)])
    blend.save_peft(tmp_path / "c")
    found = load_peft(tmp_path / "c", TOY)
    assert {path: module.rank for path, module in found.modules.items()} == {
        path: module.rank for path, module in blend.modules.items()
    }
    assert found.modules["layers.0.self_attn.v_proj"].rank == 7
