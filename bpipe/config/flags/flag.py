"""Flags, groups of flags and commands, and parsers made of them, which name what a mistyped flag probably meant."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from typing import Any, NamedTuple, NoReturn

from bpipe.config.flags.values import positive
from bpipe.names import nearest, unknown

# From the text of a value to the value. Raises ValueError with the reason.
Read = Callable[[str], object]


class Options(Namespace):
    """The values that were given, by the fields of their flags."""


class InLaunch(NamedTuple):
    """A flag on Megatron's command line. Fields other than `default` and `is_read` are the row's own if they are None."""

    name: str | None = None
    default: object = None
    """Value of a launch without the flag."""
    choices: Collection[str] | None = None
    read: Read | None = None
    help: str | None = None
    value: str | None = None
    is_read: bool = True
    """Whether predictions read it from a launch."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One row of the table."""

    field: str
    """Name of the value in `Options`."""
    names: str
    """Names in commands, the longest first; empty for a positional argument or a flag of launches only."""
    help: str
    value: str = ""
    """Placeholder of the value in help; empty for a switch."""
    read: Read | None = None
    default: object = None
    choices: Collection[str] | None = None
    count: int | str | None = None
    """Number of values, as argparse's `nargs`."""
    launch: InLaunch | None = None
    """The flag in launches; None if they do not have it."""
    required: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether it has no value."""
        return not self.value and self.choices is None

    @property
    def name(self) -> str:
        """Name in messages: the shortest of its names."""
        return self.names.split()[-1] if self.names else self.value

    @property
    def in_launch(self) -> str:
        """Name on Megatron's command line."""
        assert self.launch is not None
        return self.launch.name or self.names.split()[0]

    @property
    def of_launch(self) -> Flag:
        """The row as Megatron's parser has it."""
        assert self.launch is not None
        _, default, choices, read, text, value, _ = self.launch
        # The trainer's flags in place of the command's.
        own = re.sub(r"--(balance bpipe|bound|costs|group|memory|vocabulary)\b", r"--bpipe-\1", self.help)
        return replace(
            self,
            field=self.in_launch[2:].replace("-", "_"),
            names=self.in_launch,
            help=own.replace("--bpipe-balance bpipe", "--bpipe") if text is None else text,
            value=self.value if value is None else value,
            read=self.read if read is None else read,
            default=False if self.is_switch else default,
            choices=self.choices if choices is None else choices or None,
            required=False,
        )

    @property
    def is_listed(self) -> bool:
        """Whether it takes any number of values, separated by spaces or commas."""
        return self.count == "+" and self.choices is None and bool(self.names)

    def several(self, help: str, default: object = None, **changes: object) -> Flag:
        """Return the flag with any number of values, separated by spaces or commas."""
        return replace(self, help=help, default=default, count="+", **changes)  # type: ignore[arg-type]


def number(
    field: str, names: str, help: str, value: str = "N", default: int | None = None, launch: InLaunch | None = None
) -> Flag:
    """Return a flag whose value is a whole number from 1 on."""
    return Flag(field, names, help, value, positive, default, launch=launch)


class Group(NamedTuple):
    """Flags that belong together, under a title."""

    title: str
    flags: tuple[Flag, ...]
    text: str = ""


class Task(NamedTuple):
    """Task of a command: an example, and the fields of the flags for it, separated by spaces."""

    title: str
    example: str
    fields: str


class Command(NamedTuple):
    """The flags of a sub-command, and the tasks that its first screen of help shows."""

    groups: tuple[Group, ...]
    tasks: tuple[Task, ...]

    @property
    def flags(self) -> tuple[Flag, ...]:
        """All of its groups."""
        return tuple(flag for group in self.groups for flag in group.flags)


def group(title: str, *flags: Flag, text: str = "") -> Group:
    """Return a group of flags, with a text under its title."""
    return Group(title, flags, text)


def command(*parts: Group | Task) -> Command:
    """Return a command of its groups of flags and its tasks."""
    groups = tuple(part for part in parts if isinstance(part, Group))
    return Command(groups, tuple(part for part in parts if isinstance(part, Task)))


# Field of the words of a launch.
REST = "megatron"
_HELP = ("-h", "--help", "--help-all")
# Columns of a flag's name on the first screen, and of its longest line.
_NAME_COLUMNS, _MOST_COLUMNS = 30, 120


