"""Describe a flag once: its field, its names, how its text is read, and what it says.

In: a row of the table. Out: a `Flag`.

Knows no flag and no parser.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

# From the text of a value to the value. Raises ValueError with the reason.
Read = Callable[[str], object]


class Options(Namespace):
    """The values that were given, by the fields of their flags."""


class InLaunch(NamedTuple):
    """A flag as Megatron's command line has it. What is None is as the row's own.

    `default`: what is meant where a launch leaves it out. `is_read`: whether a launch's value is predicted.
    """

    name: str | None = None
    default: object = None
    choices: Collection[str] | None = None
    read: Read | None = None
    help: str | None = None
    value: str | None = None
    is_read: bool = True


@dataclass(frozen=True, slots=True)
class Flag:
    """One row of the table.

    `names`: what commands call it, the longest first; none for a flag of a launch alone, one without dashes for what
    has no flag. `value`: what stands for its value in help; empty for a switch. `count`: how many values, as argparse
    has it. `launch`: its face there.
    """

    field: str
    names: str
    help: str
    value: str = ""
    read: Read | None = None
    default: object = None
    choices: Collection[str] | None = None
    count: int | str | None = None
    launch: InLaunch | None = None
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
        """Name on Megatron's command line. Raises ValueError where it has none."""
        if self.launch is None:
            raise ValueError(f"{self.field} is no flag of a launch")
        return self.launch.name or self.names.split()[0]

    @property
    def of_launch(self) -> Flag:
        """The row as Megatron's parser has it."""
        assert self.launch is not None
        _, default, choices, read, text, value, _ = self.launch
        return replace(
            self,
            field=self.in_launch[2:].replace("-", "_"),
            names=self.in_launch,
            help=_as_the_trainer_calls_it(self.help) if text is None else text,
            value=self.value if value is None else value,
            read=self.read if read is None else read,
            default=False if self.is_switch else default,
            choices=self.choices if choices is None else choices or None,
            required=False,
        )

    @property
    def is_listed(self) -> bool:
        """Whether it takes any number of values that may stand behind each other or with commas between them."""
        return self.count == "+" and self.choices is None and bool(self.names)

    def several(self, help: str, default: object = None, **changes: object) -> Flag:
        """Return the flag with any number of values, behind each other or with commas between them."""
        return replace(self, help=help, default=default, count="+", **changes)  # type: ignore[arg-type]

    def where_a_launch_may_say_it(self) -> Flag:
        """Return the flag without a default of its own: a launch comes before that."""
        return replace(self, default=None)


def _as_the_trainer_calls_it(text: str) -> str:
    """Name the trainer's flags in a text that names a command's."""
    return re.sub(
        r"--(balance bpipe|bound|costs|group|memory|vocabulary)\b", lambda found: f"--bpipe-{found[1]}", text
    ).replace("--bpipe-balance bpipe", "--bpipe")


class Group(NamedTuple):
    """Flags that belong together, under a title."""

    title: str
    flags: tuple[Flag, ...]
    text: str = ""


class Task(NamedTuple):
    """Task of a command: an example, and the fields of the flags for it."""

    title: str
    example: str
    fields: tuple[str, ...]


class Command(NamedTuple):
    """The flags of a sub-command, and the tasks that its first screen of help shows."""

    groups: tuple[Group, ...]
    tasks: tuple[Task, ...]

    @property
    def flags(self) -> tuple[Flag, ...]:
        """All of its groups."""
        return tuple(flag for group in self.groups for flag in group.flags)
