"""Finds stop strings in a text that arrives in pieces.

Invariant: the result depends on the text alone, not on how it was cut into pieces. The stop string
that ends first wins; of several that end together, the longest (it begins first).
"""

from collections.abc import Sequence


class StopStrings:
    """Feed it the text with `advance`; `num_open` characters at its end may still become a stop string.

    The search costs one step per character and stop string (Knuth, Morris & Pratt 1977), however
    repetitive the strings are.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)

    @property
    def num_open(self) -> int:
        return max(self._matched, default=0)

    def advance(self, text: str, *, may_end: bool = True) -> tuple[str, int] | None:
        """The stop string that the text completes and how many characters of `text` lie up to its end,
        or None. After a match, no more text may be fed.

        may_end: whether a stop string that ends in this text counts; one that only begins in it does.
        """
        if not self._stops:
            return None
        for position, char in enumerate(text, start=1):
            found = ""
            for i, stop in enumerate(self._stops):
                matched = self._matched[i]
                while matched and stop[matched] != char:
                    matched = self._fallbacks[i][matched]
                matched += stop[matched] == char
                if matched == len(stop):
                    if may_end:
                        found = max(found, stop, key=len)
                    else:
                        matched = self._fallbacks[i][matched]
                self._matched[i] = matched
            if found:
                return found, position
        return None


def _fallbacks(stop: str) -> list[int]:
    """Entry n: length of the longest proper prefix of `stop` that ends its first n characters."""
    table = [0, 0]
    for end in range(1, len(stop)):
        length = table[end]
        while length and stop[length] != stop[end]:
            length = table[length]
        table.append(length + (stop[length] == stop[end]))
    return table
