"""Cut a bash script into words.

In: its text. Out: words, one by one, made of text and expansions. Runs nothing, knows no variable's value.

What is cut is what bash cuts, or a ValueError with the line: a construct that is not listed here is refused, never
passed over. What only running the script would tell (a command's output, `${NAME%.*}`) is an `Opaque` part of a word,
as long as it changes no variable. Knows no command: where `$(...)` ends is for who derives from it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import NoReturn

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
MOST_CHARACTERS = 1_000_000
# Quotes and brackets inside of each other.
_DEEPEST = 40
# What ends a word; no word is left of a comment.
ENDS = " \t\n;|&<>()"
_BLANKS = re.compile(r"(?:[ \t]|\\\n|(?<![^ \t\n;|&<>()])#[^\n]*)*")
_ASSIGNMENT = re.compile(rf"({NAME})(?:\[([^\]\n]*)\])?(\+?=)")
_REDIRECTION = re.compile(r"&>>|&>|<<<|<<-?|<>|>>|>&|<&|>\||<(?!\()|>(?!\()")
_REFERENCE = re.compile(rf"\$\{{({NAME}|[0-9]+|[@*])(\[[@*]\])?(:?[-+=?]|(?=\}}))")
# Forms of ${...} that change no variable, whatever the variables hold. Others are refused: a subscript or an offset is
# arithmetic.
_PASSIVE = re.compile(
    rf"\$\{{(?:[#?$!-](?=\}})|\#({NAME}|[@*#?]|[0-9]+)(\[[@*]\])?|!{NAME}(\[[@*]\]|[@*])|({NAME}|[0-9]+|[@*])"
    rf"(\[([@*]|[0-9]+)\])?(:[ ]?-?[0-9]+(:-?[0-9]+)?|(?P<pattern>[%#/^,]))|({NAME}|[0-9@*]+)\[[0-9]+\])"
)
_EXPANDED = rf"|\$(?P<short>{NAME}|[0-9@*#?$!-])|(?P<sum>\$\(\()|(?P<braced>\$\{{)|(?P<output>`(?:[^`\\]|\\.)*`|\$\()"
_BARE = r"|\\\n|\\(?P<escaped>.)|'(?P<raw>[^']*)'|(?P<quote>\")|(?P<process>[<>]\()" + _EXPANDED
# What may stand next outside of quotes, in an unquoted ${...}, in quotes, and in a quoted ${...}, by what closes it.
_PIECES = {
    "": re.compile(r"(?P<plain>[^ \t\n;|&<>()\\'\"`$]+)" + _BARE, re.DOTALL),
    "}": re.compile(r"(?P<plain>(?:[^<>\\'\"`$}]|[<>](?!\())+)" + _BARE, re.DOTALL),
    '"': re.compile(
        r'(?P<text>[^\\"`$]+|\\(?![\\"`$\n])|\$(?!\\\n|[A-Za-z0-9_{(\[@*#?$!-]))|\\\n|\\(?P<escaped>.)' + _EXPANDED,
        re.S,
    ),
    '"}': re.compile(
        r"(?P<text>[^\\\"`$}]+|\\(?![\\\"`$\n}])|\$(?!\\\n|[A-Za-z0-9_{(\[@*#?$!\"'-]))|\\\n|\\(?P<escaped>.)"
        + _EXPANDED,
        re.S,
    ),
}
_NAME_GOES_ON = re.compile(r"\\\n[A-Za-z0-9_{('\"\[]")
_OPERATOR_GOES_ON = re.compile(r"\\\n[&|;<>()]")
_HERE_END = re.compile(r"[ \t]*(?:'([^'\n]*)'|\"([^\"\n$`\\]*)\"|([A-Za-z0-9_.+-]+)(?=[ \t\n;|&<>)]|\Z))")
_CHANGES_HERE = re.compile(r"\$\(\(|\$\[|\$\{[^}]*=")


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
    otherwise: tuple[Part, ...]
    quoted: bool


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Arithmetic `$((...))`, whose text is expanded as if quoted."""

    inner: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Opaque:
    """Expansion that cannot be evaluated; `text` is its source."""

    text: str


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
        first = self.parts[0] if len(self.parts) == 1 and self.elements is None else None
        return first.text if isinstance(first, Text) and not first.quoted else None


@dataclass(frozen=True, slots=True)
class Assigned:
    """An assignment: `adds` is that of `+=`, `element` what stands in the brackets of `NAME[element]=`."""

    name: str
    element: str | None
    adds: bool
    value: ShellWord


def assigned(word: ShellWord) -> Assigned | None:
    """Return the assignment that a word is, if it is one."""
    first = word.parts[0] if word.parts else None
    text = first.text if isinstance(first, Text) and not first.quoted else ""
    match = _ASSIGNMENT.match(text)
    if match is None:
        if re.match(rf"{NAME}\[", text):
            raise ValueError(f"line {word.line}: {text} may set an element of an array: give the array as a whole")
        return None
    rest = text[match.end() :]
    parts = (*((Text(rest, False),) if rest else ()), *word.parts[1:])
    return Assigned(match[1], match[2], match[3] == "+=", ShellWord(word.line, parts, word.elements))


