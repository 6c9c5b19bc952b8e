"""Read what a run said of each iteration, and find where two runs differ, in bits.

In: the iterations.jsonl of a `--bpipe-report` folder. Out: every number of every iteration, and the differences between two runs. Knows
no stages, no logs, and does not print. compare_runs.py and compare_loss.py stand on it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOSS = "lm loss"
FILE = "iterations.jsonl"

Values = dict[str, float | None]
Iterations = dict[int, Values]


class ReportError(ValueError):
    """What a run left cannot be used; the message names the file."""


def read_text(path: Path) -> str:
    try:
        # A log may hold anything; where it matters, what was replaced is no number any more.
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}; did the run end well? Its log says more") from error


def read_json(path: Path, text: str, line: int | None = None) -> dict[str, Any]:
    where = f"{path}, line {line}" if line is not None else str(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ReportError(f"{where}: not JSON, so the run was perhaps cut off: {error}") from error
    if not isinstance(value, dict):
        raise ReportError(f"{where}: not a JSON object")
    return value


def exact(value: Any) -> float | None:
    """A number as `float.hex` wrote it, every bit kept; None where the run had none."""
    return None if value is None else float.fromhex(value)


def read_iterations(path: Path) -> Iterations:
    """Every iteration of the file, which need not begin at 1. Where an iteration was run again, the last time counts."""
    iterations: Iterations = {}
    for number, text in enumerate(read_text(path).splitlines(), start=1):
        record = read_json(path, text, number)
        try:
            iteration = int(record.pop("iteration"))
            skipped = float(record.pop("skipped"))
            # Never the same twice, and no result.
            record.pop("elapsed_s", None)
            values = {name: exact(value) for name, value in record.items()}
            if values[LOSS] is None or "grad_norm" not in values:
                raise KeyError(f"{LOSS} or grad_norm")
        except (KeyError, TypeError, ValueError) as error:
            raise ReportError(f"{path}, line {number}: no usable {error}") from error
        iterations[iteration] = {**values, "skipped": skipped}
    return iterations


def bits(value: float | None) -> bytes:
    """Bits, not `==`: that calls 0.0 and -0.0 equal, and a NaN unequal to itself."""
    return b"" if value is None else struct.pack("<d", value)


@dataclass(frozen=True, slots=True)
class Difference:
    """One number that two runs do not agree on; None where a run has none."""

    iteration: int
    name: str
    one: float | None
    other: float | None

    def between(self, one: str, other: str) -> str:
        """The same in words, with the names of the two runs."""
        return f"{self.name} of iteration {self.iteration}: {shown(self.one)} {one}, {shown(self.other)} {other}"


def shown(value: float | None) -> str:
    return "none" if value is None else f"{value!r} ({value.hex()})"


def differences(one: Iterations, other: Iterations) -> list[Difference]:
    """Every number, of the iterations that both have, that is not the same to the last bit; in the order of the run."""
    return [
        Difference(iteration, name, one[iteration].get(name), other[iteration].get(name))
        for iteration in sorted(one.keys() & other.keys())
        for name in sorted(one[iteration].keys() | other[iteration].keys())
        if (name in one[iteration]) != (name in other[iteration]) or bits(one[iteration].get(name)) != bits(other[iteration].get(name))
    ]
