"""Write the reference pages of flags from the table. In: a folder. Out: its pages: `python -m bpipe.reference docs`.

A test holds that they are current.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from bpipe.cli import COMMANDS, command_of
from bpipe.flags.flag import Flag, Group
from bpipe.flags.trainer import TRAINER

_MADE = "Made of the table in `bpipe/flags` by `python -m bpipe.reference docs`: change it there."
_TRAINING = f"""# Flags in training

{_MADE} Megatron's own parser gets these besides; what commands call alike means the same.
"""
_COMMANDS = f"""# Flags of commands

{_MADE} `bpipe COMMAND --help` shows what is most often asked, `--help-all` everything. A name means the same in every command; of two
names the longer is Megatron's. Flags of [the training](flags_training.md) stand on a page of their own.
"""


def pages() -> dict[str, str]:
    """Return every page by the name of its file."""
    training = [_TRAINING]
    for group in TRAINER:
        rows = [flag.of_launch for flag in group.flags]
        training += [f"## {group.title.capitalize()}", "", *_table(rows, [_default(flag) for flag in rows]), ""]
    commands, shown = [_COMMANDS], dict[tuple[str, ...], str]()
    for name, text in COMMANDS.items():
        command = command_of(name)
        commands += [f"## bpipe {name}", "", f"{text[0].upper()}{text[1:]}.", "", "```"]
        commands += [*(task.example for task in command.tasks), "```", ""]
        for group in command.groups:
            first = shown.setdefault((group.title, *(flag.help for flag in group.flags)), name)
            if first != name:
                commands += [f"{group.title.capitalize()}: as [bpipe {first}](#bpipe-{first}) has it.", ""]
                continue
            commands += [*_titled(group), *_table(group.flags), ""]
    return {
        name: "\n".join(lines).rstrip() + "\n"
        for name, lines in (("flags.md", commands), ("flags_training.md", training))
    }


def _titled(group: Group) -> list[str]:
    text = f" ({group.text})" if group.text else ""
    return [f"{group.title.capitalize()}{text}:", ""] if group.title else []


def _table(flags: Iterable[Flag], defaults: Iterable[str] | None = None) -> list[str]:
    """Write a row a flag; with defaults in a column of their own where help does not say them."""
    rows = [[_usage(flag), _cell(flag.help)] for flag in flags]
    if defaults is None:
        return ["| flag | meaning |", "|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    every = (f"| {usage} | {default} | {text} |" for (usage, text), default in zip(rows, defaults, strict=True))
    return ["| flag | default | meaning |", "|---|---|---|", *every]


def _usage(flag: Flag) -> str:
    value = flag.value or "|".join(flag.choices or ())
    names = flag.names.split() or [""]
    return ", ".join(f"`{_cell(f'{name} {value}'.strip())}`" for name in names)


def _default(flag: Flag) -> str:
    return "off" if flag.is_switch else "none" if flag.default is None else f"`{flag.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for name, text in pages().items():
        Path(sys.argv[1], name).write_text(text, encoding="utf-8")
