"""config.json read as the models of transformers read it, and refused by name where it cannot be served."""

import contextlib
import copy
import json
import warnings

import numpy as np
import pytest
from golden_files import GOLDEN

from lorajax.config import ModelConfig
from lorajax.errors import ConfigError
from lorajax.layers.rotary import rope_frequencies

CASES = json.loads((GOLDEN / "hf_config" / "cases.json").read_text())["cases"]
LLAMA = CASES["llama"]["config"]
LLAMA3 = CASES["llama_llama3"]["config"]


@pytest.mark.parametrize("name", CASES)
def test_reads_what_transformers_builds(name):
    case = CASES[name]
    config, expected = ModelConfig.from_hf(case["config"]), dict(case["expected"])
    frequencies, attention_factor = rope_frequencies(config.rope, config.head_dim)
    np.testing.assert_allclose(frequencies, expected.pop("inv_freq"), rtol=1e-6)
    assert attention_factor == pytest.approx(expected.pop("attention_factor"), rel=1e-12)
    windows = tuple(expected.pop("sliding_window"))
    assert config.sliding_window == (windows if any(windows) else ())
    moe = expected.pop("moe")
    if moe is None:
        assert config.moe is None
    else:
        found = {field: getattr(config.moe, field) for field in moe}
        assert {**found, "sparse_layers": list(found["sparse_layers"])} == moe
    longest = expected.pop("max_position_embeddings")
    assert config.max_position_embeddings == longest
    assert {field: getattr(config, field) for field in expected} == expected


def test_spellings_of_one_rope_are_one_config():
    spelled = [name for name in CASES if name.startswith("llama_llama3")]
    assert len(spelled) == 5
    assert len({ModelConfig.from_hf(CASES[name]["config"]).rope for name in spelled}) == 1


@pytest.mark.parametrize(("longest", "served"), [(64, 256), (80, 256), (256, 256), (300, 300)])
def test_yarn_serves_the_extended_length_once(longest, served):
    config = {**CASES["llama_yarn"]["config"], "max_position_embeddings": longest}
    assert ModelConfig.from_hf(config).max_position_embeddings == served


def test_yarn_without_a_trained_length_is_not_extended():
    case = CASES["llama_yarn_no_original"]
    assert ModelConfig.from_hf(case["config"]).max_position_embeddings == 256


def test_missing_theta_is_warned_of():
    config = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    with pytest.warns(UserWarning, match="rope_theta"):
        assert ModelConfig.from_hf(config).rope.theta == 10_000.0


@pytest.mark.parametrize(
    ("config", "generation", "tokens"),
    [
        (10, [10, 11], (10, 11)),
        ([10, 12], 11, (10, 12, 11)),
        (None, None, ()),
        (10, None, (10,)),
        (None, 7, (7,)),
        (-1, None, ()),
    ],
)
def test_every_declared_eos_counts(config, generation, tokens):
    found = ModelConfig.from_hf({**LLAMA, "eos_token_id": config}, {"eos_token_id": generation})
    assert found.eos_token_ids == tokens


