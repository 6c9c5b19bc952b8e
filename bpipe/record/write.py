"""Write what a run records.

In: the values that `format` defines. Out: files, or lines appended to them. Knows no tensor and no rank.

A line is written at once, so that a killed run leaves whole ones; a file of one value is there whole or not at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bpipe.record.format import COLUMNS, VERSION, Iteration, MemoryMark, TrainingStep
from bpipe.record.keys import written


def write_whole(path: Path, value: Any) -> None:
    """Write a file of one value."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(_keys(value), indent=1) + "\n")
    partial.replace(path)


def begin(path: Path, *values: Any) -> None:
    """Begin a file with these lines, in place of what another run left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(_line, values)))


def append(path: Path, *values: Any) -> None:
    """Append lines to a file."""
    with path.open("a") as file:
        file.write("".join(map(_line, values)))


def _line(value: Any) -> str:
    # The many, and long ones, without spaces.
    separators = (",", ":") if isinstance(value, Iteration | MemoryMark) else None
    return json.dumps(_keys(value), separators=separators) + "\n"


_OWN_MEMORY = ("own_buffers", "own_bytes")
_DIFFERING = (
    "stayed_microbatches",
    "stayed_bytes",
    "passed_microbatches",
    "passed_bytes",
    "largest_bytes",
    "times_grown",
)
_SLICED = ("keys_bytes", "predicted_keys_bytes")
_VERIFIED = ("verified_iterations", "verified_microbatches", "verified_storages", "verified_bytes")


def _keys(value: Any) -> dict[str, Any]:
    kind = type(value)
    keys = {"format": kind.FORMAT, "version": VERSION} if hasattr(kind, "FORMAT") else {}
    keys |= written(value)
    # Only of backwards with halves, of shards, of what a node's own memory holds, of micro-batches that differ in size,
    # of slices, and of what was checked: elsewhere there is nothing to say. Nor do older records name their run.
    some = (*_OWN_MEMORY, *_DIFFERING, *_SLICED, *_VERIFIED)
    for name in ("run", "after_input_bytes", "shard_bytes", "in_shards_bytes", *some):
        if not keys.get(name, True):
            del keys[name]
    if isinstance(value, Iteration):
        keys["columns"] = [column.name for column in COLUMNS]
        keys["actions"] = [
            [None if one is None else column.rule.write(one) for column, one in zip(COLUMNS, row, strict=True)]
            for row in value.rows
        ]
    if isinstance(value, TrainingStep):
        exact = {name: None if number is None else number.hex() for name, number in value.numbers.items()}
        keys = {"iteration": keys.pop("iteration"), **exact, **keys}
    return keys
