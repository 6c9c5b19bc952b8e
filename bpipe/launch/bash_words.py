"""Cut a bash script into words, operators and redirections.

In: its text. Out: tokens, one by one. Runs nothing, knows no variable's value.

What is cut is what bash cuts, or a ValueError with the line: a construct that is not listed here is refused, never
passed over. What stands in a word and only running the script would tell (a command's output, `${NAME%.*}`) is an
`Opaque` part of it, as long as it changes no variable. Every character is looked at a bounded number of times.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NoReturn

from bpipe.launch.bash_parts import (
    ASSIGNMENT,
    NAME,
    Arithmetic,
    Opaque,
    Operator,
    Part,
    Redirection,
    Reference,
    ShellWord,
    Text,
    Token,
)

MOST_CHARACTERS = 1_000_000
_CLOSES = {"(": ")", "{": "}", "`": "`"}
# Brackets and quotes inside of each other.
_DEEPEST = 40

_BLANKS = " \t"
_ENDS = " \t\n;|&<>()"
_PLAIN = re.compile(r"[^ \t\n;|&<>()\\'\"`$]+")
# Inside of ${NAME:-...} blanks and operators are characters as any.
_BRACED_PLAIN = re.compile(r"[^<>\\'\"`$}]+")
_QUOTED_PLAIN = re.compile(r'[^\\"`$}]+')
_OPERATOR = re.compile(r"&&|\|\||\|&|;;&|;;|;&|[\n;|()]|&(?!>)")
_REDIRECTION = re.compile(r"&>>|&>|<<<|<<-?|<>|>>|>&|<&|>\||<(?!\()|>(?!\()")
_REFERENCE = re.compile(rf"({NAME}|[0-9]+|[@*#?$!-])(\[[@*]\])?(:?[-+=?]|(?=\}}))", re.DOTALL)
_SHORT = re.compile(rf"{NAME}|[0-9@*#?$!-]")
# Forms of ${...} that change no variable, whatever the variables hold. Others are refused: a subscript or an offset is
# arithmetic.
_PASSIVE = re.compile(
    rf"\#({NAME}|[@*#?]|[0-9]+)?(\[[@*]\])?|!{NAME}(\[[@*]\]|[@*])|({NAME}|[0-9@*]+)\[[0-9]+\]|"
    rf"({NAME}|[0-9]+|[@*])(\[([@*]|[0-9]+)\])?([%#/^,].*|:[ ]?-?[0-9]+(:-?[0-9]+)?)",
    re.DOTALL,
)
_CHANGES = re.compile(r"\$\(\(|\$\[|\$\{[^}]*=")
_HERE_END = re.compile(r"[ \t]*(?:'([^'\n]*)'|\"([^\"\n$`\\]*)\"|([A-Za-z0-9_.+-]+)(?=[ \t\n;|&<>)]|$))")
_HERE_INSIDE = re.compile(r"<<-?[ \t]*['\"\\A-Za-z_]")


class Scanner:
    """Splits text into tokens. `line`: where the text stands in a script; without it lines are counted."""

    def __init__(self, text: str, line: int | None = None, depth: int = 0) -> None:
        if len(text) > MOST_CHARACTERS:
            raise ValueError(
                f"it has more than {MOST_CHARACTERS} characters, more than any launch: name the script that starts "
                "the training"
            )
        self._text, self._line, self._depth = text, line, depth
        self._at = 0
        self._starts = [0, *(found.end() for found in re.finditer("\n", text))] if line is None else []
        self._here: list[tuple[str, bool, bool]] = []

    def line(self, at: int | None = None) -> int:
        return self._line if self._line is not None else bisect_right(self._starts, self._at if at is None else at)

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise ValueError(f"line {self.line(at)}: {message}")

    def next(self) -> Token | None:
        """Return the next token; None at the end."""
        self._skip_blanks()
        text, line = self._text, self.line()
        if self._at >= len(text):
            if self._here:
                self.fail(f"the here-document up to {self._here[0][0]} has no end")
            return None
        if match := _REDIRECTION.match(text, self._at):
            return self._redirection(match[0])
        if match := _OPERATOR.match(text, self._at):
            self._at = match.end()
            self._refuse_split_operator()
            if match[0] == "\n":
                self._skip_here_documents()
            return Operator(line, match[0])
        word = self._word()
        after = text[self._at : self._at + 1]
        name = word.literal
        if after in ("<", ">") and name is not None and text[self._at : self._at + 2] not in ("<(", ">("):
            if name.isdecimal():
                match = _REDIRECTION.match(text, self._at)
                assert match is not None
                return self._redirection(match[0])
            if re.fullmatch(rf"\{{{NAME}\}}", name):
                self.fail(f"{name}{after} sets a variable to a file descriptor: leave it out")
        return word

    def next_is(self, text: str) -> bool:
        """Return whether this follows at once."""
        return self._text.startswith(text, self._at)

    def arithmetic_command(self) -> str:
        """Return the text of `((...))`, whose first bracket has been read."""
        start = self._at
        end = self._closing(start)
        if self._text[end + 1 : end + 2] != ")":
            self.fail("(( is not closed by )), so bash reads it as nested brackets: put a space between them", start)
        self._at = end + 2
        return self._text[start + 1 : end]

    def condition_word(self) -> ShellWord:
        """Return the next word inside of `[[ ... ]]`, where operators are words, too."""
        self._skip_blanks(newlines=True)
        if self._at >= len(self._text):
            self.fail("[[ is not closed")
        if match := re.compile(r"[;|&<>()]+").match(self._text, self._at):
            self._at = match.end()
            return ShellWord(self.line(), (Text(match[0], False),))
        return self._word()

    # -- pieces
    # ------------------------------------------------------------------------------------------------------------------

    def _skip_blanks(self, newlines: bool = False) -> None:
        text = self._text
        while self._at < len(text):
            if text[self._at] in _BLANKS or (newlines and text[self._at] == "\n"):
                self._at += 1
            elif text.startswith("\\\n", self._at):
                self._at += 2
            elif text[self._at] == "#" and (self._at == 0 or text[self._at - 1] in _ENDS):
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            else:
                return

    def _refuse_split_operator(self) -> None:
        if self._text.startswith("\\\n", self._at) and self._text[self._at + 2 : self._at + 3] in tuple("&|;<>()"):
            self.fail("an operator continues on the next line: write it on one line")

    def _redirection(self, operator: str) -> Redirection:
        line = self.line()
        self._at += len(operator)
        self._refuse_split_operator()
        if operator in ("<<", "<<-"):
            match = _HERE_END.match(self._text, self._at)
            if match is None:
                self.fail("a here-document's end must be a word, plain or in quotes")
            self._at = match.end()
            end = next(one for one in match.groups() if one is not None)
            self._here.append((end, operator == "<<-", match[3] is None))
            return Redirection(line, ShellWord(line, ()))
        self._skip_blanks()
        if self._at >= len(self._text) or (
            self._text[self._at] in _ENDS and not self._text.startswith(("<(", ">("), self._at)
        ):
            self.fail(f"nothing follows {operator}")
        return Redirection(line, self._word())

    def _skip_here_documents(self) -> None:
        for end, stripped, quoted in self._here:
            start, before = self._at, ""
            while True:
                stop = self._text.find("\n", self._at)
                row = self._text[self._at : len(self._text) if stop < 0 else stop]
                if (row.lstrip("\t") if stripped else row) == end:
                    if before.endswith("\\") and not quoted:
                        self.fail("a here-document's last line continues into its end: put the end in quotes")
                    break
                if stop < 0:
                    self.fail(f"the here-document up to {end} has no end", start)
                if not quoted and _CHANGES.search(row):
                    self.fail("a here-document that may change a variable is not read: put its end in quotes")
                before, self._at = row, stop + 1
            self._at = len(self._text) if stop < 0 else stop + 1
        self._here = []

    def _word(self) -> ShellWord:
        line, start = self.line(), self._at
        match = ASSIGNMENT.match(self._text, self._at)
        if match is not None and self._text.startswith("(", match.end()):
            return self._array(line, match)
        parts = self._parts("")
        if self._at == start:
            self.fail(f"{self._text[start]!r} is not understood here")
        if self._text.startswith("(", self._at) and any(
            one for one in parts if not isinstance(one, Text) or one.quoted
        ):
            self.fail("a bracket in a word must be quoted")
        return ShellWord(line, parts)

    def _array(self, line: int, match: re.Match[str]) -> ShellWord:
        self._at = match.end() + 1
        elements: list[ShellWord] = []
        while True:
            self._skip_blanks(newlines=True)
            if self._at >= len(self._text):
                self.fail(f"{match[0]}( is not closed", match.start())
            if self._text[self._at] == ")":
                self._at += 1
                return ShellWord(line, (Text(match[0], False),), tuple(elements))
            if self._text[self._at] in ";|&<>(":
                self.fail(f"{self._text[self._at]} in an array must be quoted")
            if self._text[self._at] == "[":
                self.fail("an array with a word that begins with [ is not read: quote the word")
            elements.append(self._word())

    def _parts(self, closing: str) -> tuple[Part, ...]:
        """Of what is not quoted, up to the end of the word or to `closing`, which is a } and is passed."""
        parts: list[Part] = []
        text, start = self._text, self._at
        self._deepen()
        while self._goes_on(closing):
            at = self._at
            self._unquoted(parts, closing)
            if self._at > len(text) or (closing and self._at >= len(text)):
                self.fail(f"{text[at if not closing else start : start + 30].splitlines()[0][:20]} is not closed", at)
        self._at += bool(closing)
        self._depth -= 1
        return tuple(parts)

    def _deepen(self) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            self.fail(f"quotes and brackets are nested more than {_DEEPEST} deep")

    def _goes_on(self, closing: str) -> bool:
        """Return whether the word goes on, or what stands before `closing`."""
        text, at = self._text, self._at
        if at >= len(text) or closing:
            return text[at : at + 1] not in ("", closing)
        return text[at] not in _ENDS or text.startswith(("<(", ">("), at)

    def _unquoted(self, parts: list[Part], closing: str) -> None:
        """Add what stands next, outside of quotes."""
        text, at = self._text, self._at
        char = text[at]
        if match := (_BRACED_PLAIN if closing else _PLAIN).match(text, at):
            self._at = match.end()
            _append(parts, match[0])
        elif char == "\\":
            self._at += 2
            if text[at + 1 : at + 2] != "\n":
                parts.append(Text(text[at + 1 : at + 2], True))
        elif char == "'":
            end = text.find("'", at + 1)
            self._at = (len(text) if end < 0 else end) + 1
            parts.append(Text(text[at + 1 : self._at - 1], True))
        elif char == '"':
            self._at += 1
            parts += self._double_quoted('"')
        elif char in "$`":
            parts.append(self._expansion(False))
        elif char in "<>" and text.startswith("(", at + 1):
            self._at = self._closing(at + 1) + 1
            parts.append(Opaque(text[at : self._at], False))
        else:
            self._at += 1
            _append(parts, char)

    def _double_quoted(self, closing: str) -> tuple[Part, ...]:
        """Up to `closing`, a quote or the } of a quoted ${...}, which is passed."""
        parts: list[Part] = []
        text, start = self._text, self._at
        self._deepen()
        while (char := text[self._at : self._at + 1]) not in ("", closing):
            parts += self._quoted(char, closing)
        if not char:
            self.fail(f"{text[start - 1 : start + 19].splitlines()[0]} is not closed", start - 1)
        self._at += 1
        self._depth -= 1
        # `"$@"` without arguments is no word, where `""` is an empty one.
        every = any(isinstance(one, Reference) and one.every == "@" and not one.operator for one in parts)
        return tuple(parts) if every or closing == "}" else (Text("", True), *parts)

    def _quoted(self, char: str, closing: str) -> tuple[Part, ...]:
        """Return what stands next, in quotes."""
        text, at = self._text, self._at
        if char == '"':
            self.fail('quotes inside "${...}" are not read: leave the inner ones out')
        if char in "$`":
            return (self._expansion(True),)
        if char == "\\":
            self._at += 2
            after = text[at + 1 : at + 2]
            is_escaped = after in ('"', "\\", "$", "`", closing)
            return () if after == "\n" else (Text(after if is_escaped else char + after, True),)
        match = _QUOTED_PLAIN.match(text, at)
        self._at = at + 1 if match is None else match.end()
        return (Text(text[at : self._at], True),)

    def _expansion(self, quoted: bool) -> Part:
        """What begins with a $ or a backquote."""
        text, at = self._text, self._at
        if text[at] == "`" or text.startswith("$(", at):
            end = self._closing(at if text[at] == "`" else at + 1)
            self._at = end + 1
            if text.startswith("$((", at) and text[end - 1] == ")":
                return Arithmetic(self._inside(text[at + 3 : end - 1], at), quoted)
            return Opaque(text[at : end + 1], quoted)
        if text.startswith("${", at):
            return self._braced(quoted)
        if text.startswith("$[", at) or (not quoted and text.startswith(("$'", '$"'), at)):
            self.fail(f"{text[at : at + 2]} is not read: write plain quotes, or $((...))")
        return self._short(quoted)

    def _short(self, quoted: bool) -> Part:
        """A $NAME without braces, or a $ that is a character."""
        text, at = self._text, self._at
        match = _SHORT.match(text, at + 1)
        self._at = at + 1 if match is None else match.end()
        if text.startswith("\\\n", self._at) and re.match("[A-Za-z0-9_{('\"]", text[self._at + 2 : self._at + 3]):
            self.fail("a name continues on the next line: write it on one line")
        if match is None:
            if not quoted:
                self.fail("a lone $ is not read: put it in quotes")
            return Text("$", quoted)
        every = match[0] if match[0] in "@*" else ""
        return Reference(match[0], every, "", ShellWord(self.line(at), ()), quoted)

    def _braced(self, quoted: bool) -> Part:
        text, at = self._text, self._at
        match = _REFERENCE.match(text, at + 2)
        if match is not None and match[1] not in ("#", "?", "$", "!", "-"):
            self._at = match.end()
            parts = self._double_quoted("}") if quoted else self._parts("}")
            name, every = match[1], match[1] if match[1] in "@*" else (match[2] or "")[1:2]
            return Reference(name, every, match[3], ShellWord(self.line(at), parts), quoted)
        end = self._closing(at + 1)
        inner = text[at + 2 : end]
        if not _PASSIVE.fullmatch(inner) or _CHANGES.search(inner):
            self.fail(f"${{{inner[:40]}}} is not understood: write its value, or --set the variable that takes it")
        self._at = end + 1
        return Opaque(text[at : end + 1], quoted)

    def _inside(self, text: str, at: int) -> ShellWord:
        """Arithmetic's text, as if it stood in quotes."""
        line = self.line(at)
        if '"' in text:
            self.fail("quotes in $((...)) are not read: leave them out", at)
        return ShellWord(line, Scanner(text + '"', line, self._depth + 1)._double_quoted('"'))

    def _closing(self, at: int) -> int:
        """Where the bracket or backquote at `at` is closed."""
        text, begin = self._text, at
        stack = [_CLOSES[text[at]]]
        at += 1
        while at < len(text):
            top, char = stack[-1], text[at]
            if len(stack) > _DEEPEST:
                self.fail(f"quotes and brackets are nested more than {_DEEPEST} deep", begin)
            if char == top[0]:
                stack.pop()
                if not stack:
                    return at
                at += 1
            else:
                at = self._pass(at, char, top, stack)
        return self.fail(f"{text[max(0, begin - 1) : begin + 19].splitlines()[0]} is not closed", begin)

    def _pass(self, at: int, char: str, top: str, stack: list[str]) -> int:
        """Where what follows begins; what is opened at `at` is on the stack then."""
        text = self._text
        if char == "\\":
            return at + 2
        if top == "`":
            return at + 1
        if char in '"`':
            stack.append(char)
        elif text.startswith(("$(", "${"), at):
            # Of a quoted ${...} a single quote is a character as any.
            stack.append(")" if text[at + 1] == "(" else '}"' if top[-1] == '"' else "}")
            return at + 2
        elif char == "'" and top in (")", "}"):
            if text[at - 1] == "$":
                self.fail("$' is not read: write plain quotes", at)
            return (text.find("'", at + 1) + 1) or len(text)
        elif top == ")":
            return self._pass_in_brackets(at, char, stack)
        return at + 1

    def _pass_in_brackets(self, at: int, char: str, stack: list[str]) -> int:
        """Where what follows begins inside of a command's brackets."""
        if char == "(":
            stack.append(")")
        elif char == "#" and self._text[at - 1] in _ENDS:
            end = self._text.find("\n", at)
            return len(self._text) if end < 0 else end
        elif self._is_intricate(at):
            self.fail("a case or a here-document inside $(...) is not read", at)
        return at + 1

    def _is_intricate(self, at: int) -> bool:
        text = self._text
        if text[at] == "<":
            return _HERE_INSIDE.match(text, at) is not None and text[at - 1] != "<" and not text.startswith("<<<", at)
        return text.startswith("case", at) and text[at - 1] in _ENDS and text[at + 4 : at + 5] in tuple(_BLANKS)


def _append(parts: list[Part], text: str) -> None:
    last = parts[-1] if parts else None
    if isinstance(last, Text) and not last.quoted:
        parts[-1] = Text(last.text + text, False)
    else:
        parts.append(Text(text, False))
