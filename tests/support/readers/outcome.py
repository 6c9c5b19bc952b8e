"""Run the command on an input, and say whether it refused it as it should.

In: its arguments. Out: what it printed, or None.

A reader fails where it ends in a traceback or refuses without naming the file; `judge_numbers` finds what no answer may
say.
"""

import contextlib
import io
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bpipe.cli import main as bpipe

# What a terminal obeys.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


SECONDS = ("elapsed_s", "iteration_s", "step_s", "pipeline_s", "exposed_s", "seconds")


class Wrong(Exception):
    """A reader took what it must not, or refused without saying what."""


@dataclass(frozen=True)
class Reader:
    """`texts` are sound inputs; `damage` makes one that may not be; `judge` raises Wrong, and says whether it was
    accepted."""

    texts: Callable[[Path], list[str]]
    damage: Callable[[str, random.Random], str]
    judge: Callable[[Path, str, random.Random], bool]


def run_command(arguments: list[str]) -> tuple[int, str, str]:
    """Run the command in this process and return what it prints."""
    out, err = io.StringIO(), io.StringIO()
    # What is written as bytes goes to a buffer of its own.
    out.buffer = io.BytesIO()  # type: ignore[misc]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = bpipe(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, out.getvalue() + out.buffer.getvalue().decode("latin-1"), err.getvalue()


def outcome(arguments: list[str], path: Path | None) -> str | None:
    """What the command printed, None where it refused. Raises Wrong for a refusal that says nothing."""
    status, printed, error = run_command(arguments)
    steering = _STEERING.search(printed) or _STEERING.search(error)
    if steering is not None:
        raise Wrong(f"{steering[0]!r} of the input is printed as it stands")
    if status == 0:
        return printed
    if status != 2 or "Traceback" in error or ": error: " not in error:
        raise Wrong(f"status {status}, and says {error!r:.300}")
    if path is not None and str(path) not in error:
        raise Wrong(f"the refusal does not name the file: {error!r:.300}")
    return None


def judge_answer(arguments: list[str], path: Path | None = None, limit: float = math.inf) -> bool:
    """Return whether the command took it; what it prints as JSON must be possible."""
    printed = outcome(arguments, path)
    if printed is not None:
        judge_numbers("", json.loads(printed), limit)
    return printed is not None


def is_number(value: Any, least: float, limit: float) -> bool:
    """Return whether it is a number, and no truth, within the limits."""
    return type(value) in (int, float) and least <= value <= limit


def judge_numbers(name: str, value: Any, limit: float = 1e21) -> None:
    """What a report says: no seconds below 0, no share above 1, nothing endless.

    A prediction of absurd sizes may be absurd.
    """
    inner = (
        value.items()
        if isinstance(value, dict)
        else ((name, item) for item in value)
        if isinstance(value, list)
        else ()
    )
    for key, item in inner:
        judge_numbers(key, item, limit)
    if type(value) in (int, float):
        # Seconds that two clocks disagree on may fall short of nothing, a little.
        least = 0 if name == "mfu" else -1 if name in SECONDS else -limit
        if not math.isfinite(value) or not least <= value <= (1 if name == "mfu" else limit):
            raise Wrong(f"the report says that {name} is {value}")
