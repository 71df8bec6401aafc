"""Regular expressions of an adapter's config, tried on module names in bounded time.

The patterns come from strangers, and Python's backtracking `re` can be made to run for years on a
name of forty characters while it holds the interpreter. Here the parsed pattern is walked once, with
the *set* of places that can have been reached. Only "does it match" is asked, so nothing is lost
against backtracking; what needs captured text (back references) is refused.

Invariant: for every pattern that is accepted, the answer is that of `re.fullmatch`, or an error after
a bounded number of steps.
"""

import functools
import operator
import re
from collections.abc import Callable
from re import _constants as op  # pyright: ignore[reportAttributeAccessIssue]  # alike in 3.11 to 3.14
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any, ClassVar

from lorajax.errors import AdapterFormatError

MAX_PATTERN_LENGTH = 2048
MAX_PATTERN_DEPTH = 40
MAX_ROUNDS = 20_000  # of repeated parts, on one name; honest patterns take a few hundred

Node = tuple[Any, Any]  # what the parser of `re` makes: an operator and its argument
Nodes = Any  # a sequence of them, of the parser's own type

_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    op.CATEGORY_DIGIT: lambda c: c.isdecimal(),
    op.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    op.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    op.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
}


def _is_word(name: str, position: int) -> bool:
    return 0 <= position < len(name) and (name[position].isalnum() or name[position] == "_")


_POSITIONS: dict[Any, Callable[[str, int], bool]] = {
    op.AT_BEGINNING: lambda name, i: i == 0,
    op.AT_BEGINNING_STRING: lambda name, i: i == 0,
    op.AT_END: lambda name, i: i == len(name) or name[i:] == "\n",
    op.AT_END_STRING: lambda name, i: i == len(name),
    op.AT_BOUNDARY: lambda name, i: _is_word(name, i - 1) != _is_word(name, i),
    op.AT_NON_BOUNDARY: lambda name, i: _is_word(name, i - 1) == _is_word(name, i),
}


class ModulePattern:
    """One pattern of an adapter's config. `text` is the pattern as it stands there.

    field: where it stands, for messages. template: what is put around it before it is compiled.

    Raises:
        AdapterFormatError: no regular expression; or back references, conditions, atomic groups,
            possessive repeats or inline flags; or longer or deeper than any honest pattern.
    """

    def __init__(self, field: str, text: str, *, template: str = "{}"):
        self.text = text
        shown = f"{field}: {text[:120]!r}"
        if len(text) > MAX_PATTERN_LENGTH:
            raise AdapterFormatError(f"{shown}… has {len(text)} characters; allowed are {MAX_PATTERN_LENGTH}")
        source = template.replace("{}", text)
        try:
            regex = re.compile(source)
        except (re.error, RecursionError, OverflowError) as error:
            raise AdapterFormatError(f"{shown} is no regular expression: {error}") from None
        # plain names, by far the commonest, are safe in `re`: nothing in them can be tried twice
        self.is_plain = re.fullmatch(r"[\w.]*", text) is not None
        self._regex = regex
        self._nodes = [] if self.is_plain else _parser.parse(source)
        if regex.flags != re.UNICODE:
            raise AdapterFormatError(f"{shown}: inline flags are not supported")
        if problem := _unsupported(self._nodes):
            raise AdapterFormatError(f"{shown}: {problem}")

    def fullmatch(self, name: str) -> bool:
        if self.is_plain:
            return self._regex.fullmatch(name) is not None
        return _Walk(name, self.text).sequence(self._nodes, 1) >> len(name) & 1 == 1


def suffix_pattern(field: str, text: str) -> ModulePattern:
    """The rule of `rank_pattern` and `alpha_pattern`: the pattern ends the name, at a dot or its start."""
    return ModulePattern(field, text, template=r"(.*\.)?({})$")


def module_pattern(field: str, text: str) -> ModulePattern:
    """The rule of `target_modules` and `exclude_modules` given as text: the pattern is the whole name."""
    return ModulePattern(field, text)


def _unsupported(nodes: Nodes, depth: int = 0) -> str | None:
    """Why a parsed pattern is refused, or None."""
    if depth > MAX_PATTERN_DEPTH:
        return f"nested deeper than {MAX_PATTERN_DEPTH} levels"
    for kind, argument in nodes:
        if kind not in _Walk.OPERATORS:
            return f"{str(kind).lower()} is not supported"
        if kind is op.SUBPATTERN and (argument[1] or argument[2]):
            return "inline flags are not supported"
        for part in _parts(kind, argument):
            if problem := _unsupported(part, depth + 1):
                return problem
    return None


