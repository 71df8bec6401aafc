"""Tokenizers from GGUF's tables give the tokens that transformers makes of the same tables."""

import json

import pytest
from golden_files import GOLDEN

from lorajax.checkpoints.gguf_tokenizer import end_of_text_ids, load_gguf_tokenizer
from lorajax.errors import CheckpointError

GOLD = json.loads((GOLDEN / "gguf_tokenizer" / "cases.json").read_text())
CASES = GOLD["cases"]


def changed(name, **changes):
    metadata = {
        **CASES[name]["metadata"],
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name):
    tokenizer = load_gguf_tokenizer(CASES[name]["metadata"], "x.gguf")
    for text, ids in zip(GOLD["texts"], CASES[name]["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


@pytest.mark.parametrize("name", CASES)
def test_texts_come_back(name):
    tokenizer = load_gguf_tokenizer(CASES[name]["metadata"], "x.gguf")
    for text in GOLD["texts"]:
        if name == "qwen2":  # it normalises
            continue
        ids = tokenizer.encode(text, add_special_tokens=False)
        found = tokenizer.decode(ids, skip_special_tokens=False)
        # SentencePiece puts a space after a special token, too
        assert found.replace("> ", ">") == text if name == "sentencepiece" else found == text


def test_qwen2_normalises_to_composed_characters():
    tokenizer = load_gguf_tokenizer(CASES["qwen2"]["metadata"], "x.gguf")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


@pytest.mark.parametrize(
    ("name", "said", "added"),
    [
        ("gpt-2", None, False),
        ("llama-bpe", None, True),
        ("qwen2", None, False),
        ("sentencepiece", None, True),
        ("gpt-2", True, True),
        ("llama-bpe", False, False),
    ],
)
def test_bos_as_the_file_says_or_as_its_kind_does(name, said, added):
    bos = CASES[name]["metadata"]["tokenizer.ggml.tokens"].index("<s>")
    tokenizer = load_gguf_tokenizer(changed(name, bos_token_id=bos, add_bos_token=said), "x.gguf")
    assert tokenizer.encode("hello").count(bos) == added
    assert tokenizer.encode("<s>hello").count(bos) == 1


def test_without_a_space_in_front():
    tokenizer = load_gguf_tokenizer(changed("sentencepiece", add_space_prefix=False), "x.gguf")
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def test_every_declared_end_of_text_counts():
    metadata = changed("gpt-2", eos_token_id=361, eot_token_id=360, eom_token_id=361)
    assert end_of_text_ids(metadata) == (361, 360)
    assert load_gguf_tokenizer(metadata, "x.gguf").eos_token_ids == (361, 360)


def test_control_tokens_are_special_and_user_defined_ones_are_not():
    tokenizer = load_gguf_tokenizer(CASES["gpt-2"]["metadata"], "x.gguf")
    ids = tokenizer.encode("<s>a<think>b</s>", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a<think>b"


REFUSED = {
    "model": (
        changed("gpt-2", model="bert"),
        "tokenizer 'bert'.*served are 'llama', and 'gpt2' with .*gpt-2, llama",
    ),
    "pre": (changed("gpt-2", pre="new-bpe"), "pre-tokenizer 'new-bpe'"),
    "no_pre": (changed("gpt-2", pre=None), "pre-tokenizer None"),
    "no_tokens": (changed("gpt-2", tokens=None), "tokens are missing"),
    "tokens_twice": (changed("gpt-2", tokens=["a"] * 363), "repeated"),
    "types": (changed("gpt-2", token_type=[1]), "lack types"),
    "merge_of_one": (changed("gpt-2", merges=["ab"]), "no pair"),
    "merge_of_three": (changed("gpt-2", merges=["a b c"]), "no pair"),
    "merge_of_unknown": (changed("gpt-2", merges=["世 界"]), "merges"),
    "merges_of_numbers": (changed("gpt-2", merges=[1]), "no texts"),
    "no_scores": (changed("sentencepiece", scores=None), "no scores"),
    "unknown_token": (changed("sentencepiece", unknown_token_id=9999), "unknown token has the id 9999"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_named(name):
    metadata, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=rf"x.gguf: .*{message}"):
        load_gguf_tokenizer(metadata, "x.gguf")
