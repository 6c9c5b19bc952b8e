"""Parse command lines, and name what was mistyped. In: argparse's declarations, arguments. Out: options, or one line of error on stderr.

Also the types of flags: numbers within what any command can use. Knows no command.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import takewhile
from typing import Any, NoReturn

from bpipe.ir.text import TextError, read_costs, read_numbers, read_share
from bpipe.names import nearest, unknown

# Beyond every batch and every cluster, and far below where numbers stop being exact.
LARGEST = 10**12

# What is chosen, and not given.
AUTO = "auto"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes no abbreviations and says which flag or choice was probably meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def check_flags(self, arguments: Sequence[str]) -> None:
        """End with the nearest flag for the first that is unknown: argparse itself would first ask for the one that was mistyped."""
        known = self._option_string_actions
        flags = [one.partition("=")[0] for one in takewhile(lambda one: one != "--", arguments) if one.startswith("--")]
        wrong = next((flag for flag in flags if flag not in known), None)
        if wrong is not None and not {"-h", "--help"} & set(arguments):
            meant = nearest(wrong, (flag for flag in known if flag.startswith("--")))
            self.error(f"unknown flag {wrong}{meant and ','}{meant}")

    def error(self, message: str) -> NoReturn:
        """One line: the usage of a command with thirty flags would push it off the screen."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, unknown("command" if action.dest == "command" else "choice", str(value), action.choices))


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text) if re.fullmatch("[+-]?[0-9]{1,40}", text) else None
    if number is None or not 1 <= number <= LARGEST:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} must be a whole number, at least 1" + (f" and at most {LARGEST}" if number else "")
        )
    return number


def group_size(text: str) -> int | str:
    """A whole number from 1 on, or `auto`."""
    return text if text == AUTO else positive(text)


def seconds(text: str) -> float:
    """A duration above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} must be a number of seconds above 0")
    return number


def share(text: str) -> Fraction:
    """A share of a micro-batch, exactly: `0.5`, and above 1 where more is held than was saved."""
    try:
        return read_share(text, "share")
    except TextError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def counted(text: str) -> int:
    """A whole number from 0 on."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} must be a whole number, at least 0")
    return int(text)


def costs(text: str) -> tuple[Fraction, ...]:
    """`1,2` or `1,1.5,1/2`: a forward and a backward, or a forward and the halves of a backward, exactly."""
    try:
        return read_costs(text, 2, 3)
    except TextError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def hop(text: str) -> Fraction:
    """`0.05` or `1/20`: what a message takes, exactly."""
    try:
        return read_costs(text, 1, 1)[0]
    except TextError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def numbers(text: str) -> tuple[int, ...]:
    """`3` or `3,3,2,1`."""
    try:
        return read_numbers(text)
    except TextError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
