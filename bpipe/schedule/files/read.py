"""Reading a schedule from a file in CSV or JSON, without checking any rule."""

from __future__ import annotations

import sys
from pathlib import Path

from bpipe.schedule.files.document import read_json
from bpipe.schedule.files.text import TextError, read_csv
from bpipe.schedule.schedule import Schedule

STANDARD_INPUT = "-"


def read(text: str) -> Schedule:
    """Read a schedule from CSV or JSON, told apart by how they begin."""
    if text.lstrip(" \n\r\t").startswith("{"):
        return read_json(text)
    first, _, rest = text.partition("\n")
    if first.startswith("#") and rest.startswith("slot"):
        raise TextError("line 2: 'slot' begins a grid, which is not read: write the schedule with --format csv or json")
    return read_csv(text)


def read_file(name: str) -> Schedule:
    """Read a schedule from a file; `-` is standard input.

    Args:
        name: The file; its ending says whether it is CSV or JSON.

    Returns:
        The checked schedule.

    Raises:
        OSError: The file cannot be read.
        TextError: It is not a schedule; names the file.
    """
    if name == STANDARD_INPUT and sys.stdin is None:
        raise ValueError("--input -: standard input is closed")
    source = source_of(name)
    try:
        data = sys.stdin.buffer.read() if name == STANDARD_INPUT else Path(name).read_bytes()
        return read(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TextError(f"{source}: byte {error.start} is not UTF-8 text") from None
    except ValueError as error:
        raise TextError(f"{source}: {error}") from None


def source_of(name: str) -> str:
    """Return a file's name in words."""
    return "standard input" if name == STANDARD_INPUT else name