def declare(to: Any, flag: Flag, commas: bool = True) -> None:
    """Add a row to a parser or to a group of one. `commas`: whether they separate the values of a list, as spaces do."""
    names: list[str] = flag.names.split() or [flag.field]
    settings: dict[str, Any] = {"help": flag.help.replace("%", "%%")}
    if flag.names:
        settings["dest"] = flag.field
    if flag.is_switch:
        to.add_argument(*names, action="store_true", **settings)
        return
    if flag.required and flag.names:
        settings["required"] = flag.required
    if flag.count is not None:
        settings["nargs"] = flag.count
    read = flag.read
    if commas and flag.is_listed and read is not None:
        settings |= {"type": _with_reason(lambda text: list(map(read, text.split(",")))), "action": _Flat}
    elif read is not None:
        settings["type"] = _with_reason(read)
    to.add_argument(*names, default=flag.default, choices=flag.choices, metavar=flag.value or None, **settings)


class _LaunchParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"Megatron's flags: {message}")


def parser_of_launch(rows: Iterable[Flag]) -> argparse.ArgumentParser:
    """Return a parser of Megatron's flags that raises ValueError for errors."""
    parser = _LaunchParser(prog="pretrain_gpt.py", allow_abbrev=False, add_help=False)
    for flag in rows:
        # Megatron's own parser splits no value at a comma.
        declare(parser, flag, commas=False)
    return parser


class _Flat(argparse.Action):
    """Joins lists to one."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, list(chain.from_iterable(values)))


def _with_reason(read: Read) -> Read:
    """Return a reader whose reasons argparse prints: it drops that of a ValueError."""
    if isinstance(read, type):
        return read

    def checked(text: str) -> object:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    checked.__name__ = getattr(read, "__name__", "value")
    return checked


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes no abbreviations and says which flag or choice was probably meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def declare(self, command: Command) -> None:
        """Add a command's flags, and its two pages of help: one screen by task, and all."""
        self.add_argument(
            "-h", "--help", action=_FirstScreen, nargs=0, command=command, help="the most common flags, with examples"
        )
        self.add_argument("--help-all", action="help", help="all flags")
        for group in command.groups:
            to = self.add_argument_group(group.title, group.text or None) if group.title else self
            for flag in group.flags:
                declare(to, flag)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Keep the words after `--` as a launch, if the command takes one; argparse fails on some of them."""
        if args is None or "--" not in args or self.get_default(REST) is None:
            return super().parse_known_args(args, namespace)
        place = args.index("--")
        options, unknown_words = super().parse_known_args(args[:place], namespace)
        setattr(options, REST, [*getattr(options, REST), *args[place + 1 :]])
        return options, unknown_words

    def check_flags(self, arguments: Sequence[str]) -> None:
        """Exit with the nearest flag to the first unknown one: argparse itself would first miss a required flag."""
        actions = self._option_string_actions
        # A word with a space is a value that contains flags.
        words = (word for word in takewhile(lambda word: word != "--", arguments) if " " not in word)
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        wrong = next((flag for flag in flags if flag not in actions), None)
        if wrong is not None and not {*_HELP} & set(arguments):
            meant = nearest(wrong, (flag for flag in actions if flag.startswith("--")))
            self.error(f"unknown flag {wrong}{meant and ','}{meant}")

    def error(self, message: str) -> NoReturn:
        """Print an error as one line: the usage of a command with thirty flags would push it off the screen."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action, unknown("command" if action.dest == "command" else "choice", str(value), action.choices)
            )


class _FirstScreen(argparse.Action):
    """Prints the purpose of a command, an example of each task with its flags, and where to find the other flags."""

    def __init__(self, *, command: Command, **settings: Any) -> None:
        super().__init__(default=argparse.SUPPRESS, **settings)
        self.command = command

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> NoReturn:
        columns = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
        print("\n".join(first_screen(parser, self.command, columns)), file=sys.stdout)
        parser.exit()


def first_screen(parser: argparse.ArgumentParser, command: Command, columns: int) -> list[str]:
    """Return the lines of `--help`."""
    lines = textwrap.wrap(parser.description or "", columns)
    flags = {flag.field: flag for flag in command.flags}
    for title, example, fields in command.tasks:
        lines += ["", f"{title}:", f"  {example}"]
        for flag in map(flags.__getitem__, fields.split()):
            # Its shortest name, and one or two lines of its help.
            value = flag.value or "|".join(flag.choices or ())
            head = f"{flag.name} {value}" if flag.names else value
            head = head if len(head) < _NAME_COLUMNS - 4 else f"{flag.name} ..."
            first, *others = textwrap.wrap(
                flag.help, max(20, columns - _NAME_COLUMNS), max_lines=2, placeholder=" ...", break_on_hyphens=False
            )
            lines += [f"    {head:{_NAME_COLUMNS - 4}}{first}", *(" " * _NAME_COLUMNS + line for line in others)]
    return [*lines, "", f"All {len(flags)} flags: {parser.prog} --help-all"]


def options_of(parser: Parser, arguments: Sequence[str]) -> Options:
    """Parse arguments into values by the fields of the table."""
    return parser.parse_args(arguments, Options())