@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
def test_dtype_and_other_harmless_fields_change_nothing(field):
    more = {field: "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "pad_token_id": 0}
    assert ModelConfig.from_hf({**LLAMA, **more}) == ModelConfig.from_hf(LLAMA)


def test_empty_unknown_fields_are_off():
    more = {"use_mrope": False, "quantization_config": None, "new_feature": {}, "layer_types": None}
    assert ModelConfig.from_hf({**LLAMA, **more}) == ModelConfig.from_hf(LLAMA)


def changed(name, **changes):
    return {**copy.deepcopy(CASES[name]["config"]), **changes}


def rope(name="llama_llama3", place="rope_scaling", **changes):
    config = copy.deepcopy(CASES[name]["config"])
    settings = {**config[place], **changes}
    config[place] = {key: value for key, value in settings.items() if value != "absent"}
    return config


REFUSED = {
    "architecture": (changed("llama", architectures=["GemmaForCausalLM"]), "Gemma.*LlamaForCausalLM"),
    "classifier": (changed("llama", architectures=["LlamaForSequenceClassification"]), "served are"),
    "two_architectures": (changed("llama", architectures=["LlamaForCausalLM"] * 2), "served are"),
    "no_architecture": (changed("llama", architectures=None, model_type="gpt2"), "gpt2.*served are"),
    "model_type": (changed("llama", model_type="qwen2"), "model_type.*qwen2.*'llama'"),
    "quantised": (changed("llama", quantization_config={"quant_method": "gptq"}), "gptq"),
    "unknown_field": (changed("llama", logit_softcap=30.0), "logit_softcap = 30.0"),
    "other_familys_field": (changed("llama", sliding_window=8), "sliding_window = 8"),
    "qwen2_attention_bias": (changed("qwen2", attention_bias=True), "attention_bias = True"),
    "activation": (changed("llama", hidden_act="gelu"), "hidden_act.*gelu.*silu"),
    "no_vocab": (changed("llama", vocab_size=None), "vocab_size is missing"),
    "zero_layers": (changed("llama", num_hidden_layers=0), "num_hidden_layers is 0"),
    "text_number": (changed("llama", hidden_size="32"), "hidden_size"),
    "bool_number": (changed("llama", hidden_size=True), "hidden_size"),
    "text_flag": (changed("llama", tie_word_embeddings="false"), "tie_word_embeddings.*true, false"),
    "heads": (changed("llama", num_key_value_heads=3), "num_key_value_heads is 3.*divisor"),
    "odd_head_dim": (changed("llama", head_dim=7), "head_dim is 7"),
    "hidden_not_divisible": (changed("llama", hidden_size=34), "hidden_size is 34"),
    "eps": (changed("llama", rms_norm_eps=0.0), "rms_norm_eps"),
    "eos": (changed("llama", eos_token_id="</s>"), "eos_token_id"),
    "theta_twice": (changed("llama_v5", rope_theta=10000.0), "rope_theta.*10000.0.*one value|500000.0"),
    "theta_zero": (changed("llama", rope_theta=0), "rope_theta is 0"),
    "theta_nan": (changed("llama", rope_theta=float("nan")), "rope_theta is nan"),
    "rope_type": (rope(rope_type="longrope"), "longrope.*served are.*llama3"),
    "rope_types_differ": (rope(type="linear"), "rope_type is 'llama3' but type is 'linear'"),
    "rope_places_differ": (
        changed("llama_llama3", rope_parameters={"factor": 4.0}),
        "rope_parameters.factor is 4.0 but rope_scaling.factor is 8.0",
    ),
    "rope_no_factor": (rope(factor="absent"), "lacks factor"),
    "rope_no_original": (rope(original_max_position_embeddings="absent"), "lacks original"),
    "rope_no_low": (rope(low_freq_factor="absent"), "lacks low_freq_factor"),
    "rope_order": (rope(low_freq_factor=4.0), "low_freq_factor is 4.0"),
    "rope_small_factor": (rope(factor=0.5), "factor is 0.5"),
    "rope_text": (rope(factor="8"), "factor is '8'"),
    "rope_partial": (changed("llama", partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    "rope_foreign_field": (rope(beta_fast=32), "beta_fast = 32"),
    "rope_mrope": (
        changed("qwen2", rope_scaling={"type": "default", "mrope_section": [2, 1, 1]}),
        "mrope_section",
    ),
    "rope_factor_without_type": (changed("llama", rope_scaling={"factor": 2.0}), "factor = 2.0"),
    "rope_per_layer": (
        changed("llama", rope_parameters={"full_attention": {"rope_type": "default"}}),
        "each kind of layer",
    ),
    "rope_not_an_object": (changed("llama", rope_scaling=2.0), "rope_scaling is 2.0"),
    "yarn_betas": (rope("llama_yarn", beta_fast=1, beta_slow=2), "beta_fast is 1"),
    "window_zero": (changed("mistral", sliding_window=0), "sliding_window is 0"),
    "windows_without_flag": (
        changed("qwen2_layer_types", use_sliding_window=False),
        "sliding_attention.*off",
    ),
    "layer_types_length": (changed("qwen2", layer_types=["full_attention"]), "layer_types"),
    "layer_types_kind": (changed("qwen2", layer_types=["chunked_attention"] * 3), "chunked_attention"),
    "layer_types_of_mistral": (
        changed("mistral", layer_types=["full_attention", "sliding_attention", "full_attention"]),
        "layer_types contradicts",
    ),
    "experts_twice": (changed("moe", num_local_experts=8), "num_experts and num_local_experts differ"),
    "too_many_per_token": (changed("moe", num_experts_per_tok=5), "num_experts_per_tok is 5"),
    "mlp_only_layers": (changed("moe", mlp_only_layers=[3]), "mlp_only_layers"),
    "shared_expert": (changed("moe", shared_expert_intermediate_size=16), "shared_expert"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(name):
    config, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(config)


@pytest.mark.parametrize("name", ["llama_llama3", "qwen2_windows", "moe", "mistral"])
@pytest.mark.parametrize("value", [-1, "x", [], {"a": 1}, float("nan"), True, 1.5, None, 1 << 70])
def test_any_value_anywhere_gives_a_config_or_the_typed_error(name, value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for field in CASES[name]["config"]:
            with contextlib.suppress(ConfigError):
                ModelConfig.from_hf(changed(name, **{field: value}))
