"""Read the training's command line out of a bash launch script, without running it.

In: the text. Out: the one command's words.

Reads a part of bash exactly: assignments, `+=`, arrays, quotes, `$NAME`, `${NAME:-text}`, `${NAME[@]}`, `$((...))` of
whole numbers, `bash -c` or `eval` of a string. Whatever else could change a variable is an error at its line, never
passed over. Nothing is executed, no file is sourced and no environment is read: a script may have side effects. What
only running it would tell (a command's output, what is set under a condition, in a function or by a file that is
sourced) is kept as unknown, with its line; the reader of the words decides where it matters. Knows no flag but those
that mark a training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import PurePath

from bpipe.launch.bash_commands import Commands
from bpipe.launch.bash_parts import NAME, Assigned, ShellWord, Text, assigned
from bpipe.launch.bash_values import MARK, Variables
from bpipe.launch.bash_words import Scanner

_DECLARE = ("export", "declare", "local", "readonly", "typeset")
# Options of declarations, and those of export, that change no value.
_OPTIONS = ("-[rxga]+|-p", "-f|-n|-fx|-p|-x")
# Of `set`: what changes no word.
_SET = re.compile(
    r"[-+][aeuxCEhTbmv]+|[-+][aeuxvE]*o|errexit|nounset|xtrace|pipefail|errtrace|functrace|verbose|monitor|[-+]"
)
_AT_THE_END = re.compile(r"EXIT|0|(SIG)?(INT|TERM|HUP|QUIT|USR1|USR2|PIPE|CONT|ALRM)|-")
# Commands that are no function of a file that was sourced; of any other that may be one.
_PLAIN = re.compile(
    "echo|printf|mkdir|cd|ls|rm|cp|mv|ln|cat|tee|touch|chmod|date|sleep|hostname|true|false|:|test|\\[|exit|exec|set|ulimit|umask|module|ml|"
    "conda|pip|python3?|torchrun|srun|nvidia-smi|kill|wait|trap|shift|pwd|env|which|grep|sed|awk|tail|head|return|break|continue|dirname|"
    "basename"
)
_SHELLS = ("bash", "sh", "dash", "zsh")
_PRINTS = ("echo", "printf", ":", "logger", "cat")
_DEEPEST = 10


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch: `words` of the command on `line`. `unknown` says what is unknown in a word."""

    line: int
    words: tuple[str, ...]
    reasons: tuple[str, ...]

    def unknown(self, word: str) -> str | None:
        """Return why the word is not known; None where it is."""
        found = MARK.search(word)
        return None if found is None else self.reasons[int(found[1])]


@dataclass(frozen=True, slots=True)
class _Training:
    """`hidden`: why its words are not those that are run, if so. `vague`: only what is unknown in it may be sizes."""

    line: int
    words: tuple[str, ...]
    hidden: str
    vague: bool


def read_launch(text: str, given: Mapping[str, str] | None = None) -> Launch:
    """Return the script's training.

    `given` replaces what the script assigns. Raises ValueError where there is none or more than one.
    """
    for char, what in (
        ("\0", "a zero byte: this is not a script"),
        ("\r\n", "Windows line ends, which bash reads as part of a word: convert it"),
    ):
        if char in text:
            raise ValueError(f"line {text.count(chr(10), 0, text.index(char)) + 1}: {what}")
    reader = _ScriptReader(Variables(dict(given or {})))
    reader.read(Scanner(text))
    found = [one for one in reader.trainings if not one.vague] or reader.trainings
    if not found:
        raise ValueError(
            "no command with a script (.py) and --num-layers or --hidden-size was found: name the script that starts "
            "the training, or "
            "give its flags after --"
        )
    if len({one.words for one in found}) > 1:
        lines = ", ".join(str(one.line) for one in found)
        raise ValueError(
            f"it starts {len(found)} training runs, on lines {lines}: keep one, or give its flags after --"
        )
    hidden = next((one for one in found if one.hidden), None)
    if hidden is not None:
        raise ValueError(
            f"line {hidden.line}: the training command {hidden.hidden}. Print the command with echo, and give it "
            "after --"
        )
    return Launch(found[0].line, found[0].words, tuple(reader.variables.reasons))


def _is_training(words: tuple[str, ...]) -> tuple[bool, bool]:
    """Return whether a command is one, and whether only by what is unknown in it: a whole array, say."""
    has_script = words[0] not in _PRINTS and any(word.endswith(".py") or word == "-m" for word in words)
    flags = {word.partition("=")[0] for word in words}
    sized = has_script and bool({"--num-layers", "--hidden-size", "--seq-length"} & flags)
    return sized or (has_script and any(MARK.fullmatch(word) for word in words)), not sized


