"""Let a Megatron launch say what other commands ask flags for.

In: `-- FLAGS` or `--launch FILE`. Out: options, filled in.

An option that was given on the command line itself stands. Knows no flag of Megatron's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bpipe.config.flags.flag import Options
from bpipe.config.launch.capture import read_launches
from bpipe.config.launch.megatron_command import Reading, flags_of_command, read_command
from bpipe.config.launch.megatron_names import without_own
from bpipe.values import printable

# More than the launches of any script.
_MOST_BYTES = 4_000_000


def words_of(options: Options) -> list[str] | None:
    """Return the words of the launch that is given, or None."""
    if options.launch is None:
        return list(options.megatron) or None
    if options.megatron:
        raise ValueError("--launch and flags after -- say the same: give one of them")
    name, colon, number = options.launch.rpartition(":")
    if not colon or not number.isdecimal():
        name, number = options.launch, ""
    text = _content(name)
    try:
        launches = read_launches(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}: write it with bpipe capture --output FILE -- bash SCRIPT") from None
    if not number and len(launches) > 1:
        raise ValueError(f"{name} has {len(launches)} launches: choose one, such as the first with --launch {name}:1")
    place = int(number[:9] or 1)
    if not 1 <= place <= len(launches):
        raise ValueError(f"--launch {options.launch}: the last launch in the file is {len(launches)}")
    return launches[place - 1]


def reading_of(options: Options) -> Reading | None:
    """Return what the launch says, or None if no launch is given."""
    words = words_of(options)
    return None if words is None else read_command(words, is_captured=options.launch is not None)


def flags_of(words: list[str], options: Options) -> list[str]:
    """Return Megatron's flags in a launch. Those that only its script has are named on stderr."""
    if options.launch is None:
        return flags_of_command(words)
    flags, own = without_own(flags_of_command(words, is_captured=True))
    for name in own:
        print(f"from the launch: Megatron has no {printable(name)}: not considered", file=sys.stderr)
    return flags


def _content(name: str) -> bytes:
    """Read a file, but not one without an end."""
    if name != "-":
        with Path(name).open("rb") as file:
            return file.read(_MOST_BYTES)
    if sys.stdin is None:
        raise ValueError("--launch -: standard input is closed: pipe a capture into it, or name a file")
    return sys.stdin.buffer.read(_MOST_BYTES)


def lines(reading: Reading | None) -> list[str]:
    """Return the notes of the translation that a user must read."""
    if reading is None:
        return []
    found = [f"from the launch: {note}" for note in reading.notes]
    if reading.not_considered:
        found.append(f"not considered: {' '.join(reading.not_considered)}")
    return list(map(printable, found))


def launch_document(reading: Reading) -> dict[str, Any]:
    """Return the notes of the translation as JSON values."""
    return {"notes": list(reading.notes), "not_considered": list(reading.not_considered)}
