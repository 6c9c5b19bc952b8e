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
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import PurePath

from bpipe.launch.bash_commands import Commands, Found
from bpipe.launch.bash_values import MARK, Variables
from bpipe.launch.bash_words import NAME, Assigned, ShellWord, Text, assigned

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
    try:
        reader.read(text)
    except RecursionError:
        raise ValueError("line 1: conditions, loops and commands in strings are nested too deep") from None
    found = _only(reader.trainings)
    return Launch(found.line, found.words, tuple(reader.variables.reasons))


def _only(trainings: list[_Training]) -> _Training:
    found = [one for one in trainings if not one.vague] or trainings
    if not found:
        raise ValueError(
            "no command with a script (.py) and --num-layers or --hidden-size was found: name the script that starts "
            "the training, or give its flags after --"
        )
    if len({one.words for one in found}) > 1 and not all(one.hidden for one in found):
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
    return found[0]


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


class _ScriptReader:
    """What every command of a script changes, and which of them are trainings."""

    def __init__(self, variables: Variables, depth: int = 0) -> None:
        self.variables = variables
        self.functions = set[str]()
        self.trainings = list[_Training]()
        self._sourced = self._ended = False
        self._inside: tuple[str, ...] = ()
        self._depth = depth

    def read(self, text: str, line: int | None = None, inside: tuple[str, ...] = ()) -> None:
        """Read every command of a text, which stands on a script's `line`, `inside` of what is open there."""
        if self._depth > _DEEPEST:
            raise ValueError(f"line {line}: commands in strings are nested more than {_DEEPEST} deep")
        self._depth += 1
        for found in Commands(text, line, inside).read():
            self._enter(found.inside)
            self._handle(found)
            if self._ended:
                break
        self._depth -= 1

    def _enter(self, inside: tuple[str, ...]) -> None:
        self._inside, self.variables.in_function = inside, "function" in inside

    def _handle(self, found: Found) -> None:
        variables, line = self.variables, found.line
        match found.kind:
            case "command":
                self._simple(found.words, found.once)
            case "word":
                variables.fields(found.words[0])
            case "sum":
                variables.set_by_sum(found.text, line, "((...))")
            case "test":
                fields = [" ".join(variables.fields(word, split=False)) for word in found.words]
                self._judge_test(line, fields, arithmetic=True)
            case "loop":
                fields = [one for word in found.words for one in variables.fields(word)]
                is_text = not all(map(variables.may_be_number, fields))
                variables.forget(found.text, f"{found.text} runs through a loop on line {line}", is_text)
            case "function":
                self.functions.add(found.text)

    def _simple(self, words: Sequence[ShellWord], definite: bool) -> None:
        line, self.variables.definite = words[0].line, definite
        said = list(takewhile(bool, map(assigned, words)))
        command = words[len(said) :]
        if command and command[0].literal in _DECLARE and not said:
            self._declare(command)
        else:
            for one in filter(None, said):
                # Before a command it is for this alone; what it says is looked at, since it may change something.
                self.variables.look_at(one) if command else self.variables.assign(one)
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
        inside = next((kind for kind in ("function", "loop") if kind in self._inside), None)
        if inside is not None:
            return f"is in a {inside}, where its words are not known"
        return (
            f"is passed to the function {fields[0]}, which may change its words" if fields[0] in self.functions else ""
        )

    def _declare(self, words: Sequence[ShellWord]) -> None:
        line, name = words[0].line, words[0].literal or ""
        if name == "local" and not self.variables.in_function:
            raise ValueError(f"line {line}: local outside a function sets nothing: leave it out")
        read_only = name == "readonly"
        for word in words[1:]:
            literal, said = word.literal or "", assigned(word)
            if said is None and re.fullmatch(_OPTIONS[name == "export"], literal):
                read_only = read_only or (name != "export" and "r" in literal)
            else:
                self._declare_one(name, line, literal, said)
                if read_only:
                    self.variables.keep(literal if said is None else said.name)

    def _declare_one(self, command: str, line: int, literal: str, said: Assigned | None) -> None:
        if said is not None:
            if any(isinstance(part, Text) and not part.quoted and "{" in part.text for part in said.value.parts):
                raise ValueError(f"line {line}: {command} with braces, which bash may expand: put them in quotes")
            self.variables.assign(said)
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
        text, inside = " ".join(command.fields[1:]), self._inside
        self.read(text, command.line, inside if command.definite else (*inside, "eval"))
        self._enter(inside)
        if MARK.search(text):
            self.variables.forget_all(f"may be set on line {command.line} by eval")

    def _inner(self, line: int, fields: tuple[str, ...]) -> None:
        """A command in a string, `bash -c "$RUN"`: another shell's, which has only what is exported to it."""
        for before, option, text in zip(fields, fields[1:], fields[2:], strict=False):
            if PurePath(before).name in _SHELLS and re.fullmatch("-[a-z]*c", option):
                variables = self.variables.other_shell(f"on line {line}, in a string for {before}")
                inner = _ScriptReader(variables, self._depth)
                inner.read(text, line)
                hidden = self._hidden(fields)
                self.trainings += [replace(one, hidden=hidden or one.hidden) for one in inner.trainings]

    def _source(self, command: _Command) -> None:
        file = MARK.sub("...", "".join(command.fields[1:2]))
        self._sourced = True
        self.variables.forget_all(
            f"may be set by {file}, which is sourced on line {command.line} and not read", also_unset=True
        )

    def _end(self, command: _Command) -> None:
        self._ended = self._ended or (command.definite and (command.fields[0] == "exit" or len(command.fields) > 1))

    def _set_by(self, command: _Command) -> None:
        name, others, line = command.fields[0], command.fields[1:], command.line
        is_array = name in ("mapfile", "readarray") or "-a" in others
        for one in others:
            if MARK.search(one) or ("[" in one and name != "read"):
                self.variables.forget_all(f"may be set on line {line} by {name}")
            elif match := re.fullmatch(f"(?:-[a-z]+)?({NAME})", one):
                for found in filter(re.compile(NAME).fullmatch, {match[1], re.sub("^-[a-z]", "", one)}):
                    self.variables.arrays.update([found] if is_array else [])
                    self.variables.forget(found, f"{found} is set on line {line} by {name}")

    def _set_by_option(self, command: _Command) -> None:
        """Of printf -v and wait -p."""
        first = "".join(command.fields[1:2])
        if first.startswith(("-v", "-p")) or MARK.search(first):
            self._set_by(command)

    def _unset(self, command: _Command) -> None:
        self._set_by(command)
        if command.definite:
            self.variables.arrays.difference_update(command.fields[1:])

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
        self._judge_test(command.line, list(command.fields), arithmetic=False)

    def _judge_test(self, line: int, fields: list[str], arithmetic: bool) -> None:
        """Refuse a test that may compute: operands of `[[ ... ]]` may be arithmetic, and names may have subscripts."""
        for place, word in enumerate(fields):
            if word in ("-v", "-R") and "[" in "".join(fields[place + 1 : place + 2]):
                raise ValueError(f"line {line}: {word} with a subscript is not read")
            if arithmetic and re.fullmatch("-(eq|ne|lt|le|gt|ge)", word):
                for operand in fields[max(0, place - 1) : place + 2 : 2]:
                    self.variables.judge_sum(operand, line, "[[ ]]")


_EFFECTS: dict[str, Callable[[_ScriptReader, _Command], None]] = {
    **dict.fromkeys(("let", "shopt", "enable", "coproc", "select", "builtin"), _ScriptReader._refuse),
    **dict.fromkeys(("read", "mapfile", "readarray", "getopts"), _ScriptReader._set_by),
    **dict.fromkeys(("printf", "wait"), _ScriptReader._set_by_option),
    **dict.fromkeys(("source", "."), _ScriptReader._source),
    **dict.fromkeys(("exit", "exec"), _ScriptReader._end),
    **dict.fromkeys(("test", "["), _ScriptReader._test),
    "command": _ScriptReader._command,
    "eval": _ScriptReader._eval,
    "set": _ScriptReader._options,
    "trap": _ScriptReader._trap,
    "unset": _ScriptReader._unset,
}
