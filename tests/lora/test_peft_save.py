import json
import math
import os

import ml_dtypes
import numpy as np
import pytest
from adapter_files import LINEARS, TOY, lora_tensors, write_adapter
from golden_files import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

from lorajax.errors import AdapterFormatError, ConfigError
from lorajax.lora.peft import load_peft
from lorajax.lora.peft_save import adapter_config
from lorajax.lora.weights import AdapterWeights, LoRAModule


def assert_same(found, expected):
    assert found.modules.keys() == expected.modules.keys()
    for path, module in expected.modules.items():
        assert found.modules[path].scaling == module.scaling, path
        np.testing.assert_array_equal(found.modules[path].a, module.a)
        np.testing.assert_array_equal(found.modules[path].b, module.b)


@pytest.mark.parametrize(
    "adapter", sorted((GOLDEN / "tiny").glob("*/adapters/*")), ids=lambda path: "-".join(path.parts[-3::2])
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path, adapter, dtype):
    weights = load_peft(adapter, dtype=dtype, warn=lambda _: None)
    weights.save_peft(tmp_path / "saved", base_model_name="tiny")
    assert_same(load_peft(tmp_path / "saved", dtype=dtype), weights)
    assert sorted(os.listdir(tmp_path)) == ["saved"]
    assert sorted(os.listdir(tmp_path / "saved")) == ["adapter_config.json", "adapter_model.safetensors"]


def test_modules_of_every_kind(tmp_path):
    tensors = lora_tensors((*LINEARS, "embed_tokens", "lm_head"))
    weights = load_peft(write_adapter(tmp_path / "a", tensors, alpha_pattern={"q_proj": 2.5}), TOY)
    weights.save_peft(tmp_path / "b")
    assert_same(load_peft(tmp_path / "b", TOY), weights)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 70), st.sampled_from([1, 2, 2.5, 5, 8, 16, 0.1, 100 / 3, -3])),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
)
def test_scalings_of_one_peft_config_come_back_to_the_last_bit(pairs, use_rslora):
    modules = {}
    for layer, (rank, alpha) in enumerate(pairs):
        scaling = alpha / (math.sqrt(rank) if use_rslora else rank)
        modules[f"layers.{layer}.self_attn.q_proj"] = LoRAModule(
            a=np.ones((rank, 3), np.float32), b=np.ones((2, rank), np.float32), scaling=scaling
        )
    fields = adapter_config(AdapterWeights(modules=modules))
    for layer, (rank, _) in enumerate(pairs):
        name = f"model.layers.{layer}.self_attn.q_proj"
        assert fields["rank_pattern"].get(name, fields["r"]) == rank
        alpha = fields["alpha_pattern"].get(name, fields["lora_alpha"])
        divisor = math.sqrt(rank) if fields["use_rslora"] else rank
        assert alpha / divisor == modules[f"layers.{layer}.self_attn.q_proj"].scaling


@settings(deadline=None)
@given(st.integers(1, 300), st.floats(1e-6, 1e6))
def test_any_scaling_comes_back_to_a_unit_in_the_last_place(rank, scaling):
    module = LoRAModule(a=np.ones((rank, 3), np.float32), b=np.ones((2, rank), np.float32), scaling=scaling)
    fields = adapter_config(AdapterWeights(modules={"lm_head": module}))
    divisor = math.sqrt(rank) if fields["use_rslora"] else rank
    assert abs(fields["lora_alpha"] / divisor - scaling) <= math.ulp(scaling)


def test_jax_arrays_are_saved(tmp_path):
    import jax.numpy as jnp

    module = LoRAModule(a=jnp.ones((2, 16), jnp.bfloat16), b=jnp.zeros((40, 2), jnp.bfloat16), scaling=0.5)
    weights = AdapterWeights(modules={"lm_head": module})
    weights.save_peft(tmp_path / "a")
    assert_same(load_peft(tmp_path / "a", TOY, dtype=ml_dtypes.bfloat16), weights)


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path):
    weights = load_peft(write_adapter(tmp_path / "a"), TOY)
    with pytest.raises(ConfigError, match="'a' is not empty"):
        weights.save_peft(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    weights.save_peft(tmp_path / "empty")
    assert_same(load_peft(tmp_path / "empty", TOY), weights)
    integers = LoRAModule(a=np.ones((2, 16), np.float32), b=np.ones((40, 2), np.float32), scaling=1.0)
    for modules in ({}, {"lm_tail": integers}):
        with pytest.raises(AdapterFormatError):
            AdapterWeights(modules=modules).save_peft(tmp_path / "bad")
    assert sorted(os.listdir(tmp_path)) == ["a", "empty"]


def test_the_config_is_plain_json(tmp_path):
    weights = load_peft(write_adapter(tmp_path / "a", lora_alpha=16), TOY)
    weights.save_peft(tmp_path / "b", base_model_name="org/name")
    fields = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert fields["lora_alpha"] == 16
    assert fields["r"] == 4
    assert fields["rank_pattern"] == fields["alpha_pattern"] == {}
    assert fields["base_model_name_or_path"] == "org/name"
