"""Walk a script's commands: through conditions, loops, functions and groups.

In: its text. Out: each simple command's words, and what else may change a variable, with what is open.

Bash's grammar as far as it tells one command from the next, and whether one is run, once, by this shell; what is not
understood is an error at its line. Says of no command what it does.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from bpipe.launch.bash_words import NAME, ShellWord, Text, Words

# What stands where a command may begin, and is none; nothing at the script's end.
_TOKEN = re.compile(
    r"(?:if|then|elif|else|fi|while|until|do|done|for|case|esac|function|time|[{}!]|\[\[)(?=[ \t\n;|&<>()]|\Z)|"
    r";;&|;;|;&|&&|\|\||&(?!>)|[;|()]|\Z"
)
_RESERVED = frozenset(["if", "then", "elif", "else", "fi", "while", "until", "do", "done", "for", "case", "esac"])
_RESERVED |= {"function", "time", "{", "}", "!", "[["}
_SEPARATOR = re.compile(r"&&|\|\||\|&|[\n;|]|&|\Z")
_JOINS = ("&&", "||", "|", "|&")
_CASE_ENDS = (";;", ";&", ";;&")
_END = re.compile(r"[\n;|)]|&(?!>)|\Z")
_IN = re.compile(r"in(?=[ \t\n;])")
_NO_ARGUMENTS = re.compile(r"\([ \t]*\)")
_CLOSES = (*_CASE_ENDS, ")", "then", "elif", "else", "fi", "do", "done", "esac", "}")
_DESCRIPTOR = re.compile(r"[0-9]+(?=[<>](?!\())")
_OPERATORS = re.compile("[;|&<>()]+")
_DEEPEST = 100


@dataclass(frozen=True, slots=True)
class Found:
    """Find in a script: a "command", a "word" of none, a "sum" or a "test", a "loop" by its variable, or a "function".

    `inside` are what is open, each a loop, a function or another. `once`: it is run, once, by this shell.
    """

    kind: str
    line: int
    words: Sequence[ShellWord] = ()
    text: str = ""
    inside: tuple[str, ...] = ()
    once: bool = False


Finds = Iterator[Found]


class Commands(Words):
    """Reads the commands of a text, which stands `inside` of what is open already."""

    def __init__(self, text: str, line: int | None = None, inside: tuple[str, ...] = ()) -> None:
        super().__init__(text, line)
        self._inside, self._ended_by = inside, ""

    def read(self) -> Finds:
        """Find every command, in order."""
        return self._block("")

    def pass_commands(self) -> None:
        if self._here:
            self.fail("a command in brackets behind a here-document in one line is not read")
        self.passed += 1
        deque(self._block(")"), maxlen=0)
        self.passed -= 1

    def _found(self, kind: str, words: Sequence[ShellWord] = (), text: str = "", line: int = 0) -> Found:
        return Found(kind, line or self.line(), words, text, self._inside)

    def _block(self, *ends: str, kind: str | None = None) -> Finds:
        """Read commands up to what is one of `ends`, and pass it. `kind`: what they stand in."""
        before, self._inside = self._inside, self._inside if kind is None else (*self._inside, kind)
        if len(self._inside) > _DEEPEST:
            self.fail(f"conditions and loops are nested more than {_DEEPEST} deep")
        while True:
            token = self._next_token()
            if token is not None and token in ends:
                break
            if token == "":
                self.fail(f"the script ends before {ends[-1]}")
            yield from self._list()
        if not token and self._here:
            self.fail(f"the here-document up to {self._here[0][0]} has no end")
        self.at += len(token)
        self._inside, self._ended_by = before, token

    def _next_token(self) -> str | None:
        self.skip(lines=True)
        return self._token()

    def _pass(self, char: str) -> None:
        """Pass a character, if it is the next."""
        if self.skip() == char:
            self.at += 1

    def _token(self) -> str | None:
        match = _TOKEN.match(self.text, self.at)
        return None if match is None else match[0]

    def _list(self) -> Finds:
        """Read commands that are joined, up to the end of a line or a ;."""
        once, separator = not self._inside, _JOINS[0]
        while separator in _JOINS:
            token = self._next_token()
            while token is not None and token in ("!", "time"):
                once, self.at = False, self.at + len(token)
                if self.skip() == "-":
                    self.fail("time with an option is not read: leave the option out")
                token = self._token()
            words, line = list[ShellWord](), self.line()
            yield from self._simple(words) if token is None else self._compound(token)
            self.skip()
            is_last = self._token() in _CLOSES
            found = "" if is_last else self.pass_operator(_SEPARATOR)
            if found is None:
                self.fail(f"{self.shown()} follows the end of a condition, a loop or a group")
            separator = found
            once = once and separator in ("\n", ";", "")
            if words:
                yield Found("command", line, words, inside=self._inside, once=once)
            if separator == "\n":
                self.pass_here_documents()

    def _simple(self, words: list[ShellWord]) -> Finds:
        """Read a simple command's words, or the function that they name."""
        while True:
            char = self.skip()
            if _END.match(self.text, self.at):
                break
            self.pass_operator(_DESCRIPTOR)
            if (target := self.redirection()) is not None:
                yield self._found("word", [target])
            elif char == "(":
                if len(words) != 1 or not self.pass_operator(_NO_ARGUMENTS):
                    self.fail("a bracket must be quoted")
                yield from self._function(words.pop().literal)
                return
            else:
                words.append(self.word())
                literal = words[-1].literal or ""
                if self.text.startswith(("<", ">"), self.at) and re.fullmatch(rf"[0-9]+|\{{{NAME}\}}", literal):
                    self.fail(f"{literal} before a redirection may set a variable: leave it out")
        if words and words[0].literal in _RESERVED:
            self.fail(f"{words[0].literal} is unexpected")

    def _compound(self, token: str) -> Finds:
        """Read what begins with a reserved word or a bracket, and the redirections behind it."""
        if token not in _COMPOUNDS:
            self.fail(f"{token or 'the end'} is unexpected")
        self.at += len(token)
        yield from _COMPOUNDS[token](self)
        while True:
            self.skip()
            self.pass_operator(_DESCRIPTOR)
            if (target := self.redirection()) is None:
                break
            yield self._found("word", [target])

    def _if(self) -> Finds:
        self._ended_by = "elif"
        while self._ended_by == "elif":
            yield from self._block("then", kind="")
            yield from self._block("elif", "else", "fi", kind="")
        if self._ended_by == "else":
            yield from self._block("fi", kind="")

    def _while(self) -> Finds:
        return self._twice(chain(self._block("do", kind="loop"), self._block("done", kind="loop")))

    def _twice(self, rounds: Finds) -> Finds:
        """Find what stands in a loop twice: in the next round its variables may hold what is set behind."""
        found = list(rounds)
        yield from found
        if "loop" not in self._inside:
            yield from found

    def _for(self) -> Finds:
        if self.skip() == "(":
            for name in re.findall(NAME, self._sum("for ((...))")):
                yield self._found("sum", text=name)
                yield self._found("loop", text=name)
        else:
            name = self.word().literal or ""
            if not re.fullmatch(NAME, name):
                self.fail("for without a name")
            words, line = list[ShellWord](), self.line()
            self.skip(lines=True)
            if self.pass_operator(_IN):
                while self.skip() not in ("", *"\n;"):
                    words.append(self.word())
            yield self._found("loop", words, name, line)
        self._pass(";")
        if self._next_token() != "do":
            self.fail(f"{self.shown()!r} stands where do must")
        self.at += 2
        yield from self._twice(self._block("done", kind="loop"))

    def _case(self) -> Finds:
        self.skip()
        yield self._found("word", [self.word()])
        self.skip(lines=True)
        if not self.pass_operator(_IN):
            self.fail("case without in")
        self._ended_by = ";;"
        while self._ended_by != "esac":
            if self._next_token() == "esac":
                self.at += len("esac")
                return
            self._pass("(")
            while self.skip() not in ("", ")"):
                yield self._found("word", [self.word()])
                self._pass("|")
            self.at += 1
            yield from self._block(*_CASE_ENDS, "esac", kind="")

    def _condition(self) -> Finds:
        words = list[ShellWord]()
        while not words or words[-1].literal != "]]":
            if not self.skip(lines=True):
                self.fail("[[ is not closed")
            operator = self.pass_operator(_OPERATORS)
            words.append(ShellWord(self.line(), (Text(operator, False),)) if operator else self.word())
        yield self._found("test", words[:-1])

    def _bracket(self) -> Finds:
        if self.text.startswith("(", self.at):
            self.at -= 1
            yield self._found("sum", text=self._sum("((...))"))
        else:
            yield from self._block(")", kind="")

    def _group(self) -> Finds:
        return self._block("}", kind="")

    def _sum(self, shown: str) -> str:
        """Return the text of arithmetic that begins here."""
        start = self.at + 2
        if not self.text.startswith("((", self.at):
            self.fail(f"{shown} is not understood")
        self.sum_of(start)
        return self.text[start : self.at - 2]

    def _named(self) -> Finds:
        self.skip()
        name = self.word().literal
        self.skip()
        self.pass_operator(_NO_ARGUMENTS)
        return self._function(name)

    def _function(self, name: str | None) -> Finds:
        """Read a function, from what follows its name and brackets."""
        token = self._next_token()
        if name is None or token not in ("{", "(") or self.text.startswith("((", self.at):
            self.fail(f"the function {name or 'without a plain name'} must have its commands in {{ }}")
        yield self._found("function", text=name)
        self._inside, before = (*self._inside, "function"), self._inside
        yield from self._compound(token)
        self._inside = before


_COMPOUNDS: dict[str, Callable[[Commands], Finds]] = {
    "if": Commands._if,
    "while": Commands._while,
    "until": Commands._while,
    "for": Commands._for,
    "case": Commands._case,
    "function": Commands._named,
    "[[": Commands._condition,
    "(": Commands._bracket,
    "{": Commands._group,
}
