import contextlib
import math

import pytest
from adapter_files import CONFIG, hf_name
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_rules import CASES, golden_rules

from lorajax.errors import AdapterFormatError
from lorajax.lora.peft_config import FIELDS, read_config, why_refused

TARGETS = {"target_modules": ["q_proj", "v_proj"]}


def config(**fields):
    return read_config({**CONFIG, **TARGETS, **fields})


def all_names():
    leaves = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return [*(hf_name(leaf, layer) for layer in range(3) for leaf in leaves), "model.embed_tokens", "lm_head"]


@pytest.mark.parametrize("case", CASES)
def test_modules_ranks_and_scalings_are_those_of_peft(case):
    """Against PEFT 0.21 on a Llama of three layers; `test_peft_parity.py` asks PEFT again."""
    rules = read_config({**CONFIG, "r": 8, "lora_alpha": 16, **CASES[case]})
    found = {
        name: [rules.rank_of(name), rules.scaling_of(name)] for name in all_names() if rules.selects(name)
    }
    assert found == golden_rules()[case]


@pytest.mark.parametrize("alpha", [16, 2.5, 1, -8, 0])
@pytest.mark.parametrize("use_rslora", [True, False, None])
@pytest.mark.parametrize("rank", [1, 3, 16, 64])
def test_scaling(alpha, use_rslora, rank):
    found = config(r=rank, lora_alpha=alpha, use_rslora=use_rslora).scaling_of(
        "model.layers.0.self_attn.q_proj"
    )
    assert found == pytest.approx(alpha / math.sqrt(rank) if use_rslora else alpha / rank, rel=1e-15)


def test_an_absent_rslora_is_off():
    assert config(r=16, lora_alpha=16).scaling_of("lm_head") == 1.0


WRONG = [
    ("r", [0, -1, True, 2.7, 4.0, "8", None, math.nan, [8]]),
    ("lora_alpha", [True, "16", None, math.nan, math.inf, 1e39, -1e39, [16], {}]),
    ("use_rslora", [1, 0, "true", "false", 0.0]),
    ("rank_pattern", [["q_proj"], "q_proj", {"q_proj": 0}, {"q_proj": 2.0}, {"q_proj": True}, {"(": 4}]),
    ("alpha_pattern", [{"q_proj": "3"}, {"q_proj": None}, {"q_proj": math.nan}, {"[": 4}, 3]),
    ("target_modules", [3, [3], [""], {"q_proj": 1}, "(", True]),
    ("exclude_modules", [3, [None], "["]),
    ("layers_to_transform", ["1", [1.0], -1, [True], True, {"a": 1}]),
    ("layers_pattern", [3, [3], "lay(ers", ["a b"]]),
    ("peft_type", [None, "lora", "ADALORA", "IA3", 1]),
    ("task_type", ["SEQ_CLS", "TOKEN_CLS", "SEQ_2_SEQ_LM", "QUESTION_ANS", "FEATURE_EXTRACTION", 1]),
    ("base_model_name_or_path", [3, ["x"]]),
    ("ensure_weight_tying", ["yes", 1]),
    (
        "init_lora_weights",
        ["pissa", "pissa_niter_4", "PiSSA", "olora", "corda", "loftq", "lora_ga", "new", 1, []],
    ),
    ("lora_dropout", [math.nan]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG for value in values])
def test_wrong_values_are_refused_by_name(field, value):
    with pytest.raises(AdapterFormatError, match=field.replace("_", ".")):
        config(**{field: value})


@pytest.mark.parametrize("field", ["r", "lora_alpha", "peft_type"])
def test_needed_fields_have_no_default(field):
    fields = {name: value for name, value in {**CONFIG, **TARGETS}.items() if name != field}
    with pytest.raises(AdapterFormatError, match=f"{field} is missing"):
        read_config(fields)


