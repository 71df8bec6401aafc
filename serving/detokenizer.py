"""Token ids → text as they come: no broken character, no part of a stop string, nothing twice.

Invariant: the deltas joined are `text`. Held back are the bytes of an unfinished character, and the end
of the text as far as it may still become a stop string. Each token costs a look-up, however long the
text is.
"""

import codecs
from collections.abc import Sequence

from lorajax.tokenizer import Tokenizer
from serving.stop_strings import StopStrings

_LONGEST_UNFINISHED = 3  # bytes of a character that lacks one


class Detokenizer:
    """Text of one completion: what its tokens add to the text of the prompt.

    A first token keeps its leading space, since it follows a prompt; only after a prompt without
    text (a lone BOS, say) does the completion begin a text. If the prompt ends inside a character and the
    output completes it, the whole character belongs to the completion; bytes of the prompt that the output
    does not continue make no text. Other bytes that are no UTF-8 become U+FFFD, as in `decode`.

    skip_special_tokens: special tokens make no text, so a stop string cannot match them.
    stop: searched in the completion's text only, never across its beginning. The string that ends
        first ends the text, before or, with `include_stop_str_in_output`, after it.
    min_tokens: a stop string that ends in the text of the first so many tokens does not count; one that
        only begins there does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._stop_strings, self._include_stop = StopStrings(stop), include_stop_str_in_output
        self._min_tokens, self._num_tokens = min_tokens, 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        end = self._last_bytes(prompt_token_ids)
        self._begins_text = not end
        self._utf8.decode(end)
        self._prompt_unfinished = bool(self._unfinished)
        self._held = ""
        self._emitted: list[str] = []
        self.stop_reason: str | None = None

    @property
    def text(self) -> str:
        """What was emitted so far."""
        self._emitted = ["".join(self._emitted)]
        return self._emitted[0]

    def append(self, token_ids: Sequence[int]) -> str:
        """Take new tokens; returns the text that is safe to emit. After a stop, nothing more is."""
        return "".join([self._append(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """The rest: held text, and U+FFFD for a character that the output left unfinished."""
        if self.stop_reason is not None:
            return ""
        if self._prompt_unfinished:
            self._utf8.reset()
        delta = self._search(self._utf8.decode(b"", final=True))
        if self.stop_reason is None:
            delta += self._held
            self._emitted.append(self._held)
            self._held = ""
        return delta

    def _append(self, token_id: int) -> str:
        if self.stop_reason is not None:
            return ""
        self._num_tokens += 1
        return self._search(self._decode(token_id))

    def _decode(self, token_id: int) -> str:
        """The characters that the token completes."""
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id, first=self._begins_text)
        # a lone space in front makes no text, but what follows no longer begins one
        self._begins_text = self._begins_text and not self._tokenizer.token_bytes(token_id)
        if not data:
            return ""
        if not self._prompt_unfinished:
            return self._utf8.decode(data)
        self._prompt_unfinished = False
        head = self._utf8.decode(data[:1])
        # A byte that continues the prompt's character completes it or leaves it unfinished. One that does
        # not makes U+FFFD of it, and then is a character, or the beginning of one, itself.
        continues = not head or (len(head) == 1 and not self._unfinished)
        if not continues:
            self._utf8.reset()
            return self._utf8.decode(data)
        return head + self._utf8.decode(data[1:])

    def _search(self, text: str) -> str:
        """Emit held and new text, as far as no stop string can begin in it."""
        found = self._stop_strings.advance(text, may_end=self._num_tokens > self._min_tokens)
        self._held += text
        if found is None:
            end = len(self._held) - self._stop_strings.num_open
            delta, self._held = self._held[:end], self._held[end:]
        else:
            self.stop_reason, position = found
            end = len(self._held) - len(text) + position
            delta = self._held[: end if self._include_stop else end - len(self.stop_reason)]
            self._held = ""
        self._emitted.append(delta)
        return delta

    @property
    def _unfinished(self) -> bytes:
        return self._utf8.getstate()[0]

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Enough bytes from the end of a text to know whether it ends inside a character."""
        end = b""
        for token_id in reversed(token_ids):
            if len(end) >= _LONGEST_UNFINISHED:
                break
            if token_id not in self._skipped:
                end = self._tokenizer.token_bytes(token_id) + end
        return end
