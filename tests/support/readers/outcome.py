"""Run a command on an input, and check that it accepts or refuses it properly.

A reader fails if it ends in a traceback or refuses without naming the file; `judge_numbers` finds impossible numbers.
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

# Control characters of terminals.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


# As large as the record says, and no larger.
FLOPS = ("mfu", "flops_per_iteration")
SECONDS = ("elapsed_s", "iteration_s", "step_s", "pipeline_s", "exposed_s", "seconds")


class Wrong(Exception):
    """A reader accepted invalid input, or refused without a reason."""


@dataclass(frozen=True)
class Reader:
    """A reader under test.

    Attributes:
        texts: Valid inputs.
        damage: Makes an input that may be invalid.
        judge: Returns whether an input was accepted; raises Wrong.
    """

    texts: Callable[[Path], list[str]]
    damage: Callable[[str, random.Random], str]
    judge: Callable[[Path, str, random.Random], bool]


def run_command(arguments: list[str]) -> tuple[int, str, str]:
    """Run the command in this process and return what it prints."""
    out, err = io.StringIO(), io.StringIO()
    # Bytes are written to a separate buffer.
    out.buffer = io.BytesIO()  # type: ignore[misc]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = bpipe(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, out.getvalue() + out.buffer.getvalue().decode("latin-1"), err.getvalue()


def outcome(arguments: list[str], path: Path | None) -> str | None:
    """Return what the command printed, or None if it refused; raise Wrong for a refusal without a reason."""
    status, printed, error = run_command(arguments)
    steering = _STEERING.search(printed) or _STEERING.search(error)
    if steering is not None:
        raise Wrong(f"{steering[0]!r} of the input is printed unchanged")
    if status == 0:
        return printed
    if status != 2 or "Traceback" in error or ": error: " not in error:
        raise Wrong(f"status {status}, and says {error!r:.300}")
    if path is not None and str(path) not in error:
        raise Wrong(f"the refusal does not name the file: {error!r:.300}")
    return None


def judge_answer(arguments: list[str], path: Path | None = None, limit: float = math.inf) -> bool:
    """Return whether the command accepted its input; numbers in its JSON must be possible."""
    printed = outcome(arguments, path)
    if printed is not None:
        judge_numbers("", json.loads(printed), limit)
    return printed is not None


def is_number(value: Any, least: float, limit: float) -> bool:
    """Whether the value is a number within the limits, and not a boolean."""
    return type(value) in (int, float) and least <= value <= limit


def judge_numbers(name: str, value: Any, limit: float = 1e21) -> None:
    """Check a report's numbers: no seconds below 0. Absurd sizes may give absurd numbers."""
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
        # Seconds measured by two clocks may be slightly negative.
        least = 0 if name == "mfu" else -1 if name in SECONDS else -limit
        if not math.isfinite(value) or not least <= value <= (math.inf if name in FLOPS else limit):
            raise Wrong(f"the report says that {name} is {value}")
