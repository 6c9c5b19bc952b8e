"""Keep a script's variables, and expand words with them as bash does.

In: words and assignments. Out: text, with marks for what is unknown.

A mark names the reason why only running the script would tell. What bash would match against files, expand from braces
or take from the user's home is unknown, too. Knows no command, and no environment.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bpipe.launch.bash_arithmetic import changes, compute, is_number
from bpipe.launch.bash_words import NAME, Arithmetic, Assigned, Part, Reference, ShellWord, Text

# Around what is not known: its number in the list of reasons stands between. No script has a zero byte.
MARK = re.compile("\0([0-9]+)\0")
_MARK_LAST = re.compile("(?<!^)\0[0-9]+\0\\Z")
# Of all expansions together: a script can double a variable in every line.
MOST_EXPANDED = 20_000_000
# What a login sets: `${NAME:-text}` is never just the text.
_OF_A_LOGIN = re.compile("HOME|PATH|USER|LOGNAME|SHELL|TERM|LANG|(HOST|OS|MACH)TYPE|HOSTNAME|SHLVL|TMPDIR|PS4|OPTERR")
# What bash changes itself.
_OF_BASH = re.compile(
    "S?RANDOM|SECONDS|LINENO|EPOCH(SECONDS|REALTIME)|E?UID|PPID|GROUPS|FUNCNAME|DIRSTACK|PIPESTATUS|HISTCMD|OPTIND|OPTARG|REPLY|"
    "BASH(PID|_[A-Z0-9]+)?|_|COMP_WORDBREAKS|(OLD)?PWD|COLUMNS|LINES|[#?$!0-]"
)
# With these another script is read.
_READING = ("IFS", "GLOBIGNORE", "POSIXLY_CORRECT", "SHELLOPTS", "BASHOPTS", "BASH_ENV", "BASH_COMPAT")
_NAMES = re.compile(NAME)
# Of a variable: an array has words.
_Value = str | list[str]
_BLANK = re.compile("[ \t\n]+")


@dataclass(slots=True)
class _Fields:
    """The words that one word becomes.

    `now` are the pieces of the one that is not ended; `plain` those of them that were not quoted.

    `is_void`: an empty array is in it, `is_word`: so are quotes, which make a word of nothing. `unknown` makes the word
    that stands for one of which only a reason is known; `more` are marks of words that may follow, where one ends
    `loosely`: with what is cut at blanks, or with an array's last.
    """

    split: bool
    apart: bool
    unknown: Callable[[str, str], str]
    more: Mapping[str, str]
    done: list[str] = field(default_factory=list)
    now: list[str] | None = None
    plain: list[str] = field(default_factory=list)
    odd: str = ""
    is_void: bool = False
    is_word: bool = False
    loosely: bool = False

    def add(self, text: str, plain: str = "", loosely: bool = False) -> None:
        self.now = [] if self.now is None else self.now
        self.now.append(text)
        self.plain.append(plain)
        self.loosely = loosely

    def add_unquoted(self, text: str) -> None:
        """Cut at blanks, where words are."""
        if not self.split:
            self.add(text)
            return
        for place, piece in enumerate(_BLANK.split(text)):
            if place:
                self.end()
            if piece:
                self.add(piece, piece, loosely=True)

    def end(self) -> None:
        if self.now is not None:
            word, odd = "".join(self.now), self.odd
            if self.split and _may_match("".join(self.plain)):
                odd = "stands for the files whose names it matches: put it in quotes"
            elif self.is_void and not word and not self.is_word:
                odd = "is an empty word, or none at all: leave the empty array out"
            added = list[str]()
            if self.split and not self.loosely:
                word = MARK.sub(lambda found: self.more.get(found[0], found[0]), word)
            while self.split and self.apart and (found := _MARK_LAST.search(word)) and found[0] in self.more:
                word, added = word[: found.start()], [self.more[found[0]], *added]
            self.done.append(self.unknown(word, odd) if odd and not MARK.search(word) else word)
            self.done += added
        self.now, self.plain, self.odd = None, [], ""


def _may_match(text: str) -> bool:
    """Return whether bash compares it with the names of files."""
    place = text.find("[")
    return "*" in text or "?" in text or "\\" in text or (place >= 0 and "]" in text[place:])


class Variables:
    """Variables of a script, with `reasons` for unknown ones in the order of their marks.

    `in_function`: what is set now is set whenever the function is called, so never known again. `definite`: what is set
    now is set. `called`: why arguments are not known; a script that is read has none.
    """

    def __init__(self, given: Mapping[str, str], reasons: dict[str, int] | None = None) -> None:
        self.given = given
        self.reasons = {} if reasons is None else reasons
        self.in_function = False
        self.definite = False
        self.called = ""
        self._values: dict[str, _Value] = {}
        self._lost: dict[str, str] = {}
        self._tainted: set[str] = set()
        self._read_only: set[str] = set()
        # Of what is unknown, what may hold another text than a number.
        self._texts: set[str] = set()
        self._text_marks: set[str] = set()
        # What may be an array, of which `NAME=text` sets one element.
        self.arrays: set[str] = set()
        # For marks of words that may follow, those of what is unknown.
        self._more: dict[str, str] = {}
        self._by_calls = self._if_unset = ""
        self._expanded = 0

    def other_shell(self, where: str) -> Variables:
        """Return those of a shell that the script starts, of which nothing is known."""
        others = Variables({}, self.reasons)
        others._if_unset, others.called = f"may be exported to what runs {where}", f"is an argument {where}"
        others._expanded = self._expanded
        return others

    def mark(self, reason: str) -> str:
        return f"\0{self.reasons.setdefault(reason, len(self.reasons))}\0"

    # -- setting
    # ------------------------------------------------------------------------------------------------------------------

    def forget(self, name: str, why: str, is_text: bool = False, but_for: _Value | None = None) -> None:
        """Forget what a variable holds. `is_text`: it may be no number; `but_for`: what it begins with still."""
        if self.in_function:
            self._tainted.add(name)
        if is_text:
            self._texts.add(name)
        mark = self.mark(why)
        last = but_for[-1] if isinstance(but_for, list) and but_for else but_for
        if not last:
            self._values[name] = mark
        elif str(last)[str(last).rfind("\0", 0, -1) :] not in self._more:
            more = self.mark(f"{why}: more words may be added to it")
            self._more[more] = mark
            if isinstance(but_for, list):
                but_for[-1] += more
            else:
                self._values[name] = f"{last}{more}"

    def forget_all(self, why: str, also_unset: bool = False) -> None:
        """Forget every variable that is set, and with `also_unset` also those that are not."""
        self._if_unset = why if also_unset else self._if_unset
        if self.in_function:
            self._by_calls = why
            return
        self._lost.update(dict.fromkeys(self._values, why))
        self._values = {name: value for name, value in self._values.items() if name in self._tainted}

    def call(self) -> None:
        """Forget what any called function may set."""
        if self._by_calls:
            self.forget_all(self._by_calls)

    def keep(self, name: str) -> None:
        """Make a variable read-only."""
        self._read_only.add(name)

    def assign(self, said: Assigned) -> None:
        """Assign a variable."""
        name, line = said.name, said.value.line
        if name in _READING:
            raise ValueError(f"line {line}: {name} changes how the script is read: leave it out")
        if name in self._read_only and name not in self.given:
            raise ValueError(f"line {line}: {name} is read-only, so this ends the script: leave one of the two out")
        new = self._assigned(said, line)
        if name in self.given:
            return
        if isinstance(new, list):
            self.arrays.add(name)
        if said.element is not None:
            self.judge_sum(said.element, line, f"{name}[{said.element}]")
            self.arrays.add(name)
            self.forget(name, f"{name} has an element that is set on line {line}", _is_text(said, new))
        elif self.definite and not self.in_function and name not in self._tainted:
            self._texts.discard(name)
            self._values[name] = self._joined(said, new)
        else:
            stays = self._stays(said)
            self._spend(len(stays) if isinstance(stays, str) else 0, line)
            why = f"{name} is set on line {line}, under a condition, in a loop or in a function"
            self.forget(name, why, _is_text(said, new), stays)

    def _stays(self, said: Assigned) -> _Value | None:
        """Return what a variable holds before what may be added to it, if that is all that may be done to it."""
        old = None if self.in_function or said.name in self._tainted else self._values.get(said.name)
        is_array, added = said.value.elements is not None, _added(said)
        if added is None or is_array != isinstance(old, list):
            return None
        first = added[0] if added else None
        return old if is_array or (isinstance(first, Text) and first.text[:1] in (" ", "\n")) else None

    def _joined(self, said: Assigned, new: _Value) -> _Value:
        """Return the variable's value with what it had, where that stays."""
        name, line = said.name, said.value.line
        old = self._old(name) if said.adds else None
        if isinstance(new, list):
            if isinstance(old, list):
                old += new
                return old
            return new if old is None else [old, *new]
        if name in self.arrays:
            raise ValueError(
                f"line {line}: {name} is an array, of which this sets the first word alone: write "
                f"{name}{'+' * said.adds}=(...)"
            )
        value = new if old is None else f"{old}{new}"
        self._spend(len(value), line)
        return value

    def look_at(self, said: Assigned) -> None:
        """Expand an assignment that holds for one command only."""
        self._assigned(said, said.value.line)

    def _assigned(self, said: Assigned, line: int) -> _Value:
        if said.value.elements is None:
            return "".join(self.fields(said.value, split=False))
        return [one for element in said.value.elements for one in self.fields(element, apart=False)]

    def _old(self, name: str) -> _Value | None:
        """What `+=` adds to."""
        old = self._value(name, 0)
        return self.mark(f"{name} {self._if_unset}") if old is None and self._if_unset else old

    # -- reading
    # ------------------------------------------------------------------------------------------------------------------

    def fields(self, word: ShellWord, split: bool = True, apart: bool = True) -> list[str]:
        """Return the words of a command that one word becomes; with `split=False` the one value of an assignment.

        `apart`: words that may follow one are apart from it.
        """
        if word.elements is not None:
            raise ValueError(f"line {word.line}: an array cannot be set here: put the bracket in quotes")
        state = _Fields(
            split, apart, lambda text, why: self.mark(f"{text[:40]!r} on line {word.line} {why}"), self._more
        )
        self._expand(word.line, word.parts, state, inside=False)
        state.end()
        return state.done

    def judge_sum(self, text: str, line: int, shown: str) -> None:
        """Raise ValueError where computing it may set a variable, itself or through what a name in it holds, which
        bash computes, too."""
        if changes(text):
            raise ValueError(f"line {line}: {shown} may change a variable, which is not read: assign it, NAME=$((...))")
        if self._may_be_text(text):
            raise ValueError(f"line {line}: {shown} computes with a text that may not be a number: give whole numbers")
        for name in _NAMES.findall(text):
            held = _first(self._value(name, line)) or ""
            if held and not self.may_be_number(held):
                held = MARK.sub("...", held)[:40]
                raise ValueError(f"line {line}: {name} is computed, and may hold {held!r}: give it a whole number")

    def may_be_number(self, text: str) -> bool:
        return is_number(text) or (MARK.search(text) is not None and not self._may_be_text(text))

    def set_by_sum(self, text: str, line: int, shown: str) -> None:
        """Forget what arithmetic that is a command may set."""
        names = _NAMES.findall(text) if changes(text) and not set("[$") & set(text) else []
        for one in names or [text]:
            self.judge_sum(one, line, shown)
        for name in names:
            self.forget(name, f"{name} may be set on line {line} by {shown}")

    def _may_be_text(self, text: str) -> bool:
        return any(found[0] in self._text_marks for found in MARK.finditer(text))

    def _spend(self, num_characters: int, line: int) -> None:
        self._expanded += num_characters + 1
        if self._expanded > MOST_EXPANDED:
            raise ValueError(
                f"line {line}: the script's variables have more than {MOST_EXPANDED} characters in all, more than "
                "any launch"
            )

    def _expand(self, line: int, parts: Sequence[Part], state: _Fields, inside: bool) -> None:
        """`inside`: of what stands in `${NAME:-...}`, where text is cut at blanks, too."""
        for place, part in enumerate(parts):
            if isinstance(part, Reference):
                self._refer(line, part, state)
            elif isinstance(part, Arithmetic):
                state.add(self._compute(line, part.inner))
            elif not isinstance(part, Text):
                state.add(self.mark(f"the output of {' '.join(part.text.split())[:60]} on line {line}"))
            elif part.quoted:
                state.is_word = True
                state.add(part.text)
            else:
                self._plain_text(part.text, place == 0, state, inside)
            self._spend(0, line)

    def _plain_text(self, text: str, first: bool, state: _Fields, inside: bool) -> None:
        if inside:
            state.add_unquoted(text)
        else:
            state.add(text, text if text != "[" else "")
        if re.search(r"[=:]~", text) or (first and text.startswith("~")):
            state.odd = "has a ~, which is a home folder: write the folder"
        elif state.split and ("{" in text or "}" in text):
            state.odd = "has braces, which bash may expand: put it in quotes"

    def _refer(self, line: int, part: Reference, state: _Fields) -> None:
        value = self._value(part.name, line, bool(part.every))
        if not part.operator:
            self._emit(self._unset(part, line) if value is None else value, part, state, line)
            return
        unknown, kind = self._unknown_of(value, part), part.operator[-1]
        missing = value is None or value == [] or (part.operator[0] == ":" and _first(value) == "")
        if unknown:
            self._emit(unknown, part, state, line)
        elif kind in "-+":
            if missing == (kind == "-"):
                self._expand(line, part.otherwise, state, inside=not part.quoted)
            elif kind == "-":
                self._emit(value or "", part, state, line)
        else:
            self._emit(self._set_or_unset(line, part, value) if missing else value or "", part, state, line)

    def _unset(self, part: Reference, line: int) -> str:
        sign = "" if re.fullmatch(NAME, part.name) else "$"
        more = f", or {self._if_unset}" if self._if_unset else ""
        return self.mark(f"{sign}{part.name} is not set in the script (line {line}){more}")

    def _set_or_unset(self, line: int, part: Reference, value: _Value | None) -> _Value:
        """Return what `${NAME:=text}` or `${NAME:?text}` is where the variable is missing."""
        name = part.name
        if part.operator[-1] == "?":
            return self.mark(f"{name} is not set on line {line}, where the script ends without it")
        if part.every or value not in (None, "") or not re.fullmatch(NAME, name):
            # Of an array it sets the first word.
            self.forget(name, f"{name} is set on line {line} by {part.operator}")
            return self.mark(f"{name} is set on line {line} by {part.operator}")
        self.assign(Assigned(name, None, False, ShellWord(line, part.otherwise)))
        return self._value(name, line) or ""

    def _unknown_of(self, value: _Value | None, part: Reference) -> str:
        """Return the mark of what an operator cannot decide; nothing where it can."""
        if value is None:
            return self.mark(f"{part.name} {self._if_unset}") if self._if_unset else ""
        values = value if isinstance(value, list) else [value]
        found = next((match for match in map(MARK.search, values if part.every else values[:1]) if match), None)
        if found is not None:
            return self._more.get(found[0], found[0])
        # Whether such an array is empty is decided otherwise by bash's versions.
        return (
            self.mark(f"{part.name} has an empty element")
            if part.every and part.operator[0] == ":" and "" in values
            else ""
        )

    def _emit(self, value: _Value, part: Reference, state: _Fields, line: int) -> None:
        values = value if isinstance(value, list) else [value]
        values = values if part.every else values[:1] or [""]
        self._spend(sum(map(len, values)) + len(values), line)
        if not part.quoted:
            state.add_unquoted(" ".join(values))
        elif part.every == "*" or not state.split:
            state.add(" ".join(values))
        else:
            state.is_void, state.is_word = state.is_void or not values, state.is_word or bool(values)
            for place, one in enumerate(values):
                if place:
                    state.end()
                state.add(one, loosely=part.every == "@")

    def _value(self, name: str, line: int, every: bool = False) -> _Value | None:
        """None where the script sets it nowhere."""
        if name in self.given:
            return shlex.split(self.given[name]) if every else self.given[name]
        if _OF_BASH.fullmatch(name):
            return self.mark(f"{name} is bash's own (line {line})")
        if name in self._values:
            value = self._values[name]
            if name in self._texts:
                self._text_marks.update(found[0] for found in MARK.finditer(_first(value) or ""))
            return value
        if name in self._lost:
            return self.mark(f"{name} {self._lost[name]}")
        if _OF_A_LOGIN.fullmatch(name):
            return self.mark(f"{name} is set by a login, not in the script (line {line})")
        return self._argument(name, line) if name in "@*" or name.isdecimal() else None

    def _argument(self, name: str, line: int) -> _Value | None:
        if self.called or self.in_function:
            return self.mark(f"${name} on line {line} {self.called or 'is an argument of a function'}")
        # A script that is read was called without arguments.
        return [] if name in "@*" else None

    def _compute(self, line: int, inner: tuple[Part, ...]) -> str:
        text = "".join(self.fields(ShellWord(line, inner), split=False))
        shown = f"$(({' '.join(text.split())[:40]})) on line {line}"
        self.judge_sum(text, line, shown)
        held = {name: _first(self._value(name, line)) or "" for name in _NAMES.findall(text)}
        unknown = next(filter(None, map(MARK.search, (text, *held.values()))), None)
        if unknown is None and "" in held.values():
            name = next(name for name, value in held.items() if value == "")
            unknown = MARK.search(self.mark(f"{name} is not set in the script (line {line})"))
        # Where bash finds no sum it leaves the whole command out, so what is unknown has to be a number at least.
        result = compute(MARK.sub(" 1 ", text), lambda name: MARK.sub("1", held[name]) or "1")
        if result is None:
            raise ValueError(
                f"line {line}: {shown} is not read: write whole numbers, + - * / % and brackets, or the result"
            )
        return str(result) if unknown is None else self._more.get(unknown[0], unknown[0])


def _first(value: _Value | None) -> str | None:
    return (value[0] if value else None) if isinstance(value, list) else value


def _is_text(said: Assigned, new: _Value) -> bool:
    """Return whether what is assigned may be no number."""
    is_sum = all(isinstance(part, Arithmetic) or part == Text("", True) for part in said.value.parts)
    return not is_sum and not is_number(_first(new) or "0")


def _added(said: Assigned) -> list[Part] | None:
    """Return what an assignment puts behind what the variable holds, of an array nothing; None if it sets it anew."""
    elements = said.value.elements
    parts = said.value.parts if elements is None else elements[0].parts if elements else ()
    found = [part for part in parts if part != Text("", True)]
    if said.adds:
        return found
    itself = found.pop(0) if found else None
    if not isinstance(itself, Reference) or (itself.name, itself.operator) != (said.name, ""):
        return None
    return None if elements is not None and (found or itself.every != "@" or not itself.quoted) else found
