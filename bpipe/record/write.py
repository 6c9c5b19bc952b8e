"""Write what a run records, as `format` defines it.

A line is written at once, so that a killed run leaves whole ones; a file of one value is written whole or not at all.
"""

import json
from pathlib import Path
from typing import Any

from bpipe.record.format import COLUMNS, VERSION, Iteration, MemoryMark, TrainingStep, written


def write_whole(path: Path, value: Any) -> None:
    """Write a file of one value."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(_keys(value), indent=1) + "\n")
    partial.replace(path)


def begin(path: Path, *values: Any) -> None:
    """Begin a file with these lines, and replace what another run left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(_line, values)))


def append(path: Path, *values: Any) -> None:
    """Append lines to a file."""
    with path.open("a") as file:
        file.write("".join(map(_line, values)))


def _line(value: Any) -> str:
    # The long ones, of which there are many, have no spaces.
    separators = (",", ":") if isinstance(value, Iteration | MemoryMark) else None
    return json.dumps(_keys(value), separators=separators) + "\n"


def _keys(value: Any) -> dict[str, Any]:
    kind = type(value)
    keys = {"format": kind.FORMAT, "version": VERSION} if hasattr(kind, "FORMAT") else {}
    keys |= written(value)
    if isinstance(value, Iteration):
        keys["columns"] = [column.name for column in COLUMNS]
        keys["actions"] = [
            [None if cell is None else column.rule.write(cell) for column, cell in zip(COLUMNS, row, strict=True)]
            for row in value.rows
        ]
    if isinstance(value, TrainingStep):
        exact = {name: None if number is None else number.hex() for name, number in value.numbers.items()}
        keys = {"iteration": keys.pop("iteration"), **exact, **keys}
    return keys
