"""Tokenizer files that lie in an adapter's folder, held against the base model.

The rule: prompts are tokenised, and chats rendered, by the base model's tokenizer, for every adapter.
So an adapter whose tokenizer has a token id at or above the base's vocabulary cannot be served: the
base has no row for it. Ids below are not "added", whichever file lists them. A chat template other
than the base's is a warning, since the adapter was probably trained on it.
"""

from collections.abc import Callable, Iterator
from typing import Any

from lorajax.errors import AdapterFormatError
from lorajax.lora.adapter_folder import AdapterFolder

MAX_TOKENIZER_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 1 << 20


def check_tokenizer_files(
    folder: AdapterFolder,
    vocab_size: int | None,
    base_chat_template: str | None,
    warn: Callable[[str], None],
) -> None:
    """Apply the rule to a folder; folders without tokenizer files pass.

    vocab_size: rows of the base's embedding, None if unknown. base_chat_template: None if unknown.

    Raises:
        AdapterFormatError: a token that the base has no row for, or a file that is no tokenizer's.
    """
    tokenizer = _read(folder, "tokenizer.json")
    added = _read(folder, "added_tokens.json")
    tokenizer_config = _read(folder, "tokenizer_config.json")
    tokens = [*_json_tokens(tokenizer), *added.items(), *_decoder_tokens(tokenizer_config)]
    if bad := [name for name, token_id in tokens if type(token_id) is not int or token_id < 0]:
        raise AdapterFormatError(f"the adapter's tokenizer: token {bad[0][:80]!r} has no id")
    new = sorted(
        (token_id, name) for name, token_id in tokens if vocab_size is not None and token_id >= vocab_size
    )
    if new:
        token_id, name = new[0]
        raise AdapterFormatError(
            f"the adapter's tokenizer adds token {name[:80]!r} with id {token_id}; "
            f"the base has ids below {vocab_size}"
        )
    template = _chat_template(folder, tokenizer_config)
    if template and base_chat_template is not None and template.strip() != base_chat_template.strip():
        warn("the adapter brings a chat template of its own; chats are rendered with the base model's")


def _read(folder: AdapterFolder, name: str) -> dict[str, Any]:
    return folder.read_json(name, MAX_TOKENIZER_BYTES) if name in folder.names else {}


def _json_tokens(tokenizer: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(text, id) of all tokens in a `tokenizer.json`."""
    for token in _list(tokenizer.get("added_tokens")):
        yield (str(token.get("content")), token.get("id")) if isinstance(token, dict) else (str(token), None)
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):  # BPE, WordPiece
        yield from vocab.items()
    else:  # Unigram: [text, score], the id is the position
        for token_id, token in enumerate(_list(vocab)):
            yield str(token[0] if isinstance(token, list) and token else token), token_id


def _decoder_tokens(tokenizer_config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(text, id) of `added_tokens_decoder` in a `tokenizer_config.json`, whose keys are ids."""
    decoder = tokenizer_config.get("added_tokens_decoder")
    for key, token in (decoder if isinstance(decoder, dict) else {}).items():
        text = token.get("content") if isinstance(token, dict) else token
        yield str(text), int(key) if key.isdecimal() and len(key) < 12 else None


def _chat_template(folder: AdapterFolder, tokenizer_config: dict[str, Any]) -> str | None:
    """The default chat template of the adapter's folder: the file wins over the config's field."""
    if "chat_template.jinja" in folder.names:
        return folder.read_text("chat_template.jinja", MAX_TEMPLATE_BYTES)
    template = tokenizer_config.get("chat_template")
    for named in _list(template):
        if isinstance(named, dict) and named.get("name") == "default":
            template = named.get("template")
    return template if isinstance(template, str) else None


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []
