"""Parsers made from the table, which name what was probably meant by a mistyped flag."""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import chain, takewhile
from typing import Any, NoReturn

from bpipe.config.flags.flag import Command, Flag, Options, Read
from bpipe.names import nearest, unknown

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