class Words:
    """Cuts words out of a text, from `at` on. `line`: where the text stands in a script; without it lines are counted."""

    def __init__(self, text: str, line: int | None = None) -> None:
        if len(text) > MOST_CHARACTERS:
            raise ValueError(
                f"it has more than {MOST_CHARACTERS} characters, more than any launch: name the script that starts "
                "the training"
            )
        self.text, self.at = text, 0
        self._line, self._depth = line, 0
        # How many `$(...)` are open, which change nothing.
        self.passed = 0
        self._starts = [0, *(found.end() for found in re.finditer("\n", text))] if line is None else []
        # Here-documents that begin behind this line: what ends each, whether tabs before it count, and quotes.
        self._here: list[tuple[str, bool, bool]] = []

    def pass_commands(self) -> None:
        """Pass the commands of `$(...)` or `<(...)`, whose brackets have been opened, and the bracket that closes it."""
        raise NotImplementedError

    def line(self, at: int | None = None) -> int:
        return self._line if self._line is not None else bisect_right(self._starts, self.at if at is None else at)

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise ValueError(f"line {self.line(at)}: {message}")

    def shown(self, at: int | None = None) -> str:
        at = self.at if at is None else at
        return self.text[at : at + 20].partition("\n")[0]

    def skip(self, lines: bool = False) -> str:
        """Pass what is no word, with `lines` also ends of lines; return the character that follows."""
        while True:
            match = _BLANKS.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            char = self.text[self.at : self.at + 1]
            if not lines or char != "\n":
                return char
            self.at += 1
            self.pass_here_documents()

    def pass_operator(self, operators: re.Pattern[str]) -> str | None:
        """Return which one of them stands here, and pass it; None where none does."""
        match = operators.match(self.text, self.at)
        if match is None:
            return None
        if _OPERATOR_GOES_ON.match(self.text, match.end()):
            self.fail("an operator continues on the next line: write it on one line")
        self.at = match.end()
        return match[0]

    def redirection(self) -> ShellWord | None:
        """Return what stands behind a redirection, and pass it; of a here-document nothing. None where none is."""
        start, operator = self.at, self.pass_operator(_REDIRECTION)
        if operator is None:
            return None
        if operator in ("<<", "<<-"):
            match = _HERE_END.match(self.text, self.at)
            if match is None:
                self.fail("a here-document's end must be a word, plain or in quotes")
            self.at = match.end()
            end = next(one for one in match.groups() if one is not None)
            self._here.append((end, operator == "<<-", match[3] is None))
            return ShellWord(self.line(start), ())
        self.skip()
        if not self._is_in_word():
            self.fail(f"nothing follows {operator}")
        return self.word()

    def pass_here_documents(self) -> None:
        """Pass those that begin in this line, whose predecessor announces them."""
        for end, stripped, quoted in self._here:
            start, before = self.at, ""
            while True:
                stop = self.text.find("\n", self.at)
                row = self.text[self.at : len(self.text) if stop < 0 else stop]
                if (row.lstrip("\t") if stripped else row) == end:
                    break
                if stop < 0:
                    self.fail(f"the here-document up to {end} has no end", start)
                if not quoted and _CHANGES_HERE.search(row):
                    self.fail("a here-document that may change a variable is not read: put its end in quotes")
                before, self.at = row, stop + 1
            if before.endswith("\\") and not quoted:
                self.fail("a here-document's last line continues into its end: put the end in quotes")
            self.at = len(self.text) if stop < 0 else stop + 1
        self._here = []

    def word(self) -> ShellWord:
        """Return the word that begins here, and pass it."""
        start = self.at
        match = _ASSIGNMENT.match(self.text, start)
        if match is not None and self.text.startswith("(", match.end()):
            return self._array(match)
        parts = self._parts("", "")
        if self.at == start:
            self.fail(f"{self.shown()!r} is not understood here: what is a word must be quoted")
        return ShellWord(self.line(start), parts)

    def sum_of(self, start: int) -> tuple[Part, ...]:
        """Return arithmetic's text, which begins at `start`, as if it stood in quotes; pass the brackets behind it."""
        depth, stop = 0, start
        for bracket in re.compile("[()]").finditer(self.text, start):
            depth, stop = depth + (1 if bracket[0] == "(" else -1), bracket.start()
            if depth < 0:
                break
        if depth >= 0 or self.text[stop + 1 : stop + 2] != ")":
            self.fail("(( is not closed by )), so bash reads it as nested brackets: put a space between them", start)
        if re.compile(r"[\"'\\`]").search(self.text, start, stop):
            self.fail("quotes and backslashes in ((...)) are not read: leave them out", start)
        self.at = start
        parts = self._parts('"', "", stop)
        if self.at != stop:
            self.fail(f"{self.shown(start)} is not closed", start)
        self.at += 2
        return parts

    # -- pieces
    # ------------------------------------------------------------------------------------------------------------------

    def _array(self, match: re.Match[str]) -> ShellWord:
        self.at = match.end() + 1
        elements: list[ShellWord] = []
        while (char := self.skip(lines=True)) != ")":
            if not char or self._here:
                self.fail(f"{match[0]}( is not closed", match.start())
            if char in ";|&<>(" or (char == "[" and not self.passed):
                self.fail(f"an array with a word that begins with {char} is not read: quote the word")
            elements.append(self.word())
        self.at += 1
        if self._is_in_word():
            self.fail(f"a word follows {match[0]}(...) at once")
        return ShellWord(self.line(match.start()), (Text(match[0], False),), tuple(elements))

    def _is_in_word(self) -> bool:
        char = self.text[self.at : self.at + 1]
        return char != "" and (char not in ENDS or self.text.startswith(("<(", ">("), self.at))

    def _parts(self, within: str, closing: str, stop: int | None = None) -> tuple[Part, ...]:
        """Cut up to `closing`, which is passed, or to `stop`, or to the word's end. `within`: a key of the pieces."""
        parts: list[Part] = []
        start, text, stop = self.at, self.text, len(self.text) if stop is None else stop
        self._depth += 1
        if self._depth > _DEEPEST:
            self.fail(f"quotes and brackets are nested more than {_DEEPEST} deep")
        while self.at < stop and (text[self.at] != closing if within else self._is_in_word()):
            match = _PIECES[within].match(text, self.at, stop)
            if match is None:
                if text[self.at] in "'`":
                    self.fail(f"{self.shown()} is not closed")
                self.fail(f"{text[self.at : self.at + 2].strip()} is not read here: put it in plain quotes")
            self.at = match.end()
            if match.lastgroup is not None:
                self._add(parts, match.lastgroup, match, '"' in within)
        if closing:
            if self.at >= stop:
                self.fail(f"{self.shown(start - 1)} is not closed", start - 1)
            self.at += 1
        self._depth -= 1
        return tuple(parts)

    def _add(self, parts: list[Part], kind: str, match: re.Match[str], quoted: bool) -> None:
        """Add the part that begins with what was matched, and pass the rest of it."""
        start, text = match.start(), match[kind]
        if kind == "plain":
            last = parts[-1] if parts else None
            if isinstance(last, Text) and not last.quoted:
                text = last.text + text
                parts.pop()
            parts.append(Text(text, False))
        elif kind in ("text", "escaped", "raw"):
            parts.append(Text(text, True))
        elif kind == "quote":
            parts += self._quoted()
        else:
            parts.append(self._expansion(kind, text, start, quoted))

    def _quoted(self) -> tuple[Part, ...]:
        inner = self._parts('"', '"')
        # `"$@"` without arguments is no word, where `""` is an empty one.
        every = any(isinstance(one, Reference) and one.every == "@" and not one.operator for one in inner)
        return inner if every else (Text("", True), *inner)

    def _expansion(self, kind: str, text: str, start: int, quoted: bool) -> Part:
        if kind == "short":
            if _NAME_GOES_ON.match(self.text, self.at):
                self.fail("a name continues on the next line: write it on one line")
            return Reference(text, text if text in "@*" else "", "", (), quoted)
        if kind == "braced":
            return self._braced(start, quoted)
        if kind == "sum":
            return Arithmetic(self.sum_of(self.at))
        if text[0] != "`":
            self.pass_commands()
        return Opaque(self.text[start : self.at])

    def _braced(self, start: int, quoted: bool) -> Part:
        within, match = '"}' if quoted else "}", _REFERENCE.match(self.text, start)
        if match is None:
            return self._opaque(start, within)
        self.at = match.end()
        every = match[1] if match[1] in "@*" else (match[2] or "")[1:2]
        return Reference(match[1], every, match[3], self._parts(within, "}"), quoted)

    def _opaque(self, start: int, within: str) -> Opaque:
        match = _PASSIVE.match(self.text, start)
        self.at = start + 2 if match is None else match.end()
        is_pattern = match is not None and match["pattern"] is not None
        # In a pattern quotes are quotes, also where all of it stands in quotes.
        inner = self._parts("}" if is_pattern else within, "}")
        source = self.text[start : self.at]
        is_odd = match is None or (within != "}" and re.search(r"(?<!\\)'", source))
        if not self.passed and (is_odd or (inner and not is_pattern) or any(map(_changes, inner))):
            self.fail(f"{source[:40]} is not understood: write its value, or --set the variable that takes it", start)
        return Opaque(source)


def _changes(part: Part) -> bool:
    """Return whether expanding it may set a variable."""
    if isinstance(part, Reference):
        return "=" in part.operator or any(map(_changes, part.otherwise))
    return isinstance(part, Arithmetic)
