"""The tokenizer that a GGUF file carries: byte-level BPE, or the BPE of SentencePiece.

GGUF names the pre-tokenizer of byte-level BPE instead of describing it; the names are llama.cpp's, the
rules those of the models' own tokenizer.json. SentencePiece has scores in place of merges.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from lorajax.errors import CheckpointError
from lorajax.tokenizer import Tokenizer

_NORMAL_TOKEN, _CONTROL_TOKEN, _USER_DEFINED_TOKEN = 1, 3, 4  # values of tokenizer.ggml.token_type
_END_OF_TEXT = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PreTokenizer:
    """pattern: pieces of a text, each encoded by itself; None is GPT-2's own pattern.

    digits: numbers are first cut into digits. ignore_merges: a piece that is a token stays whole.
    nfc: text is normalised first. add_bos: where the file does not say.
    """

    pattern: str | None = None
    digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


_LLAMA3 = _PreTokenizer(
    pattern=rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    ignore_merges=True,
    add_bos=True,
)
_QWEN2 = _PreTokenizer(
    pattern=rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    nfc=True,
)
_TEKKEN = _PreTokenizer(
    pattern=rf"{_CASED}*{_LOWER}+|{_CASED}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
    ignore_merges=True,
    add_bos=True,
)
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _PreTokenizer(digits=True),
    "tekken": _TEKKEN,
}


def end_of_text_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Every id that the file declares to end a text or a turn."""
    ids = [metadata.get(f"tokenizer.ggml.{name}") for name in _END_OF_TEXT]
    return tuple(dict.fromkeys(token_id for token_id in ids if type(token_id) is int))


def load_gguf_tokenizer(metadata: Mapping[str, Any], file_name: str) -> Tokenizer:
    """Raises CheckpointError for a kind of tokenizer that is not served, or damaged tables."""
    tokens: Any = metadata.get("tokenizer.ggml.tokens")
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    if not _is_texts(tokens) or len(set(tokens)) != len(tokens) or len(kinds) not in (0, len(tokens)):
        raise CheckpointError(f"{file_name}: the tokenizer's tokens are missing, repeated, or lack types")
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model == "gpt2" and pre in _PRE_TOKENIZERS:
        fast, add_bos = (
            _byte_level_bpe(metadata, _PRE_TOKENIZERS[pre], file_name),
            _PRE_TOKENIZERS[pre].add_bos,
        )
    elif model == "llama":
        fast, add_bos = _sentencepiece_bpe(metadata, file_name), True
    else:
        raise CheckpointError(
            f"{file_name}: tokenizer {model!r:.40} with pre-tokenizer {pre!r:.40}; served are 'llama', and "
            f"'gpt2' with {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    added = {_CONTROL_TOKEN: True, _USER_DEFINED_TOKEN: False}
    fast.add_tokens(
        [
            AddedToken(token, special=added[kind], normalized=False)
            for token, kind in zip(tokens, kinds, strict=bool(kinds))
            if kind in added
        ]
    )
    named = {}
    for stored, name in _NAMED.items():
        token_id = metadata.get(f"tokenizer.ggml.{stored}_token_id")
        if type(token_id) is int and 0 <= token_id < len(tokens):
            named[name] = tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        fast,
        chat_template=template if isinstance(template, str) else None,
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        eos_token_ids=end_of_text_ids(metadata),
        special_tokens=named,
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _byte_level_bpe(metadata: Mapping[str, Any], rule: _PreTokenizer, file_name: str) -> FastTokenizer:
    merges = metadata.get("tokenizer.ggml.merges") or []
    if not _is_texts(merges):
        raise CheckpointError(f"{file_name}: the tokenizer's merges are no texts")
    # byte-level tokens hold no space (it is written Ġ), so the space parts the two
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    if not all(right and " " not in right for _, right in pairs):
        raise CheckpointError(f"{file_name}: the tokenizer has a merge that is no pair")
    vocab = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=rule.ignore_merges)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{file_name}: the tokenizer's merges: {error}") from error
    fast = FastTokenizer(model)
    if rule.nfc:
        fast.normalizer = normalizers.NFC()
    pieces: list[pre_tokenizers.PreTokenizer] = []
    if rule.digits:
        pieces.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.pattern is not None:
        pieces.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    pieces.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    fast.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    fast.decoder = decoders.ByteLevel()
    return fast


def _sentencepiece_bpe(metadata: Mapping[str, Any], file_name: str) -> FastTokenizer:
    """As the tokenizer.json of Llama 2: a space, written ▁, stands in front of every text; what no token
    spells becomes tokens of bytes."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores")
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL_TOKEN] * len(tokens)
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{file_name}: the tokenizer's tokens have no scores")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == _NORMAL_TOKEN}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise CheckpointError(f"{file_name}: the tokenizer's unknown token has the id {unknown!r:.20}")
    fast = FastTokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(tokens, scores, normal),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    pieces: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        pieces.append(decoders.Strip(" ", 1, 0))
    fast.decoder = decoders.Sequence(pieces)
    return fast


def _merges_by_score(tokens: list[str], scores: list[float], normal: set[str]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose whole has the best score: every way to part a token in
    two tokens is a merge, those of better tokens first."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    ranked = []
    for token_id, token in enumerate(tokens):
        if token in normal:
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in normal and right in normal:
                    ranked.append((-scores[token_id], cut, len(token), ids[left], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]
