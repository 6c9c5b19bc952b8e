"""Values that describe flags, groups of flags, and commands."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from bpipe.config.flags.values import positive

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
