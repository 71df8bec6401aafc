"""Two small tokenizers, byte-level and SentencePiece-like, in which a text has many spellings in tokens."""

import functools

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from lorajax.tokenizer import Tokenizer

SPECIAL = ("<s>", "</s>", "<|end|>")


def byte_level() -> FastTokenizer:
    """A token for each byte, tokens that cut characters, special ones, and added ones that are not."""
    cut = [_spelled(data) for data in (b"\xe4\xb8", b"\x96\xe7", b"\x9f\x98", b"a\xf0", b"\x80 ")]
    tokens = [*_spelled(bytes(range(256))), "he", "Ġw", "or", *cut, *SPECIAL]
    merges = [(token[0], token[1]) for token in ("he", "Ġw", "or", *cut)]
    fast = FastTokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    fast.add_tokens([AddedToken(token, normalized=False) for token in ("<tool>", "世 ")])
    bos = ("<s>", fast.token_to_id("<s>"))
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return fast


def sentencepiece() -> FastTokenizer:
    """As Llama 2's: a space in front of a text, which decoding takes away; tokens of bytes as a fallback."""
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlow", "é", "▁▁"]
    merges = [("▁", "a"), ("h", "e"), ("▁", "he"), ("l", "l")]
    tokens += ["".join(merge) for merge in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", *SPECIAL)])
    return fast


@functools.cache
def toy_tokenizer(kind: str) -> Tokenizer:
    """kind: "byte_level" or "sentencepiece"."""
    fast = byte_level() if kind == "byte_level" else sentencepiece()
    return Tokenizer(fast, bos_token="<s>", eos_token="</s>", add_bos=kind == "sentencepiece")


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    """Id of the token that is one byte."""
    token = _spelled(bytes([byte])) if tokenizer.fast.token_to_id("<0x00>") is None else f"<0x{byte:02X}>"
    token_id = tokenizer.fast.token_to_id(token)
    assert token_id is not None
    return token_id


def _spelled(data: bytes) -> str:
    """In the byte-level alphabet: a byte whose Latin-1 character is in it stands for itself; the
    others have the further characters, in order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(char) for char in alphabet if ord(char) < 256}
    further = iter(char for char in alphabet if ord(char) >= 256)
    table = {byte: chr(byte) if byte in own else next(further) for byte in range(256)}
    return "".join(table[byte] for byte in data)
