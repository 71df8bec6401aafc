"""`Tokenizer`: text to token ids and back, special tokens and chat template of one checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from lorajax.chat_template import ChatTemplate
from lorajax.errors import RequestRejected


class Tokenizer:
    """A `tokenizers.Tokenizer` with what a checkpoint says beside it.

    add_bos: whether a plain prompt begins with the BOS token.
    eos_token_ids: every id that ends a text, from all places that declare one.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        chat_template: str | None,
        bos_token: str | None,
        eos_token: str | None,
        add_bos: bool,
        eos_token_ids: tuple[int, ...],
        special_tokens: Mapping[str, str] | None = None,
    ):
        self.fast = fast
        self.bos_token, self.eos_token = bos_token, eos_token
        self.bos_token_id = None if bos_token is None else fast.token_to_id(bos_token)
        self.eos_token_ids = eos_token_ids
        self._add_bos = add_bos
        self._template = None if chat_template is None else ChatTemplate(chat_template)
        self._template_variables = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._template_variables.update(special_tokens or {})

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return self.fast.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with BOS in front where the checkpoint says so."""
        ids = self.fast.encode(text, add_special_tokens=add_special_tokens).ids
        bos = self.bos_token_id
        if add_special_tokens and self._add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """A conversation as the text that the model was trained on.

        The text holds its special tokens itself: encode it with `add_special_tokens=False`.
        Raises RequestRejected for messages that the template refuses, or without a template.
        """
        if self._template is None:
            raise RequestRejected("the checkpoint has no chat template; pass a prompt instead of messages")
        if not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise RequestRejected("messages must be a non-empty list of {'role': …, 'content': …}")
        return self._template.render(
            messages,
            tools=None if tools is None else list(tools),
            add_generation_prompt=add_generation_prompt,
            **{**self._template_variables, **variables},
        )
