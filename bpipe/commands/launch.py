"""Let a Megatron launch say what other commands ask flags for.

In: `-- FLAGS` or `--from-script FILE`. Out: options, filled in.

An option that was given on the command line itself stands. Knows no flag of Megatron's.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bpipe.flags.flag import Options
from bpipe.launch.bash_words import MOST_CHARACTERS
from bpipe.launch.launch_script import Launch, read_launch
from bpipe.launch.megatron_command import Reading, flags_of_command, read_command
from bpipe.values import printable


def launch_of(options: Options) -> Launch | None:
    """Return the launch that is given, word for word, or None."""
    if options.from_script is None:
        if options.set:
            raise ValueError("--set is for a script's variables: name the script with --from-script")
        return Launch(0, tuple(options.megatron), ()) if options.megatron else None
    if options.megatron:
        raise ValueError("--from-script and flags after -- say the same: give one of them")
    given, data = dict(map(_assignment, options.set or ())), _script(options.from_script)
    with _naming(options):
        try:
            return read_launch(data.decode("utf-8"), given)
        except UnicodeDecodeError as error:
            raise ValueError(f"byte {error.start} is not UTF-8 text: name the script itself, or convert it") from None


def reading_of(options: Options) -> Reading | None:
    """Return what the launch says, or None where no launch is given."""
    launch = launch_of(options)
    if launch is None:
        return None
    with _naming(options):
        return read_command(launch.words, launch.unknown)


def flags_of(options: Options) -> list[str] | None:
    """Return the flags of the training's script, or None where no launch is given."""
    launch = launch_of(options)
    if launch is None:
        return None
    with _naming(options):
        return flags_of_command(launch.words, launch.unknown)


@contextlib.contextmanager
def _naming(options: Options) -> Iterator[None]:
    """Put the script's name, if there is one, in front of errors."""
    try:
        yield
    except ValueError as error:
        if options.from_script is None:
            raise
        raise ValueError(f"{options.from_script}: {error}") from None


def _script(name: str) -> bytes:
    """Read no more of a file than shows that it is too long; some have no end."""
    if name != "-":
        with Path(name).open("rb") as file:
            return file.read(4 * MOST_CHARACTERS)
    if sys.stdin is None:
        raise ValueError("--from-script -: standard input is closed: pipe the script into it, or name a file")
    return sys.stdin.buffer.read(4 * MOST_CHARACTERS)


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"--set {text} is not NAME=VALUE")
    return name, value


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
