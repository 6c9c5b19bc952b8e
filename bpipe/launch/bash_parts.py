"""Say what bash's words are made of.

In: nothing. Out: frozen values: words, their parts, operators, redirections, assignments.

Knows no text of a script, and no variable's value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ASSIGNMENT = re.compile(rf"({NAME})(\[[^\]\n]*\])?(\+?=)")


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference `$NAME`; `every` is "@" or "*" for all of an array.

    `operator` is that of `${NAME:-otherwise}`, or empty.
    """

    name: str
    every: str
    operator: str
    otherwise: ShellWord
    quoted: bool


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Arithmetic `$((...))`, whose text is expanded as if quoted."""

    inner: ShellWord
    quoted: bool


@dataclass(frozen=True, slots=True)
class Opaque:
    """Text that cannot be evaluated; `text` is its source."""

    text: str
    quoted: bool


Part = Text | Reference | Arithmetic | Opaque


@dataclass(frozen=True, slots=True)
class ShellWord:
    """A word of a command. `elements` are the words of an array, where the word is `NAME=(...)`."""

    line: int
    parts: tuple[Part, ...]
    elements: tuple[ShellWord, ...] | None = None

    @property
    def literal(self) -> str | None:
        """Text of the word, where nothing in it is quoted or expanded."""
        if (
            self.elements is None
            and len(self.parts) == 1
            and isinstance(self.parts[0], Text)
            and not self.parts[0].quoted
        ):
            return self.parts[0].text
        return None


@dataclass(frozen=True, slots=True)
class Operator:
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Redirection:
    """A redirection. `target` is what follows; of a here-document nothing."""

    line: int
    target: ShellWord


Token = ShellWord | Operator | Redirection


@dataclass(frozen=True, slots=True)
class Assigned:
    """An assignment: `adds` is that of `+=`."""

    name: str
    adds: bool
    value: ShellWord


def assigned(word: ShellWord) -> Assigned | None:
    """Return the assignment that a word is, if it is one. Raises ValueError for one of an array's single element."""
    first = word.parts[0] if word.parts else None
    match = ASSIGNMENT.match(first.text) if isinstance(first, Text) and not first.quoted else None
    if match is None:
        return None
    if match[2] is not None:
        raise ValueError(
            f"line {word.line}: {match[0]} sets one element of an array, which is not read: give the array as a whole"
        )
    assert isinstance(first, Text)
    rest = first.text[match.end() :]
    parts = (*((Text(rest, False),) if rest else ()), *word.parts[1:])
    return Assigned(match[1], match[3] == "+=", ShellWord(word.line, parts, word.elements))
