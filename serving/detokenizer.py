"""Token ids → text as they come: no broken character, no part of a stop string, nothing twice.

Invariant: `text` is what was emitted so far, and the deltas joined are `text`. Held back are the bytes of
an unfinished character and any end of the text that may still become a stop string.
"""

from collections.abc import Sequence

from lorajax.tokenizer import Tokenizer

_CONTEXT = 8
"""Prompt tokens decoded before the output, so that its first token is read in context (a byte-level
or SentencePiece tokenizer may treat a text's first token specially)."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Text of one completion."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
    ):
        self._tokenizer, self._skip_special = tokenizer, skip_special_tokens
        self._stop, self._include_stop = tuple(stop), include_stop_str_in_output
        self._longest_stop = max(map(len, self._stop), default=0)
        # window of tokens:  [ context | read ][ unread ]; text of the first part is known
        self._window = list(prompt_token_ids[-_CONTEXT:])
        self._num_read = len(self._window)
        self._pending = ""  # decoded, but held back
        self.text = ""
        self.stop_reason: str | None = None

    def append(self, token_ids: Sequence[int]) -> str:
        """Take new tokens; returns the text that is safe to emit. After a stop, nothing more is."""
        if self.stop_reason is not None:
            return ""
        self._window.extend(token_ids)
        return self._release(self._read())

    def finish(self) -> str:
        """The rest: held text, and what there is of an unfinished character."""
        if self.stop_reason is not None:
            return ""
        rest = self._pending + self._new_text()
        self._num_read = len(self._window)
        self._pending = ""
        self.text += rest
        return rest

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)

    def _new_text(self) -> str:
        """Text of the unread tokens: what they add to the text of those before them."""
        return self._decode(self._window)[len(self._decode(self._window[: self._num_read])) :]

    def _read(self) -> str:
        new = self._new_text()
        if new.endswith(_REPLACEMENT) or not new:
            return ""  # a character is unfinished
        # keep the tokens just read as the context of the next ones
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        return new

    def _release(self, new: str) -> str:
        """Move text from held to emitted, as far as no stop string can begin in it."""
        # A stop string that ends in `new` begins at most its length before it.
        self._pending += new
        found = [(self._pending.find(stop), stop) for stop in self._stop]
        found = [(position, stop) for position, stop in found if position >= 0]
        if found:
            position, self.stop_reason = min(found, key=lambda match: (match[0], -len(match[1])))
            end = position + len(self.stop_reason) if self._include_stop else position
            delta, self._pending = self._pending[:end], ""
        else:
            held = self._possible_stop(self._pending)
            delta, self._pending = (
                self._pending[: len(self._pending) - held],
                self._pending[len(self._pending) - held :],
            )
        self.text += delta
        return delta

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest_stop - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
