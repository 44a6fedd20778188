"""The layout language: which layers each pipeline stage holds, as text such as `Et*3|(tt|)*29,m|L`.

    layout := item*
    item   := atom | atom "*" count | ","
    atom   := "E" | "t" | "m" | "L" | "|" | "(" layout ")"

E is the embedding, t a transformer layer, m a multi-token-prediction layer, L the loss; "|" begins the next
stage, which may be empty; a count is digits, and 0 drops the item. Commas only separate. A group in
parentheses needs a count, may hold "|" and other groups, and must not be empty. Whitespace is an error, and
so is a count after a count.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

MAX_ITEMS = 1_000_000  # layers and stage borders


class LayerType(Enum):
    """The type of a layer; in the layout language `E` (embedding), `L` (loss), `t` (decoder), `m`
    (multi-token prediction).
    """

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5


SYMBOLS = {"E": LayerType.embedding, "L": LayerType.loss, "t": LayerType.decoder, "m": LayerType.mtp}
_BORDER = "|"


class LayoutError(ValueError):
    """A layout cannot be read or is not valid. `position` is the index of the character, or None."""

    def __init__(self, problem: str, text: str | None = None, position: int | None = None):
        if text is not None and position is not None:
            start, end = max(0, position - 60), position + 40  # the surroundings in a long text
            problem = (
                f"{problem}, at position {position}:\n  {text[start:end]}\n  {' ' * (position - start)}^"
            )
        super().__init__(problem)
        self.position = position


class Layer(NamedTuple):
    """A layer of a stage, and the index of its character in the text."""

    type: LayerType
    position: int | None


def parse_layout(text: str) -> list[list[Layer]]:
    """The layers of each stage. Raises LayoutError."""
    stages: list[list[Layer]] = [[]]
    for symbol, position in _Parser(text).layout(is_group=False):
        if symbol == _BORDER:
            stages.append([])
        else:
            stages[-1].append(Layer(SYMBOLS[symbol], position))
    return stages


class _Parser:
    """Recursive descent; a result is a list of (character, position) with all repetitions written out."""

    def __init__(self, text: str):
        self._text = text
        self._next = 0

    def _peek(self) -> str:
        return self._text[self._next : self._next + 1]

    def _error(self, problem: str, position: int) -> LayoutError:
        return LayoutError(f"pipeline layout: {problem}", self._text, position)

    def layout(self, is_group: bool) -> list[tuple[str, int]]:
        items: list[tuple[str, int]] = []
        while (char := self._peek()) and not (is_group and char == ")"):
            start = self._next
            if char == ",":
                self._next += 1
                continue
            atom = self._atom()
            if self._peek() == "*":
                atom = self._repeated(atom)
            elif char == "(":
                raise self._error("a group needs a count, like (t|)*2", self._next - 1)
            if len(items) + len(atom) > MAX_ITEMS:
                raise self._error(f"more than {MAX_ITEMS} layers and stages", start)
            items += atom
        return items

    def _atom(self) -> list[tuple[str, int]]:
        start, char = self._next, self._peek()
        self._next += 1
        if char in SYMBOLS or char == _BORDER:
            return [(char, start)]
        if char == "(":
            group = self.layout(is_group=True)
            if self._peek() != ")":
                raise self._error("this group is not closed", start)
            if not self._text[start + 1 : self._next].strip(","):
                raise self._error("this group is empty", start)
            self._next += 1
            return group
        if char == ")":
            raise self._error("there is no group to close", start)
        if char == "*":
            raise self._error(
                "a count must follow a layer, a | or a group; a repetition is not repeated", start
            )
        if char.isspace():
            raise self._error("whitespace is not allowed", start)
        raise self._error(f"{char!r} is not one of E, t, m, L, | ( ) * and comma", start)

    def _repeated(self, atom: list[tuple[str, int]]) -> list[tuple[str, int]]:
        star = self._next
        self._next += 1
        digits = self._next
        while self._peek() and self._peek() in "0123456789":
            self._next += 1
        if self._next == digits:
            raise self._error("a count of digits must follow *", star)
        if self._next - digits > 9 or int(self._text[digits : self._next]) * len(atom) > MAX_ITEMS:
            raise self._error(f"more than {MAX_ITEMS} layers and stages", digits)
        return atom * int(self._text[digits : self._next])
