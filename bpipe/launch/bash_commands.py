"""Walk a script's commands: through conditions, loops, functions and groups.

In: a scanner. Out: each simple command, with what is open.

Bash's grammar as far as it tells one command from the next, and whether one is run, once, by this shell; what is not
understood is an error at its line. Says of no command what it does: that is for who derives from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bpipe.launch.bash_parts import NAME, Operator, Redirection, ShellWord
from bpipe.launch.bash_values import Variables
from bpipe.launch.bash_words import Scanner

_OPENS = {"if": "fi", "while": "done", "until": "done", "{": "}"}
_INSIDE = {"then": "fi", "elif": "fi", "else": "fi", "do": "done"}
_CASE_ENDS = (";;", ";&", ";;&")
_DEEPEST = 100


@dataclass(slots=True)
class _Place:
    """Where reading is: behind the operator `before` and `words`.

    `closed`: behind what ends a condition, a loop or a group. `odd`: behind `!` or `time`.
    """

    before: str = "\n"
    words: list[ShellWord] = field(default_factory=list)
    closed: bool = False
    odd: bool = False
    is_over: bool = False


class Commands:
    """Reads commands. `open` holds the words that close what is open, each with what it is: a loop, a function, or
    another."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self.open: list[tuple[str, str]] = []
        self.functions: set[str] = set()
        self.ended = False
        self._defines = False

    def simple(self, words: Sequence[ShellWord], definite: bool) -> None:
        """Handle one command. `definite`: it runs, once, in this shell."""
        raise NotImplementedError

    def is_inside(self, kind: str) -> bool:
        return any(one == kind for _, one in self.open)

    @contextmanager
    def opened(self, what: str) -> Iterator[None]:
        """Mark what is read meanwhile as part of something that may not run."""
        self.open.append((what, ""))
        yield
        self.open.pop()

    def read(self, scanner: Scanner) -> None:
        """Read every command of a text, while assignments take effect."""
        base, at = len(self.open), _Place()
        while not self.ended and not at.is_over:
            token = scanner.next()
            if isinstance(token, Redirection):
                self.variables.fields(token.target)
            elif isinstance(token, ShellWord):
                self._word(scanner, token, at)
            elif token is not None and token.text == "(":
                at.closed = self._bracket(scanner, at.words, token)
                at.words = []
            else:
                self._command_ends(scanner, token, at)
        if not self.ended and len(self.open) > base:
            scanner.fail(f"the script ends before {self.open[-1][0]}")

    def _word(self, scanner: Scanner, token: ShellWord, at: _Place) -> None:
        literal = token.literal
        if at.words:
            at.words.append(token)
        elif literal in ("!", "time"):
            at.odd = True
        elif literal is not None and self._compound(scanner, literal):
            at.closed = literal in ("fi", "done", "esac", "}", "]]", "[[")
        elif at.closed:
            scanner.fail(f"{literal or 'a word'} follows the end of a condition, a loop or a group")
        else:
            at.words.append(token)

    def _command_ends(self, scanner: Scanner, token: Operator | None, at: _Place) -> None:
        after = "\n" if token is None else token.text
        joins = after == "\n" and at.before in ("&&", "||", "|", "|&") and not (at.closed or at.words)
        if at.words:
            runs_once = at.before in ("\n", ";", "&") and after in ("\n", ";")
            self.simple(at.words, runs_once and not self.open and not at.odd)
        at.words, at.odd, at.is_over = [], False, token is None
        at.closed = token is not None and self._separator(scanner, token)
        at.before = at.before if joins else after

    def _separator(self, scanner: Scanner, token: Operator) -> bool:
        """Return whether it closed a bracket."""
        if token.text in _CASE_ENDS:
            if not self.open or self.open[-1][0] != "esac":
                scanner.fail(f"{token.text} is outside of a case")
            self._pattern(scanner)
        elif token.text == ")":
            self._close(scanner, ")")
            return True
        return False

    def _compound(self, scanner: Scanner, literal: str) -> bool:
        """Return whether the word that begins a command opens, divides or closes something; what belongs to it is
        read."""
        if literal in _OPENS:
            self._push(scanner, _OPENS[literal], "loop" if _OPENS[literal] == "done" else "")
        elif literal in ("fi", "done", "esac", "}"):
            self._close(scanner, literal)
        elif literal in _INSIDE:
            if not self.open or self.open[-1][0] != _INSIDE[literal]:
                scanner.fail(f"{literal} is unexpected")
        elif literal in _COMPOUNDS:
            _COMPOUNDS[literal](self, scanner)
        else:
            return False
        return True

    def _function(self, scanner: Scanner) -> None:
        name = scanner.next()
        if not isinstance(name, ShellWord) or name.literal is None:
            scanner.fail("function without a name")
        self._define(scanner, name.literal)

    def _push(self, scanner: Scanner, closer: str, kind: str) -> None:
        if self._defines and closer not in ("}", ")"):
            scanner.fail("a function's commands must be in { }")
        if len(self.open) > _DEEPEST:
            scanner.fail(f"conditions and loops are nested more than {_DEEPEST} deep")
        self.open.append((closer, "function" if self._defines else kind))
        self._defines = False
        self.variables.in_function = self.is_inside("function")

    def _close(self, scanner: Scanner, literal: str) -> None:
        if not self.open or self.open[-1][0] != literal:
            scanner.fail(f"{literal} is unexpected")
        self.open.pop()
        self.variables.in_function = self.is_inside("function")

    def _bracket(self, scanner: Scanner, words: list[ShellWord], token: Operator) -> bool:
        """Return a subshell, `((...))`, or a function by its name; whether something was closed by it."""
        name = words[0].literal if len(words) == 1 else None
        if name is not None:
            closing = scanner.next()
            if not isinstance(closing, Operator) or closing.text != ")":
                scanner.fail("a bracket must be quoted")
            self._define(scanner, name)
            return False
        if words:
            scanner.fail("a bracket must be quoted")
        if not scanner.next_is("("):
            self._push(scanner, ")", "")
            return False
        self.variables.judge_sum(scanner.arithmetic_command(), token.line, "((...))")
        return True

    def _define(self, scanner: Scanner, name: str) -> None:
        self.functions.add(name)
        while True:
            token = scanner.next()
            if isinstance(token, Operator) and token.text in ("\n", "(", ")"):
                if token.text == "(" and not scanner.next_is(")"):
                    self._defines = True
                    return self._push(scanner, ")", "")
                continue
            if isinstance(token, ShellWord) and token.literal == "{":
                self._defines = True
                return self._push(scanner, "}", "")
            scanner.fail(f"the function {name} must have its commands in {{ }}")

    def _for(self, scanner: Scanner) -> None:
        name = scanner.next()
        if isinstance(name, Operator) and name.text == "(" and scanner.next_is("("):
            for one in re.findall(NAME, scanner.arithmetic_command()):
                self.variables.judge_sum(one, name.line, "for ((...))")
                self.variables.forget(one, f"{one} runs through a loop on line {name.line}")
        elif isinstance(name, ShellWord) and name.literal is not None and re.fullmatch(NAME, name.literal):
            self.variables.forget(name.literal, f"{name.literal} runs through a loop on line {name.line}")
        else:
            scanner.fail("for without a name")
        while True:
            token = scanner.next()
            if isinstance(token, ShellWord) and token.literal == "do":
                return self._push(scanner, "done", "loop")
            if isinstance(token, ShellWord):
                self.variables.fields(token)
            elif not isinstance(token, Operator) or token.text not in (";", "\n"):
                scanner.fail("for without do")

    def _case(self, scanner: Scanner) -> None:
        token = scanner.next()
        while not (isinstance(token, ShellWord) and token.literal == "in"):
            if isinstance(token, ShellWord):
                self.variables.fields(token)
            elif not isinstance(token, Operator) or token.text != "\n":
                scanner.fail("case without in")
            token = scanner.next()
        self._push(scanner, "esac", "")
        self._pattern(scanner)

    def _pattern(self, scanner: Scanner) -> None:
        """Up to the bracket behind a pattern, or the end of the case."""
        first = True
        while True:
            token = scanner.next()
            if first and isinstance(token, ShellWord) and token.literal == "esac":
                return self._close(scanner, "esac")
            if isinstance(token, Operator) and token.text == ")":
                return None
            if isinstance(token, ShellWord):
                self.variables.fields(token)
            elif not isinstance(token, Operator) or token.text not in ("\n", "(", "|"):
                scanner.fail("the pattern of a case is not closed")
            first = first and isinstance(token, Operator) and token.text == "\n"

    def _condition(self, scanner: Scanner) -> None:
        words = []
        while (word := scanner.condition_word()).literal != "]]":
            words.append(word)
        self.judge_test(
            scanner.line(), [" ".join(self.variables.fields(word, split=False)) for word in words], arithmetic=True
        )

    def judge_test(self, line: int, fields: list[str], arithmetic: bool) -> None:
        """Refuse a test that may compute: operands of `[[ ... ]]` may be arithmetic, and names may have subscripts."""
        for place, word in enumerate(fields):
            if word in ("-v", "-R") and "[" in "".join(fields[place + 1 : place + 2]):
                raise ValueError(f"line {line}: {word} with a subscript is not read")
            if arithmetic and re.fullmatch("-(eq|ne|lt|le|gt|ge)", word):
                for operand in fields[max(0, place - 1) : place + 2 : 2]:
                    self.variables.judge_sum(operand, line, "[[ ]]")


_COMPOUNDS: dict[str, Callable[[Commands, Scanner], None]] = {
    "for": Commands._for,
    "case": Commands._case,
    "[[": Commands._condition,
    "function": Commands._function,
}