ASKS_FOR_MORE = {
    "use_dora": [True, "true", 1],
    "bias": ["all", "lora_only", True, ""],
    "lora_bias": [True],
    "fan_in_fan_out": [True, 0],
    "modules_to_save": [["lm_head"], ["norm"], "lm_head"],
    "trainable_token_indices": [[290, 291], {"embed_tokens": [290]}],
    "target_parameters": [["mlp.experts.gate_up_proj"]],
    "layer_replication": [[[0, 4], [2, 5]]],
    "megatron_config": [{"a": 1}],
    "alora_invocation_tokens": [[1, 2]],
    "use_qalora": [True],
    "use_bdlora": [{"nblocks": 2}],
    "arrow_config": [{"top_k": 3}],
    "kasa_config": [{"beta": 1e-4}],
    "monteclora_config": [{"num_samples": 8}],
    "a_field_of_tomorrow": [True, 1, 0, "x", [1], {"a": None}, 0.0],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in ASKS_FOR_MORE.items() for value in values]
)
def test_what_asks_for_more_than_lora_is_refused_by_name(field, value):
    with pytest.raises(AdapterFormatError, match=f"{field} = .* cannot be served") as caught:
        config(**{field: value})
    assert why_refused(field, value) in str(caught.value)


@pytest.mark.parametrize("field", ASKS_FOR_MORE)
def test_null_is_accepted(field):
    config(**{field: None})
    assert why_refused(field, None) is None


HARMLESS = {
    "lora_dropout": 0.3,
    "inference_mode": False,
    "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "ipm"},
    "loftq_config": {"loftq_bits": 4},
    "lora_ga_config": {"direction": "ArB2r"},
    "velora_config": {"num_groups": 64},
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
    "auto_mapping": {"base_model_class": "LlamaForCausalLM"},
    "revision": "main",
    "peft_version": "0.21.2",
    "base_model_name_or_path": "/home/someone/model",
    "bias": "none",
    "modules_to_save": [],
    "trainable_token_indices": {},
    "use_dora": False,
    "a_field_of_tomorrow": [],
}


@pytest.mark.parametrize("field", HARMLESS)
def test_harmless_fields_change_nothing(field):
    plain, with_field = config(), config(**{field: HARMLESS[field]})
    assert with_field.scaling_of("lm_head") == plain.scaling_of("lm_head")
    assert with_field.r == plain.r
    assert with_field.selects(hf_name("q_proj")) is plain.selects(hf_name("q_proj")) is True


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica", "Gaussian"])
def test_initialisations_that_leave_the_base_alone(init):
    config(init_lora_weights=init)


def test_every_field_of_peft_is_in_the_table():
    """The fields of `LoraConfig` of PEFT 0.10, 0.14, 0.18 and 0.21, written down from their sources."""
    known = """
        alora_invocation_tokens alpha_pattern arrow_config auto_mapping base_model_name_or_path bias
        corda_config ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode
        init_lora_weights kasa_config layer_replication layers_pattern layers_to_transform loftq_config
        lora_alpha lora_bias lora_dropout lora_ga_config megatron_config megatron_core modules_to_save
        monteclora_config peft_type peft_version qalora_group_size r rank_pattern revision runtime_config
        target_modules target_parameters task_type trainable_token_indices use_bdlora use_dora use_qalora
        use_rslora velora_config
    """
    assert set(FIELDS) == set(known.split())


def test_messages_stay_short():
    for fields in ({"x" * 100_000: 1}, {"x": "y" * 100_000}, {"rank_pattern": {"q" * 100_000: 1}}):
        with pytest.raises(AdapterFormatError) as caught:
            config(**fields)
        assert len(str(caught.value)) < 400


def test_regex_targets_take_no_layer_list():
    with pytest.raises(AdapterFormatError, match="layers_to_transform"):
        config(target_modules=".*q_proj", layers_to_transform=[1])


def test_many_regexes_are_refused_and_many_names_are_not():
    config(rank_pattern={f"model.layers.{i}.self_attn.q_proj": 4 for i in range(2000)})
    with pytest.raises(AdapterFormatError, match="regular expressions"):
        config(rank_pattern={f".*layers.{i}.*": 4 for i in range(2000)})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(FIELDS)) | st.text(max_size=10), json_values, max_size=5))
def test_any_json_gives_a_config_or_the_typed_error(fields):
    with contextlib.suppress(AdapterFormatError):
        found = read_config({**CONFIG, **TARGETS, **fields})
        assert math.isfinite(found.scaling_of("model.layers.0.self_attn.q_proj"))
