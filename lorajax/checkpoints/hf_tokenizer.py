"""The tokenizer of a Hugging Face folder, as transformers builds it from the folder's files.

`tokenizer.json` is the tokenizer; `tokenizer_config.json` (and `special_tokens_map.json`,
`added_tokens.json` of older versions) name its special tokens, say whether prompts begin with BOS, and
hold the chat template, unless that stands in `chat_template.jinja`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from lorajax.checkpoints.safetensors_folder import read_json_file
from lorajax.errors import CheckpointError
from lorajax.tokenizer import Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


def load_hf_tokenizer(folder: Path, eos_token_ids: tuple[int, ...] = ()) -> Tokenizer:
    """The folder's tokenizer; its EOS token joins the ids that the model's own files declare.

    Raises CheckpointError without a tokenizer.json, or if a file is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(
            f"{folder.name}: no tokenizer.json in the folder; pass token ids, or a tokenizer"
        )
    try:
        fast = FastTokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"tokenizer.json: {error}") from error
    settings = {
        **_optional(folder / "special_tokens_map.json"),
        **_optional(folder / "tokenizer_config.json"),
    }
    named = {name: text for name in _NAMED if (text := _token_text(settings.get(name))) is not None}
    _add_declared_tokens(fast, settings, _optional(folder / "added_tokens.json"))
    _mark_special(fast, [*named.values(), *_further_special(settings)])
    eos_id = fast.token_to_id(named["eos_token"]) if "eos_token" in named else None
    declared = eos_token_ids if eos_id is None else (*eos_token_ids, eos_id)
    add_bos = settings.get("add_bos_token")
    return Tokenizer(
        fast,
        chat_template=_chat_templates(folder, settings),
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        add_bos=None if add_bos is None else bool(add_bos),
        eos_token_ids=tuple(dict.fromkeys(declared)),
        special_tokens=named,
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json_file(path) if path.exists() else {}


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) and text else None


def _add_declared_tokens(
    fast: FastTokenizer, settings: Mapping[str, Any], added_tokens: Mapping[str, Any]
) -> None:
    """Tokens that only the older files list, at the ids that these give."""
    decoder = settings.get("added_tokens_decoder")
    declared: list[tuple[int, AddedToken]] = []
    if isinstance(decoder, Mapping):
        for token_id, token in decoder.items():
            text = _token_text(token)
            if not token_id.isdecimal() or text is None or not isinstance(token, Mapping):
                raise CheckpointError(f"tokenizer_config.json: added_tokens_decoder has {token_id[:20]!r}")
            flags = {flag: bool(token[flag]) for flag in _FLAGS if flag in token}
            declared.append((int(token_id), AddedToken(text, **flags)))
    else:
        for text, token_id in added_tokens.items():
            if type(token_id) is not int:
                raise CheckpointError(f"added_tokens.json: the id of {text[:80]!r} is {token_id!r:.20}")
            declared.append((token_id, AddedToken(text)))
    for token_id, token in sorted(declared, key=lambda item: item[0]):
        if isinstance(decoder, Mapping) or fast.token_to_id(token.content) is None:
            known = fast.token_to_id(token.content)
            fast.add_tokens([token])
            found = fast.token_to_id(token.content)
            if known is None and found != token_id:
                raise CheckpointError(
                    f"the tokenizer's files give token {token.content[:80]!r} the id {token_id}, "
                    f"but the next free one in tokenizer.json is {found}"
                )


def _further_special(settings: Mapping[str, Any]) -> list[str]:
    """transformers 4 writes `additional_special_tokens`, 5 `extra_special_tokens`, a list or an object."""
    found: list[str] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = settings.get(name) or []
        values = value.values() if isinstance(value, Mapping) else value
        found += [text for token in values if (text := _token_text(token)) is not None]
    return found


def _mark_special(fast: FastTokenizer, texts: list[str]) -> None:
    """What is named as special is special, if it is a token at all; if not, the model has no row for it."""
    special = {token.content for token in fast.get_added_tokens_decoder().values() if token.special}
    missing = [
        text for text in dict.fromkeys(texts) if text not in special and fast.token_to_id(text) is not None
    ]
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; files win over the config's field."""
    found: dict[str, str] = {}
    if (folder / "chat_template.jinja").exists():
        found["default"] = _read_text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read_text(path)
    if found:
        return found
    template = settings.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):  # [{"name": …, "template": …}]
        template = {
            entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)
        }
    if template is None:
        return {}
    if not isinstance(template, Mapping) or not all(
        isinstance(text, str) for item in template.items() for text in item
    ):
        raise CheckpointError("tokenizer_config.json: chat_template is neither a text nor texts by name")
    return dict(template)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path.name}: cannot be read as UTF-8 text") from error
