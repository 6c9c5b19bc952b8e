"""Read the values of flags: types for argparse.

In: what stands on a command line. Out: numbers within what anybody can use, exactly.

Whoever has flags reads them so, the commands and Megatron's parser alike. Knows no flag.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from fractions import Fraction

from bpipe.formats.text import TextError, read_costs, read_numbers, read_share

# Beyond every batch and every cluster, and far below where numbers stop being exact.
LARGEST = 10**12

# What is chosen, and not given.
AUTO = "auto"

# What the arrangements of hosts mean (`ir.hosts`), in the help of every command that has them.
HOSTS_SAID = (
    "pair: to the other of its pair; pool: to any rank with room; host: into its own node's memory; all: to any rank "
    "with room, and what "
    "none has room for into its own node's memory (default pair)"
)


def positive(text: str) -> int:
    """Read a whole number from 1 on."""
    number = int(text) if re.fullmatch("[+-]?[0-9]{1,40}", text) else None
    if number is None or not 1 <= number <= LARGEST:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} must be a whole number, at least 1" + (f" and at most {LARGEST}" if number else "")
        )
    return number


def group_size(text: str) -> int | str:
    """Read a whole number from 1 on, or `auto`."""
    return text if text == AUTO else positive(text)


def seconds(text: str) -> float:
    """Read a duration above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} must be a number of seconds above 0")
    return number


def factor(text: str) -> float:
    """Read a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, such as 1.25")
    return number


def share(text: str) -> Fraction:
    """Read a share of a micro-batch exactly: `0.5`, and above 1 where more is held than was saved."""
    return _read(read_share, text, "share")


def counted(text: str) -> int:
    """Read a whole number from 0 on."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} must be a whole number, at least 0")
    return int(text)


def costs(text: str) -> tuple[Fraction, ...]:
    """Read `1,2` or `1,1.5,1/2` exactly: a forward and a backward, or a forward, dgrad and wgrad."""
    return _read(read_costs, text, 2, 3)


def costs_of_halves(text: str) -> tuple[Fraction, ...]:
    """Read `1,1.5,1/2` exactly: a forward, dgrad and wgrad."""
    return _read(read_costs, text, 3, 3)


def hop(text: str) -> Fraction:
    """Read `0.05` or `1/20` exactly: the duration of a message."""
    return _read(read_costs, text, 1, 1)[0]


def numbers(text: str) -> tuple[int, ...]:
    """Read `3` or `3,3,2,1`."""
    return _read(read_numbers, text)


def _read[**P, T](read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What is no such text is a mistyped flag."""
    try:
        return read(*args, **kwargs)
    except TextError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
