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

_MADE = "Generated from the table in `bpipe/flags` by `python -m bpipe.reference docs`: make changes there."
_TRAINING = f"""# Flags in training

{_MADE}
These flags are added to Megatron's own. If a `bpipe` command has the same flag without `bpipe-`, it means the same.
"""
_COMMANDS = f"""# Flags of commands

{_MADE}
`bpipe COMMAND --help` shows the most common flags, `--help-all` all of them. A flag means the same in every command. If
it has two names, the longer is Megatron's. [Flags in training](flags_training.md) lists the flags of a training run.
"""


def pages() -> dict[str, str]:
    """Return every page by the name of its file."""
    training = [_TRAINING]
    for group in TRAINER:
        training += [f"## {_capital(group.title)}", "", *_table(flag.of_launch for flag in group.flags), ""]
    commands, shown = [_COMMANDS], dict[tuple[str, ...], str]()
    for name, text in COMMANDS.items():
        command = command_of(name)
        commands += [f"## bpipe {name}", "", f"{_capital(text)}.", "", "```"]
        commands += [*(task.example for task in command.tasks), "```", ""]
        for group in command.groups:
            first = shown.setdefault((group.title, *(flag.help for flag in group.flags)), name)
            if first != name:
                commands += [f"{_capital(group.title)}: the same as for [bpipe {first}](#bpipe-{first}).", ""]
                continue
            commands += [*_titled(group), *_table(group.flags), ""]
    return {
        name: "\n".join(lines).rstrip() + "\n"
        for name, lines in (("flags.md", commands), ("flags_training.md", training))
    }


def _titled(group: Group) -> list[str]:
    text = f" ({group.text})" if group.text else ""
    return [f"{_capital(group.title)}{text}:", ""] if group.title else []


def _table(flags: Iterable[Flag]) -> list[str]:
    """Write a row a flag; its help says the default."""
    return ["| flag | meaning |", "|---|---|", *(f"| {_usage(flag)} | {_cell(flag.help)} |" for flag in flags)]


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def _usage(flag: Flag) -> str:
    value = flag.value or "|".join(flag.choices or ())
    names = flag.names.split() or [""]
    return ", ".join(f"`{_cell(f'{name} {value}'.strip())}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for name, text in pages().items():
        Path(sys.argv[1], name).write_text(text, encoding="utf-8")
