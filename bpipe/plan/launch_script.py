"""Read the training's command line out of a bash launch script, without running it. In: the text. Out: the one command's words.

Understands assignments, `+=`, arrays, quotes, `$NAME`, `${NAME:-text}`, `${NAME[@]}`, `$((...))` of whole numbers, continued lines, and
`bash -c` or `eval` of a string. Nothing is executed, no file is sourced and no environment is read: a script may have side effects. What
only running it would tell (a command's output, what stands under a condition or in a function) is kept as unknown, with its line; the
reader of the words decides where it matters. Knows no flag but those that mark a training.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?=)", re.DOTALL)
_REFERENCE = re.compile(rf"({_NAME}|[0-9@*#?$!-])(\[[@*]\])?(?:(:?[-+?=])(.*))?", re.DOTALL)
_FUNCTION = re.compile(r"[^=()]+\(\)")
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_SETTING = ("read", "unset", "mapfile", "readarray", "getopts", "printf")
_OPEN, _CLOSE = ("if", "while", "until", "{"), ("fi", "done", "esac", "}")
_BETWEEN = ("then", "else", "elif", "do", "!")
_SEPARATORS = ";|&\n"
# Around what is not known: its number in the reader's list of reasons stands between.
_UNKNOWN = re.compile("\ue000([0-9]+)\ue001")


@dataclass(frozen=True, slots=True)
class Launch:
    """`words` of the command that stands on `line`. What is unknown in a word is found by `unknown`."""

    line: int
    words: tuple[str, ...]
    reasons: tuple[str, ...]

    def unknown(self, word: str) -> str | None:
        """Why the word is not known; None where it is."""
        found = _UNKNOWN.search(word)
        return None if found is None else self.reasons[int(found[1])]


def read_launch(text: str, given: Mapping[str, str] | None = None) -> Launch:
    """The script's training. `given` replaces what the script assigns. Raises ValueError where there is none or more than one."""
    reader = _ScriptReader(dict(given or {}))
    found = [(line, words) for line, words in reader.commands(text) if _trains(words)]
    if not found:
        raise ValueError(
            "no command with a script (.py) and --num-layers or --hidden-size was found: name the script that starts the training, or "
            "give its flags after --"
        )
    if len({words for _, words in found}) > 1:
        lines = ", ".join(str(line) for line, _ in found)
        raise ValueError(f"there are {len(found)} trainings, on lines {lines}: keep one, or give its flags after --")
    return Launch(*found[0], tuple(reader.reasons))


def _trains(words: tuple[str, ...]) -> bool:
    has_script = any(word.endswith(".py") or word == "-m" for word in words)
    flags = {word.partition("=")[0] for word in words}
    # A command of which a whole array is unknown may be the one, too.
    vague = any(_UNKNOWN.fullmatch(word) for word in words)
    return has_script and bool({"--num-layers", "--hidden-size", "--seq-length"} & flags or vague)