def _parts(kind: Any, argument: Any) -> list[Nodes]:
    """The sequences of nodes inside a node."""
    if kind is op.BRANCH:
        return argument[1]
    if kind in (op.SUBPATTERN, op.MAX_REPEAT, op.MIN_REPEAT, op.ASSERT, op.ASSERT_NOT):
        return [argument[-1]]
    return []


class _Walk:
    """All ways through a pattern on one name at once.

    A set of positions is an integer: bit i stands for the place before character i. Each operator
    maps the places where it may begin to the places where it may end.
    """

    def __init__(self, name: str, text: str):
        self.name, self._text = name, text
        self._rounds_left = MAX_ROUNDS
        self._where = dict.fromkeys(name, 0)  # character -> its positions
        for position, character in enumerate(name):
            self._where[character] |= 1 << position

    def sequence(self, nodes: Nodes, starts: int) -> int:
        for kind, argument in nodes:
            if not starts:
                break
            starts = self.OPERATORS[kind](self, argument, starts)
        return starts

    def _step(self, accepts: Callable[[str], bool], starts: int) -> int:
        """One character further from every place where the character is accepted."""
        accepted = sum(positions for character, positions in self._where.items() if accepts(character))
        return (accepted & starts) << 1

    def _any(self, _: None, starts: int) -> int:
        return self._step(lambda character: character != "\n", starts)

    def _literal(self, code: int, starts: int) -> int:
        return (self._where.get(chr(code), 0) & starts) << 1

    def _not_literal(self, code: int, starts: int) -> int:
        return self._step(lambda character: ord(character) != code, starts)

    def _in(self, items: list[Node], starts: int) -> int:
        return self._step(lambda character: _in_set(character, items), starts)

    def _at(self, where: Any, starts: int) -> int:
        return self._keep(lambda position: _POSITIONS[where](self.name, position), starts)

    def _keep(self, holds: Callable[[int], bool], starts: int) -> int:
        """The places for which a condition holds; nothing is consumed."""
        positions = range(len(self.name) + 1)
        return sum(1 << position for position in positions if starts >> position & 1 and holds(position))

    def _branch(self, argument: tuple[None, list[Nodes]], starts: int) -> int:
        return functools.reduce(operator.or_, (self.sequence(nodes, starts) for nodes in argument[1]))

    def _subpattern(self, argument: tuple[Any, int, int, Nodes], starts: int) -> int:
        return self.sequence(argument[3], starts)

    def _repeat(self, argument: tuple[Any, Any, Nodes], starts: int) -> int:
        """Between `least` and `most` times the body. After n + 1 rounds nothing new can come."""
        least, most, body = argument
        rounds = len(self.name) + 1
        for _ in range(min(least, rounds)):
            starts = self._round(body, starts)
        reached = newest = starts
        for _ in range(min(most - least, rounds)):
            newest = self._round(body, newest) & ~reached
            if not newest:
                break
            reached |= newest
        return reached

    def _round(self, body: Nodes, starts: int) -> int:
        self._rounds_left -= 1
        if self._rounds_left < 0:
            raise AdapterFormatError(f"the pattern {self._text[:120]!r} takes too long to match")
        return self.sequence(body, starts)

    def _assert(self, argument: tuple[int, Nodes], starts: int) -> int:
        direction, nodes = argument
        if direction > 0:
            return self._keep(lambda position: self.sequence(nodes, 1 << position) != 0, starts)
        # a look-behind may begin anywhere before the place where it ends
        return self._keep(
            lambda position: self.sequence(nodes, (2 << position) - 1) >> position & 1 == 1, starts
        )

    def _assert_not(self, argument: tuple[int, Nodes], starts: int) -> int:
        return starts & ~self._assert(argument, starts)

    OPERATORS: ClassVar[dict[Any, Callable[..., int]]] = {
        op.ANY: _any,
        op.LITERAL: _literal,
        op.NOT_LITERAL: _not_literal,
        op.IN: _in,
        op.AT: _at,
        op.BRANCH: _branch,
        op.SUBPATTERN: _subpattern,
        op.MAX_REPEAT: _repeat,
        op.MIN_REPEAT: _repeat,
        op.ASSERT: _assert,
        op.ASSERT_NOT: _assert_not,
    }


def _in_set(character: str, items: list[Node]) -> bool:
    code = ord(character)
    negated = bool(items) and items[0][0] is op.NEGATE
    for kind, argument in items[negated:]:
        if kind is op.LITERAL and code == argument:
            return not negated
        if kind is op.RANGE and argument[0] <= code <= argument[1]:
            return not negated
        if kind is op.CATEGORY and _CATEGORIES[argument](character):
            return not negated
    return negated
