"""Write the reference pages of flags from the table into a folder: `python -m bpipe.reference docs`."""

import sys
from collections.abc import Iterable
from pathlib import Path

from bpipe.cli import COMMANDS, command_of
from bpipe.config.flags.flag import Flag
from bpipe.config.flags.trainer import TRAINER

_MADE = "Generated from the table in `bpipe/config/flags` by `python -m bpipe.reference docs`: make changes there."
_TRAINING = f"""# Flags in training

This page is the reference for the flags that are added to Megatron's own. If a `bpipe` command has the same flag without
`bpipe-`, it means the same. {_MADE}
"""
_COMMANDS = f"""`bpipe COMMAND --help` shows the most common flags, `--help-all` all of them. A flag means the same in every command. If
it has two names, the longer is Megatron's. {_MADE}
"""
# By file, a page's title and its commands, in the order in which groups of flags are first shown.
_PAGES = {
    "flags.md": ("Flags for schedules and runs", ("schedule", "capture", "check-launch", "report", "compare")),
    "flags_planning.md": ("Flags for plans", ("simulate", "plan")),
    "flags_measuring.md": ("Flags for remedies and measurements", ("fit", "trace", "profile")),
}


def pages() -> dict[str, str]:
    """Return every page by the name of its file."""
    training = [_TRAINING]
    for group in TRAINER:
        training += [f"## {_capital(group.title)}", "", *_table(flag.of_launch for flag in group.flags), ""]
    shown = dict[tuple[str, ...], str]()
    lines_of = {file: _page(file, shown) for file in _PAGES} | {"flags_training.md": training}
    return {name: "\n".join(lines).rstrip() + "\n" for name, lines in lines_of.items()}


def _page(file: str, shown: dict[tuple[str, ...], str]) -> list[str]:
    """Return a page's lines. `shown`: where each group of flags is shown already."""
    title, names = _PAGES[file]
    commands = ", ".join(f"`{name}`" for name in names[:-1])
    about = f"This page is the reference for the flags of `bpipe` {commands} and `{names[-1]}`."
    lines = [f"# {title}", "", about, _COMMANDS]
    for name in names:
        command = command_of(name)
        lines += [f"## bpipe {name}", "", f"{_capital(COMMANDS[name])}.", "", "```"]
        lines += [*(task.example for task in command.tasks), "```", ""]
        for group in command.groups:
            place = f"{file}#bpipe-{name}"
            first = shown.setdefault((group.title, *(flag.help for flag in group.flags)), place)
            if first != place:
                of_command = first.partition("#bpipe-")[2]
                lines += [f"{_capital(group.title)}: the same as for [bpipe {of_command}]({first}).", ""]
                continue
            if group.title:
                text = f" ({group.text})" if group.text else ""
                lines += [f"{_capital(group.title)}{text}:", ""]
            lines += [*_table(group.flags), ""]
    return lines


def _table(flags: Iterable[Flag]) -> list[str]:
    """Return a row per flag, whose help has the default."""
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
