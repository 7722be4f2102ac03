"""Regular expressions out of strangers' configs, matched in bounded time.

Python's `re` tries every way through a pattern, and a config can hold one that takes years on a name of forty letters.
Here all ways are followed at once, as the set of places in the name where one could be, so the work grows with pattern
and name, and a count ends it where it grows too far. Understood is what configs use: letters, sets, `.`, groups,
alternatives, repetition, anchors, lookahead, `(?i)`. Back references and lookbehind are refused.
"""

from __future__ import annotations

import re
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from spearfish.errors import FormatError

MAX_STEPS = 200_000  # for one name, over all patterns of a config: some 50 ms
MAX_LENGTH = 10_000  # letters of one pattern
MAX_DEPTH = 50


class Budget:
    """Steps that are left for one name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.left = MAX_STEPS

    def spend(self, steps: int) -> None:
        """Raise FormatError when nothing is left."""
        self.left -= steps
        if self.left < 0:
            raise FormatError(f"{self.name[:100]}: the patterns in the config take too long to match; simplify them")


class Pattern:
    """A compiled pattern. Raises FormatError for what is no regular expression, or one of a kind that is refused."""

    def __init__(self, text: str, where: str = "config.json") -> None:
        self.text = text
        if len(text) > MAX_LENGTH:
            raise FormatError(f"{where}: a pattern of {len(text)} letters; at most {MAX_LENGTH} are read")
        try:
            tree = parser.parse(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise FormatError(f"{where}: {text[:200]!r} is not a regular expression: {error}") from error
        _check(tree, text, where)
        self._tree = tree
        self._fold = bool(tree.state.flags & re.IGNORECASE)
        if tree.state.flags & ~(re.IGNORECASE | re.UNICODE):
            raise FormatError(f"{where}: {text[:200]!r} sets flags other than (?i)")
        self._literal = _literal(tree) if not self._fold else None

    def search(self, name: str, budget: Budget) -> bool:
        """Whether the pattern matches anywhere in the name."""
        if self._literal is not None:
            budget.spend(1)
            return name == self._literal
        return bool(_ends(self._tree, set(range(len(name) + 1)), name, self._fold, budget))


class Module:
    """The module of that name, or one whose last parts it is: what a target that is no expression means."""

    def __init__(self, text: str) -> None:
        self.text = text

    def search(self, name: str, budget: Budget) -> bool:
        """Whether the name is, or ends in, the target."""
        budget.spend(1)
        return name == self.text or name.endswith(f".{self.text}")


def _literal(tree: Any) -> str | None:
    """The only name that a pattern of the kind ^name$ matches, or None. ("$" allows a line end, which no name has.)"""
    parts = list(tree)
    if len(parts) < 2 or parts[0] != (sre.AT, sre.AT_BEGINNING) or parts[-1] != (sre.AT, sre.AT_END):
        return None
    middle = parts[1:-1]
    return "".join(chr(letter) for _, letter in middle) if all(op is sre.LITERAL for op, _ in middle) else None


_SINGLE = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)
_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT)


def _check(tree: Any, text: str, where: str, depth: int = 0) -> None:
    """Raise FormatError for parts that `_ends` does not know, and for groups so deep that Python would give up."""
    if depth > MAX_DEPTH:
        raise FormatError(f"{where}: {text[:200]!r} has groups more than {MAX_DEPTH} deep")
    for op, argument in tree:
        if op is sre.BRANCH:
            inner = argument[1]
        elif op is sre.SUBPATTERN and not argument[1] and not argument[2]:
            inner = [argument[3]]
        elif op in _REPEATS:
            inner = [argument[2]]
        elif op in (sre.ASSERT, sre.ASSERT_NOT) and argument[0] == 1:
            inner = [argument[1]]
        elif op in _SINGLE or op is sre.AT:
            continue
        else:
            raise FormatError(f"{where}: {text[:200]!r} uses {str(op).lower()}, which is not read in a layer pattern")
        for part in inner:
            _check(part, text, where, depth + 1)


def _ends(tree: Any, at: set[int], name: str, fold: bool, budget: Budget) -> set[int]:
    """Where a match of the sequence `tree` can end if it begins at one of the places `at`."""
    for op, argument in tree:
        budget.spend(1 + len(at))
        if not at:
            return at
        if op in _SINGLE:
            at = {i + 1 for i in at if i < len(name) and _accepts(op, argument, name[i], fold)}
        elif op is sre.BRANCH:
            at = set().union(*(_ends(part, at, name, fold, budget) for part in argument[1]))
        elif op is sre.SUBPATTERN:
            at = _ends(argument[3], at, name, fold, budget)
        elif op in _REPEATS:
            at = _repeat(argument, at, name, fold, budget)
        elif op is sre.AT:
            at = {i for i in at if _anchored(argument, i, name)}
        else:
            wanted = op is sre.ASSERT
            at = {i for i in at if bool(_ends(argument[1], {i}, name, fold, budget)) == wanted}
    return at


def _repeat(argument: Any, at: set[int], name: str, fold: bool, budget: Budget) -> set[int]:
    least, most, body = argument
    # Each round moves every place to the right or leaves it for good, so more rounds than places change nothing.
    for _ in range(min(int(least), len(name) + 2)):
        at = _ends(body, at, name, fold, budget)
    reached = new = at
    for _ in range(min(int(most) - int(least), len(name) + 2)):
        new = _ends(body, new, name, fold, budget) - reached
        if not new:
            break
        reached = reached | new
    return reached


def _accepts(op: Any, argument: Any, letter: str, fold: bool) -> bool:
    if op is sre.ANY:
        return letter != "\n"
    letters = {letter, letter.lower(), letter.upper()} if fold else {letter}
    letters = {each for each in letters if len(each) == 1}  # "ß".upper() is two letters
    if op in (sre.LITERAL, sre.NOT_LITERAL):
        return any(ord(each) == argument for each in letters) == (op is sre.LITERAL)
    negate = argument[0][0] is sre.NEGATE
    found = any(_in_set(kind, value, each) for kind, value in argument[negate:] for each in letters)
    return found != negate


def _in_set(kind: Any, value: Any, letter: str) -> bool:
    if kind is sre.LITERAL:
        return bool(ord(letter) == value)
    if kind is sre.RANGE:
        return bool(value[0] <= ord(letter) <= value[1])
    name = str(value)
    word = letter.isalnum() or letter == "_"
    found = word if name.endswith("WORD") else letter.isdecimal() if name.endswith("DIGIT") else letter.isspace()
    return found != ("_NOT_" in name)


def _anchored(argument: Any, i: int, name: str) -> bool:
    if argument in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
        return i == 0
    if argument is sre.AT_END_STRING:
        return i == len(name)
    if argument is sre.AT_END:
        return i == len(name) or (i == len(name) - 1 and name[i] == "\n")
    if not name:
        return False  # as `re` has it
    word = [0 <= j < len(name) and (name[j].isalnum() or name[j] == "_") for j in (i - 1, i)]
    return (word[0] != word[1]) == (argument is sre.AT_BOUNDARY)