@dataclass(slots=True)
class _ScriptReader:
    """`values` of variables: a list for arrays. `depth` counts open conditions, loops and functions; `chained`: behind `&&` or `||`."""

    given: dict[str, str]
    values: dict[str, str | list[str]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    depth: int = 0
    line: int = 1
    chained: bool = False

    def commands(self, text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Every command with its words expanded, while assignments take effect."""
        for line, raw in _split(text):
            self.line = line
            words = list(raw)
            self.chained = words[0] in ("&&", "||")
            words = self._enter(words[self.chained :])
            while words and (words[0] in _DECLARE or _ASSIGNMENT.match(words[0])):
                word = words.pop(0)
                if word not in _DECLARE:
                    self._assign(word)
            if words:
                yield from self._expanded(words)

    def _enter(self, words: list[str]) -> list[str]:
        """What is left of a command after the words that open and close conditions, loops and functions."""
        while words:
            if words[0] == "function" or words[1:2] == ["()"]:
                words = words[2:]
            elif words[0] in ("for", "select", "case"):
                # What follows is a name or a word, and patterns.
                self.depth += 1
                self._forget(words[1] if len(words) > 1 else "", f"runs through a loop on line {self.line}")
                return []
            elif words[0] in (*_OPEN, *_CLOSE, *_BETWEEN) or _FUNCTION.fullmatch(words[0]):
                self.depth += (words[0] in _OPEN) - (words[0] in _CLOSE)
                words = words[1:]
            else:
                break
        return words

    def _expanded(self, words: list[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
        if words[0] in ("source", "."):
            return
        if words[0] in _SETTING:
            for name in words[1:]:
                self._forget(name, f"is set on line {self.line} by {words[0]}")
        fields = [one for word in words for one in self._fields(word)]
        yield self.line, tuple(fields)
        # A command in a string: `bash -c "$RUN"`, `eval $RUN`.
        if "-c" in fields[:-1] or fields[:1] == ["eval"]:
            inner = " ".join(fields[1:]) if fields[0] == "eval" else fields[fields.index("-c") + 1]
            try:
                yield self.line, tuple(shlex.split(inner, comments=True))
            except ValueError:
                return

    def _forget(self, name: str, why: str) -> None:
        if re.fullmatch(_NAME, name):
            self.values[name] = self._unknown(f"{name} {why}")

    def _unknown(self, reason: str) -> str:
        if reason not in self.reasons:
            self.reasons.append(reason)
        return f"\ue000{self.reasons.index(reason)}\ue001"

    def _assign(self, word: str) -> None:
        match = _ASSIGNMENT.match(word)
        assert match is not None
        name, more, raw = match[1], match[2] == "+=", word[match.end() :]
        if name in self.given:
            return
        value: str | list[str]
        if self.depth or self.chained:
            value = self._unknown(f"{name} is set on line {self.line}, under a condition, in a loop or in a function")
            self.values[name] = [value] if raw.startswith("(") else value
            return
        if raw.startswith("("):
            value = [one for _, inner in _split(raw[1:-1].replace("\n", " \n")) for part in inner for one in self._fields(part)]
            old = self.values.get(name, []) if more else []
            self.values[name] = [*([old] if isinstance(old, str) else old), *value]
            return
        value = " ".join(self._fields(raw, quoted=True))
        before = self.values.get(name, "") if more else ""
        self.values[name] = (before if isinstance(before, str) else " ".join(before)) + value

    def _fields(self, raw: str, quoted: bool = False) -> list[str]:
        """What bash makes of one word: quotes removed, variables in, and what was not quoted cut at blanks."""
        fields: list[str] = []
        now: str | None = None
        at, inside, void = 0, False, False
        while at < len(raw):
            char = raw[at]
            if char == "'" and not inside:
                end = raw.index("'", at + 1)
                now, at = (now or "") + raw[at + 1 : end], end + 1
            elif char == '"':
                # `"$@"` without arguments is no word, where `""` is an empty one.
                now = now or "" if inside and not void else now
                inside, void, at = not inside, False, at + 1
            elif char == "\\" and at + 1 < len(raw):
                keep = inside and raw[at + 1] not in '"\\$`\n'
                now, at = (now or "") + ("\\" if keep else "") + ("" if raw[at + 1] == "\n" else raw[at + 1]), at + 2
            elif char in "$`":
                values, at = self._expand(raw, at, inside)
                void = void or (inside and not values)
                now = self._join(fields, now, values, split=not (inside or quoted))
            else:
                now, at = (now or "") + char, at + 1
        return fields if now is None else [*fields, now]

    @staticmethod
    def _join(fields: list[str], now: str | None, values: list[str], split: bool) -> str | None:
        """Append what an expansion gave: the first to the word so far, the others as words of their own."""
        text = " ".join(values)
        if split:
            parts = text.split()
            if text[:1].isspace() and now is not None:
                fields.append(now)
                now = None
            values = parts
        for index, value in enumerate(values):
            if index and now is not None:
                fields.append(now)
                now = None
            now = (now or "") + value
        if split and now is not None and values and text[-1:].isspace():
            fields.append(now)
            now = None
        return now

    def _expand(self, raw: str, at: int, inside: bool) -> tuple[list[str], int]:
        """The values of what begins at `at`, and where it ends."""
        if raw[at] == "`":
            end = raw.index("`", at + 1) + 1
            return [self._unknown(f"the output of {raw[at:end]} on line {self.line}")], end
        if raw.startswith("$((", at):
            end = _closing(raw, at + 1)
            return [self._arithmetic(raw[at + 3 : end - 1])], end + 1
        if raw.startswith("$(", at):
            end = _closing(raw, at + 1) + 1
            return [self._unknown(f"the output of {' '.join(raw[at:end].split())} on line {self.line}")], end
        if raw.startswith("${", at):
            end = _closing(raw, at + 1)
            return self._variable(raw[at + 2 : end], inside), end + 1
        match = re.compile(rf"\$({_NAME}|[0-9@*#?!$-])").match(raw, at)
        if match is None:
            return ["$"], at + 1
        return self._variable(match[1], inside), match.end()

    def _variable(self, reference: str, inside: bool) -> list[str]:
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            return [self._unknown(f"${{{reference}}} on line {self.line}")]
        name, every, operator, text = match[1], match[2], match[3], match[4]
        if name in "@*" or name.isdecimal():
            # A script that is read was called without arguments.
            values: list[str] | None = [] if name in "@*" else None
        else:
            value = self.given.get(name, self.values.get(name))
            whole = shlex.split(value) if every and name in self.given and isinstance(value, str) else value
            values = whole if isinstance(whole, list) else None if whole is None else [whole]
            if isinstance(whole, list) and not every:
                values = whole[:1]
        empty = values is None or (operator is not None and operator.startswith(":") and not any(values))
        if operator is not None and operator[-1] == "+":
            return [""] if empty else self._fields(text, quoted=inside) or [""]
        if not empty and values is not None:
            return [" ".join(values)] if inside and (every == "[*]" or name == "*") else values
        if operator is not None and operator[-1] in "-=":
            return self._fields(text, quoted=inside) or [""]
        if values is not None:
            return values
        return [self._unknown(f"{'$' if len(name) == 1 else ''}{name} is not set in the script (line {self.line})")]

    def _arithmetic(self, text: str) -> str:
        """Whole numbers with + - * / % and brackets."""
        plain = re.sub(rf"\$?\{{?({_NAME})\}}?", lambda found: " ".join(self._variable(found[1], True)), text)
        unknown = _UNKNOWN.search(plain)
        if unknown is not None:
            return unknown[0]
        if not re.fullmatch(r"[0-9+\-*/%() ]{1,200}", plain) or "**" in plain:
            return self._unknown(f"$(({text})) on line {self.line}")
        try:
            # Digits and operators alone, as the line before made sure; bash divides whole numbers.
            return str(eval(plain.replace("/", "//"), {"__builtins__": {}}))
        except (SyntaxError, ZeroDivisionError, TypeError):
            return self._unknown(f"$(({text})) on line {self.line}")


# -- cutting the text into words -------------------------------------------------------------------------------------------------------


_REDIRECTION = re.compile(r"[0-9]*(<<-?[ \t]*(?P<end>['\"]?\w+['\"]?)|&?>>?&?[ \t]*|<[ \t]*)")


def _split(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Every command's raw words, with its line. Comments, redirections and the bodies of here-documents are left out."""
    at = first = 0
    words: list[str] = []
    ends: list[str] = []
    while at < len(text):
        char = text[at]
        if char in _SEPARATORS:
            if words:
                yield _line(text, first), tuple(words)
                words = []
            if text.startswith(("&&", "||"), at):
                # Whether the next command runs depends on this one: the word is kept for it.
                first, words, at = at, [text[at : at + 2]], at + 2
                continue
            at += 1
            if char == "\n":
                at, ends = _after_here_documents(text, at, ends), []
        elif char in " \t" or text.startswith("\\\n", at):
            at += 1 if char in " \t" else 2
        elif char == "#":
            at = _end_of_line(text, at)
        elif match := _REDIRECTION.match(text, at):
            at = match.end()
            if match["end"]:
                ends.append(match["end"].strip("'\""))
            elif not text.startswith(("&1", "&2"), at):
                at = _word_end(text, at)
        else:
            first = first if words else at
            # A bracket that is no array is a word of its own: a subshell's, a function's.
            end = max(_word_end(text, at), at + 1)
            words.append(text[at:end])
            at = end
    if words:
        yield _line(text, first), tuple(words)


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _after_here_documents(text: str, at: int, ends: list[str]) -> int:
    for end in ends:
        stop = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(text, at)
        if stop is None:
            raise ValueError(f"line {_line(text, at)}: the here-document up to {end} has no end")
        at = stop.end()
    return at


def _word_end(text: str, at: int) -> int:
    """Where the word ends that begins at `at`."""
    start = at
    while at < len(text) and text[at] not in f" \t{_SEPARATORS}<>":
        char = text[at]
        if char == "\\":
            if text.startswith("\\\n", at) and at > start:
                # A continued line inside a word joins it; before one it is blank.
                at += 2
                continue
            at += 2
        elif char in "'\"`" or text.startswith(("$(", "${"), at) or (char == "(" and at > start and text[at - 1] == "="):
            try:
                at = _closing(text, at + (char == "$")) + 1
            except ValueError:
                raise ValueError(f"line {_line(text, at)}: {text[at : at + 20].splitlines()[0]} is not closed") from None
        else:
            at += 1
    return min(at, len(text))


def _closing(text: str, at: int) -> int:
    """Where what opens at `at` (a quote or bracket) is closed. Raises ValueError where it is not."""
    opened = text[at]
    if opened in "'`":
        return text.index(opened, at + 1)
    close = {'"': '"', "(": ")", "{": "}"}[opened]
    at += 1
    while at < len(text):
        char = text[at]
        if char == close:
            return at
        if char == "\\":
            at += 2
        elif (char in "'\"" and opened != '"') or char == "`" or (char == opened and opened != '"'):
            at = _closing(text, at) + 1
        elif text.startswith(("$(", "${"), at):
            at = _closing(text, at + 1) + 1
        elif char == "#" and opened == "(" and text[at - 1] in " \t\n(":
            at = text.index("\n", at)
        else:
            at += 1
    raise ValueError
