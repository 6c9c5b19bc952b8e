"""Parse command lines, and name what was mistyped.

In: argparse's declarations, arguments. Out: options, or one line of error on stderr.

Knows no command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn

from bpipe.names import nearest, unknown

# Where a command that takes a launch keeps its words.
REST = "megatron"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes no abbreviations and says which flag or choice was probably meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse what stands behind `--` as a launch where one is taken; argparse fails there if another positional
        precedes a flag."""
        if args is None or "--" not in args or self.get_default(REST) is None:
            return super().parse_known_args(args, namespace)
        place = args.index("--")
        found, unknown_words = super().parse_known_args(args[:place], namespace)
        setattr(found, REST, [*getattr(found, REST), *args[place + 1 :]])
        return found, unknown_words

    def check_flags(self, arguments: Sequence[str]) -> None:
        """End with the nearest flag for the first that is unknown: argparse itself would first ask for the one that
        was mistyped."""
        known = self._option_string_actions
        flags = [one.partition("=")[0] for one in takewhile(lambda one: one != "--", arguments) if one.startswith("--")]
        wrong = next((flag for flag in flags if flag not in known), None)
        if wrong is not None and not {"-h", "--help"} & set(arguments):
            meant = nearest(wrong, (flag for flag in known if flag.startswith("--")))
            self.error(f"unknown flag {wrong}{meant and ','}{meant}")

    def error(self, message: str) -> NoReturn:
        """Print an error as one line: the usage of a command with thirty flags would push it off the screen."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action, unknown("command" if action.dest == "command" else "choice", str(value), action.choices)
            )
