"""`Tokenizer`: text to token ids and back, special tokens and chat template of one checkpoint."""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

from lorajax.chat_template import ChatTemplate
from lorajax.errors import RequestRejected

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>\Z")


class Tokenizer:
    """A `tokenizers.Tokenizer` with what a checkpoint says beside it.

    fast: its truncation and padding are switched off; a prompt is never cut silently.
    chat_template: Jinja2 source, or several by name ("default", "tool_use").
    add_bos: whether a plain prompt begins with BOS; None leaves that to `fast`.
    eos_token_ids: every id that ends a text, from all places that declare one.
    special_tokens: further names for the chat template, such as "pad_token".
    """

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        chat_template: str | Mapping[str, str] | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos: bool | None = None,
        eos_token_ids: tuple[int, ...] = (),
        special_tokens: Mapping[str, str] | None = None,
    ):
        fast.no_truncation()
        fast.no_padding()
        self.fast = fast
        self.bos_token, self.eos_token = bos_token, eos_token
        self.bos_token_id = None if bos_token is None else fast.token_to_id(bos_token)
        self.eos_token_ids = eos_token_ids
        added = fast.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._add_bos = add_bos
        templates = {"default": chat_template} if isinstance(chat_template, str) else chat_template or {}
        self.chat_template = templates.get("default")
        self._templates = {name: ChatTemplate(source) for name, source in templates.items()}
        named = {"bos_token": bos_token, "eos_token": eos_token, **(special_tokens or {})}
        self._template_variables = {name: text for name, text in named.items() if text is not None}
        self._is_byte_level = isinstance(fast.decoder, decoders.ByteLevel)
        # any token that begins a text, so that another can be read as one that does not
        self._anchor = fast.encode("a", add_special_tokens=False).ids
        self._bytes_of: dict[tuple[int, bool], bytes] = {}

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included. The model's embedding may have more rows."""
        return self.fast.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens that are spelled out in it become their ids.

        add_special_tokens: put what the checkpoint puts around a plain prompt, usually BOS in front.
            A text that already begins with BOS gets no second one.
        """
        encoding = self.fast.encode(text, add_special_tokens=add_special_tokens)
        ids, bos = encoding.ids, self.bos_token_id
        if not add_special_tokens or bos is None:
            return ids
        if ids[:1] == [bos] and encoding.special_tokens_mask[0]:  # `fast` put it there
            if self._add_bos is False or ids[1:2] == [bos]:
                return ids[1:]
        elif self._add_bos and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens, as a text of its own. Ids without a token make no text; bytes that are
        no UTF-8 become U+FFFD."""
        if not self._is_byte_level:
            return self.fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        # as `fast.decode`, but that takes an added token's é for the byte of that name
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """UTF-8 bytes that a token adds to a text; a character may be spread over several tokens.

        first: the token begins the text (SentencePiece tokenizers drop its leading space).
        An id without a token adds none.
        """
        key = (token_id, first)
        if key not in self._bytes_of:
            self._bytes_of[key] = self._read_token_bytes(token_id, first)
        return self._bytes_of[key]

    def _read_token_bytes(self, token_id: int, first: bool) -> bytes:
        token = self.fast.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            table = _byte_level_alphabet()
            if token_id in self._added or not table.keys() >= set(token):
                return self._added.get(token_id, token.encode())
            return bytes(table[char] for char in token)
        byte = bytes.fromhex(match[1]) if (match := _BYTE_TOKEN.match(token)) else b""
        if byte and (not first or not byte.isascii()):
            return byte
        if not first:
            before = self.decode(self._anchor, skip_special_tokens=False)
            both = self.decode([*self._anchor, token_id], skip_special_tokens=False)
            if both.startswith(before):
                return both[len(before) :].encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """A conversation as the text that the model was trained on, as transformers renders it.

        The text holds its special tokens itself: encode it with `add_special_tokens=False`.
        tools: JSON schemas of functions; a template named "tool_use" is taken for them, if there is one.
        variables: further ones of the template, such as `enable_thinking` or `documents`.

        Raises RequestRejected for messages that the template refuses, or without a template.
        """
        if not self._templates:
            raise RequestRejected("the checkpoint has no chat template; pass a prompt instead of messages")
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestRejected(
                f"no chat template is named 'default', only {', '.join(sorted(self._templates))}"
            )
        return self._templates[name].render(
            messages,
            tools=None if tools is None else list(tools),
            add_generation_prompt=add_generation_prompt,
            **{**self._template_variables, "documents": None, **variables},
        )


@functools.cache
def _byte_level_alphabet() -> Mapping[str, int]:
    """Character → byte of byte-level BPE (GPT-2): printable Latin-1 stands for itself, the rest follows
    from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