@dataclass(frozen=True, slots=True)
class _Command:
    """`definite`: it is run, once, by this shell.

    `prefixed`: by `NAME=VALUE` for it alone. `trains`: it is a training.
    """

    line: int
    fields: tuple[str, ...]
    definite: bool
    prefixed: bool
    trains: bool


class _ScriptReader(Commands):
    """What every command of a script changes, and which of them are trainings."""

    def __init__(self, variables: Variables, depth: int = 0) -> None:
        super().__init__(variables)
        self.trainings = list[_Training]()
        self._sourced = False
        self._depth = depth

    def simple(self, words: Sequence[ShellWord], definite: bool) -> None:
        """One command. `definite`: it is run, once, by this shell."""
        line, self.variables.definite = words[0].line, definite
        said = list(takewhile(bool, map(assigned, words)))
        command = words[len(said) :]
        if command and command[0].literal in _DECLARE and not said:
            self._declare(command, definite)
        else:
            for one in filter(None, said):
                # Before a command it is for this alone; what it says is looked at, since it may change something.
                self.variables.look_at(one) if command else self._assign(one, definite)
            self._run(line, command, definite, bool(said))
        self.variables.definite = False

    def _run(self, line: int, command: Sequence[ShellWord], definite: bool, prefixed: bool) -> None:
        fields = tuple(one for word in command for one in self.variables.fields(word))
        if command and not fields and prefixed:
            raise ValueError(
                f"line {line}: the assignment is followed by an empty command, so it is one for the whole script: "
                "leave it out"
            )
        if fields:
            training, vague = _is_training(fields)
            if training:
                self.trainings.append(_Training(line, fields, self._hidden(fields), vague))
            self._effects(_Command(line, fields, definite, prefixed, training))

    def _hidden(self, fields: tuple[str, ...]) -> str:
        inside = next((kind for kind in ("function", "loop") if self.is_inside(kind)), None)
        if inside is not None:
            return f"is in a {inside}, where its words are not known"
        return (
            f"is passed to the function {fields[0]}, which may change its words" if fields[0] in self.functions else ""
        )

    def _assign(self, said: Assigned, definite: bool) -> None:
        where = f"is set on line {said.value.line}, under a condition, in a loop or in a function"
        self.variables.assign(said, "" if definite else where)

    def _declare(self, words: Sequence[ShellWord], definite: bool) -> None:
        line, name = words[0].line, words[0].literal or ""
        if name == "local" and not self.variables.in_function:
            raise ValueError(f"line {line}: local outside a function sets nothing: leave it out")
        read_only = name == "readonly"
        for word in words[1:]:
            literal, said = word.literal or "", assigned(word)
            if said is None and re.fullmatch(_OPTIONS[name == "export"], literal):
                read_only = read_only or (name != "export" and "r" in literal)
            else:
                self._declare_one(name, line, literal, said, definite)
                if read_only:
                    self.variables.keep(literal if said is None else said.name)

    def _declare_one(self, command: str, line: int, literal: str, said: Assigned | None, definite: bool) -> None:
        if said is not None:
            if any(isinstance(part, Text) and not part.quoted and "{" in part.text for part in said.value.parts):
                raise ValueError(f"line {line}: {command} with braces, which bash may expand: put them in quotes")
            self._assign(said, definite)
        elif not re.fullmatch(NAME, literal):
            shown = literal or "a word that is quoted or expanded"
            raise ValueError(f"line {line}: {command} with {shown} is not read: write {command} NAME=VALUE")
        elif command not in ("export", "readonly"):
            self.variables.forget(literal, f"{literal} is declared on line {line}")

    def _effects(self, command: _Command) -> None:
        """What a command changes beside what it does."""
        line, fields, name = command.line, command.fields, command.fields[0]
        if name in _DECLARE:
            raise ValueError(f"line {line}: {name} in this form is not read: write {name} NAME=VALUE")
        effect = _EFFECTS.get(name)
        if effect is not None:
            effect(self, command)
        elif name in self.functions:
            self.variables.call()
        elif MARK.search(name) and not command.trains:
            self.variables.forget_all(f"may be set on line {line}, by a command that is not known")
        elif self._sourced and not _PLAIN.fullmatch(name) and "/" not in name and not command.trains:
            self.variables.forget_all(
                f"may be set on line {line} by {name}, which may be a function of a file that is sourced"
            )
        self._inner(line, fields)

    def _refuse(self, command: _Command) -> None:
        raise ValueError(f"line {command.line}: {command.fields[0]} is not read: write NAME=VALUE, or leave it out")

    def _command(self, command: _Command) -> None:
        others = command.fields[1:]
        if others[:1] not in (("-v",), ("-V",)) and others:
            if others[0].startswith("-") or command.prefixed:
                self._refuse(command)
            self._effects(replace(command, fields=others))

    def _eval(self, command: _Command) -> None:
        if command.prefixed:
            self._refuse(command)
        text = " ".join(command.fields[1:])
        with nullcontext() if command.definite else self.opened("eval"):
            self._nested(Scanner(text, command.line), self)
        if MARK.search(text):
            self.variables.forget_all(f"may be set on line {command.line} by eval")

    def _inner(self, line: int, fields: tuple[str, ...]) -> None:
        """A command in a string, `bash -c "$RUN"`: another shell's, which has only what is exported to it."""
        for before, option, text in zip(fields, fields[1:], fields[2:], strict=False):
            if PurePath(before).name in _SHELLS and re.fullmatch("-[a-z]*c", option):
                inner = _ScriptReader(
                    self.variables.other_shell(f"on line {line}, in a string for {before}"), self._depth
                )
                self._nested(Scanner(text, line), inner)
                hidden = self._hidden(fields)
                self.trainings += [replace(one, hidden=hidden or one.hidden) for one in inner.trainings]

    def _nested(self, scanner: Scanner, reader: _ScriptReader) -> None:
        if reader._depth >= _DEEPEST:
            scanner.fail(f"commands in strings are nested more than {_DEEPEST} deep")
        reader._depth += 1
        reader.read(scanner)
        reader._depth -= 1

    def _source(self, command: _Command) -> None:
        file = MARK.sub("...", "".join(command.fields[1:2]))
        self._sourced = True
        self.variables.forget_all(
            f"may be set by {file}, which is sourced on line {command.line} and not read", also_unset=True
        )

    def _end(self, command: _Command) -> None:
        self.ended = self.ended or (command.definite and (command.fields[0] == "exit" or len(command.fields) > 1))

    def _set_by(self, command: _Command) -> None:
        name, others, line = command.fields[0], command.fields[1:], command.line
        option = {"printf": "-v", "wait": "-p"}.get(name)
        if option is not None and not (others and (others[0].startswith(option) or MARK.search(others[0]))):
            return
        for one in others:
            if MARK.search(one) or ("[" in one and name != "read"):
                self.variables.forget_all(f"may be set on line {line} by {name}")
            elif match := re.fullmatch(f"(?:-[a-z]+)?({NAME})", one):
                for found in {match[1], re.sub("^-[a-z]", "", one)}:
                    if re.fullmatch(NAME, found):
                        self.variables.forget(found, f"{found} is set on line {line} by {name}")

    def _options(self, command: _Command) -> None:
        for one in command.fields[1:]:
            if one == "--" or MARK.search(one) or (not one.startswith(("-", "+")) and not _SET.fullmatch(one)):
                self.variables.called = f"may be an argument that is set on line {command.line}"
                return
            if not _SET.fullmatch(one):
                raise ValueError(f"line {command.line}: set {one} changes how words are read: leave it out")

    def _trap(self, command: _Command) -> None:
        if not all(_AT_THE_END.fullmatch(one) for one in command.fields[2:]):
            raise ValueError(
                f"line {command.line}: trap for anything but the end or a signal is not read: leave it out"
            )

    def _test(self, command: _Command) -> None:
        self.judge_test(command.line, list(command.fields), arithmetic=False)


_EFFECTS: dict[str, Callable[[_ScriptReader, _Command], None]] = {
    **dict.fromkeys(("let", "shopt", "enable", "coproc", "select", "builtin"), _ScriptReader._refuse),
    **dict.fromkeys(("read", "unset", "mapfile", "readarray", "getopts", "printf", "wait"), _ScriptReader._set_by),
    **dict.fromkeys(("source", "."), _ScriptReader._source),
    **dict.fromkeys(("exit", "exec"), _ScriptReader._end),
    **dict.fromkeys(("test", "["), _ScriptReader._test),
    "command": _ScriptReader._command,
    "eval": _ScriptReader._eval,
    "set": _ScriptReader._options,
    "trap": _ScriptReader._trap,
}
