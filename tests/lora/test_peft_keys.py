import pytest

from lorajax.errors import AdapterFormatError
from lorajax.lora.peft_keys import parse_keys

Q = "layers.0.self_attn.q_proj"
SPELLINGS = {
    f"base_model.model.model.{Q}.lora_A.weight": (Q, f"model.{Q}", "A", False),
    f"base_model.model.model.{Q}.lora_B.weight": (Q, f"model.{Q}", "B", False),
    f"base_model.model.model.{Q}.lora_A.default.weight": (Q, f"model.{Q}", "A", False),
    f"base_model.model.model.{Q}.lora_B.my-name.weight": (Q, f"model.{Q}", "B", False),
    f"model.{Q}.lora_A.weight": (Q, f"model.{Q}", "A", False),
    f"base_model.model.{Q}.lora_A.weight": (Q, Q, "A", False),
    f"{Q}.lora_B.weight": (Q, Q, "B", False),
    "base_model.model.lm_head.lora_A.weight": ("lm_head", "lm_head", "A", False),
    "lm_head.lora_B.default.weight": ("lm_head", "lm_head", "B", False),
    "base_model.model.model.embed_tokens.lora_embedding_A": ("embed_tokens", "model.embed_tokens", "A", True),
    "base_model.model.model.embed_tokens.lora_embedding_B.default": (
        "embed_tokens",
        "model.embed_tokens",
        "B",
        True,
    ),
}


@pytest.mark.parametrize("key", SPELLINGS)
def test_spellings(key):
    (found,), copies = parse_keys([key])
    assert (found.path, found.name, found.factor, found.is_embedding) == SPELLINGS[key]
    assert found.key == key
    assert not copies


OTHER_PARTS = {
    f"base_model.model.model.{Q}.lora_magnitude_vector": "DoRA",
    f"base_model.model.model.{Q}.lora_magnitude_vector.default.weight": "DoRA",
    "base_model.model.lm_head.modules_to_save.default.weight": "modules_to_save",
    "base_model.model.model.norm.weight": "modules_to_save",
    f"base_model.model.model.{Q}.base_layer.weight": "full weight",
    "base_model.model.score.weight": "modules_to_save",
    "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": "trainable_token_indices",
    "base_model.model.model.embed_tokens.trainable_tokens_delta": "trainable_token_indices",
    f"base_model.model.model.{Q}.lora_B.bias": "lora_bias",
    f"base_model.model.model.{Q}.lora_B.default.bias": "lora_bias",
    f"base_model.model.model.{Q}.bias": "trained bias",
    f"base_model.model.model.{Q}.base_layer.bias": "trained bias",
    "base_model.model.model.norm.bias": "trained bias",
}


@pytest.mark.parametrize("key", OTHER_PARTS)
def test_parts_that_are_no_lora_are_named(key):
    with pytest.raises(AdapterFormatError, match=OTHER_PARTS[key]) as caught:
        parse_keys([f"base_model.model.model.{Q}.lora_A.weight", key])
    assert key in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "nonsense",
        "",
        f"base_model.model.model.{Q}.lora_A",
        f"base_model.model.model.{Q}.lora_C.weight",
        f"base_model.model.model.{Q}.lora_A.a.b.weight",
        f"base_model.model.model.{Q}.lora_diag.default",
        ".lora_A.weight",
        "lora_A.weight",
    ],
)
def test_unknown_spellings_are_refused(key):
    with pytest.raises(AdapterFormatError, match=r"1 tensors are no LoRA factors|full weight"):
        parse_keys([key])


def test_copies_of_the_embedding_are_told_apart():
    keys = [
        "base_model.model.model.embed_tokens.base_layer.weight",
        "base_model.model.lm_head.base_layer.weight",
        "base_model.model.lm_head.weight",
    ]
    factors, copies = parse_keys(keys)
    assert not factors
    assert [(copy.path, copy.wrapped) for copy in copies] == [
        ("embed_tokens", True),
        ("lm_head", True),
        ("lm_head", False),
    ]


def test_two_adapters_in_one_file_are_refused():
    keys = [f"base_model.model.model.{Q}.lora_A.{name}.weight" for name in ("default", "second")]
    with pytest.raises(AdapterFormatError, match="2 adapters, expected one: 'default', 'second'"):
        parse_keys(keys)


def test_endless_names_are_refused():
    with pytest.raises(AdapterFormatError, match="100014 characters") as caught:
        parse_keys(["x" * 100_000 + ".lora_A.weight"])
    assert len(str(caught.value)) < 200


def test_long_lists_of_keys_are_not_printed_whole():
    with pytest.raises(AdapterFormatError, match="5000 tensors") as caught:
        parse_keys([f"x{'y' * 300}{i}" for i in range(5000)])
    assert len(str(caught.value)) < 800
