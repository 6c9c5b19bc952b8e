"""Read what one run left: its `--bpipe-report` folder, the iterations.jsonl in it, or Megatron's log.

Every number keeps every bit that is in the file. Raises ValueError, with the file's name, for what cannot be used or is
not what the caller expects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from bpipe.record.format import STEPS, SUMMARY, RankSummary
from bpipe.record.keys import values_of
from bpipe.record.one_run import refuse_two_runs
from bpipe.values import a_number, a_whole, an_object, load_json, printable

LOSS = "lm loss"

# It may follow a rank's prefix (`srun -l`, torchrun's --tee); Megatron ends every field with a bar.
_LOG_LINE = re.compile(r"\biteration\s+([0-9]+)/\s*[0-9]+ \|(.*)\|")
_LOG_TIME = "elapsed time per iteration (ms)"
# Fields about the machine's speed, not about what the run computed.
_MACHINE = re.compile(r"time|throughput|energy|power")
# As `float.hex` writes a number.
_EXACT = re.compile(r"-?0x[01]\.[0-9a-f]{1,13}p[+-][0-9]{1,4}|-?inf|nan")

Values = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class StageNumbers:
    """Peak memory of one stage, measured and predicted, and its transfers in an iteration."""

    peak_microbatches: int
    peak_bytes: int
    predicted_microbatches: int
    predicted_bytes: int
    evictions: int
    loads: int


_NUMBERS = tuple(field.name for field in fields(StageNumbers))


@dataclass(frozen=True, slots=True)
class Training:
    """One run. What is not known is empty or None."""

    path: Path
    exact: bool  # whether its numbers have every bit
    iterations: Mapping[int, Values]
    seconds: Mapping[int, float]
    stages: Mapping[int, StageNumbers] = field(default_factory=dict)
    balanced: bool | None = None

    def extent(self) -> str:
        return f"{len(self.iterations)} ({min(self.iterations)} to {max(self.iterations)})"


def read_training(
    path: Path, num_ranks: int | None = None, num_iterations: int | None = None, balanced: bool | None = None
) -> Training:
    """Read a training: a folder or a .jsonl file is a report, any other file a log.

    Args:
        path: the folder or file.
        num_ranks: the number of stages that the report must have.
        num_iterations: the number of iterations that it must have, from 1 on.
        balanced: whether the run must have been balanced.

    Returns:
        The iterations and, of a report, the peaks of each stage.

    Raises:
        ValueError: the file cannot be read, or is not what the arguments say.
    """
    exact = path.is_dir() or path.suffix == ".jsonl"
    iterations, seconds = _read_iterations(path / STEPS if path.is_dir() else path) if exact else _read_log(path)
    if not iterations:
        raise ValueError(
            f"{path}: no iteration in it; is it {'a report' if exact else 'a log of Megatron with --log-interval'}?"
        )
    if num_iterations is not None:
        _check_iterations(path, iterations, num_iterations)
    if not path.is_dir() and not num_ranks and balanced is None:
        return Training(path, exact, iterations, seconds)
    stages, is_balanced = read_stages(path, num_ranks, balanced)
    return Training(path, exact, iterations, seconds, stages, is_balanced)


def read_stages(
    folder: Path, num_ranks: int | None = None, balanced: bool | None = None
) -> tuple[dict[int, StageNumbers], bool | None]:
    """Return each stage's row, and whether the run was balanced. Of replicas of a stage, the largest numbers count."""
    stages: dict[int, StageNumbers] = {}
    was_balanced = balanced
    runs: list[tuple[str, str | None]] = []
    for path in SUMMARY.files(folder):
        stage, row, is_balanced, run = _read_rank(path)
        runs.append((path.name, run))
        if was_balanced is not None and is_balanced != was_balanced:
            swapped = "are the two folders swapped?"
            if balanced is None:
                swapped = "other ranks say the opposite: are they of one run?"
            raise ValueError(f"{path}: this run was {'' if is_balanced else 'not '}balanced; {swapped}")
        was_balanced = is_balanced
        replica = stages.get(stage, row)
        stages[stage] = StageNumbers(*(max(getattr(replica, name), getattr(row, name)) for name in _NUMBERS))
    if runs:
        refuse_two_runs(folder, runs)
    if num_ranks is None and balanced is not None and not stages:
        raise ValueError(f"{folder}: no rank_*.json, so it is not known whether this run was balanced")
    if num_ranks is not None and sorted(stages) != list(range(num_ranks)):
        raise ValueError(
            f"{folder}: has reports of stages {sorted(stages)}, not of 0 to {num_ranks - 1}; did every rank finish?"
        )
    return stages, was_balanced


def _read_rank(path: Path) -> tuple[int, StageNumbers, bool, str | None]:
    try:
        values = values_of(RankSummary, load_json(_read_text(path)), "it")
        absent = next((name for name in ("stage", *_NUMBERS, "balanced") if name not in values), None)
        if absent is not None:
            raise ValueError(f"{absent!r} is missing")
        numbers = StageNumbers(*(values[name] for name in _NUMBERS))
        return values["stage"], numbers, values["balanced"], values.get("run")
    except ValueError as error:
        raise ValueError(f"{path}: not a complete report of a stage; was the run cut off? {error}") from None


def _check_iterations(path: Path, iterations: Mapping[int, Values], wanted: int) -> None:
    missing = [iteration for iteration in range(1, wanted + 1) if iteration not in iterations]
    if missing or len(iterations) != wanted:
        more = " and more" if len(missing) > 5 else ""
        detail = f"iterations {missing[:5]}{more} are missing" if missing else "there are more"
        raise ValueError(f"{path}: {len(iterations)} iterations instead of {wanted}; {detail}")


def _read_iterations(path: Path) -> tuple[dict[int, Values], dict[int, float]]:
    """Return every iteration of the file, which need not begin at 1. If one was run again, the last time counts."""
    iterations: dict[int, Values] = {}
    seconds: dict[int, float] = {}
    for number, text in enumerate(_read_text(path).splitlines(), start=1):
        try:
            values = dict(an_object(load_json(text), "it"))
            iteration = a_whole(values.pop("iteration", None), "iteration")
            skipped = a_whole(values.pop("skipped", None), "skipped")
            # Seconds differ in every run, and are no result.
            elapsed_s = values.pop("elapsed_s", None)
            if values.get(LOSS) is None or "grad_norm" not in values:
                raise ValueError(f"{LOSS} or grad_norm is missing")
            exact = {printable(name): _exact(name, value) for name, value in values.items()}
            iterations[iteration] = {**exact, "skipped": float(skipped)}
            seconds.pop(iteration, None)
            if elapsed_s is not None:
                seconds[iteration] = a_number(elapsed_s, "elapsed_s")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not a complete iteration; was the run cut off? {error}") from None
    return iterations, seconds


def _exact(name: str, value: object) -> float | None:
    """Return a number as `float.hex` wrote it, to the bit; None if the run had none."""
    if value is None:
        return None
    if not isinstance(value, str) or not _EXACT.fullmatch(value):
        raise ValueError(f"{name} is {value!r:.40}, not a number as float.hex writes it")
    try:
        return float.fromhex(value)
    except OverflowError:
        raise ValueError(f"{name} is {value}, which is too large") from None


def _read_log(path: Path) -> tuple[dict[int, Values], dict[int, float]]:
    """Return Megatron's iteration lines. If an iteration was run again, the last time counts."""
    iterations: dict[int, Values] = {}
    seconds: dict[int, float] = {}
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        match = _LOG_LINE.search(line)
        if match is None:
            continue
        try:
            iteration, values = int(match[1]), _read_fields(match[2])
            elapsed_s = a_number(values[_LOG_TIME] / 1e3, _LOG_TIME) if _LOG_TIME in values else None
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: not one of Megatron's iteration lines, or two of them in one: {error}"
            ) from None
        seconds.pop(iteration, None)
        if elapsed_s is not None:
            seconds[iteration] = elapsed_s
        iterations[iteration] = {name: value for name, value in values.items() if not _MACHINE.search(name)}
    return iterations, seconds


def _read_fields(text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for field_text in text.split("|"):
        name, colon, value = field_text.rpartition(":")
        if not colon:
            raise ValueError(f"{field_text.strip()!r:.60} is not a field with a value")
        if _LOG_TIME in name or not _MACHINE.search(name):
            values[printable(name.strip())] = float(value)
    return values


def _read_text(path: Path) -> str:
    try:
        # A log may contain anything. A number in which something was replaced is no number any more.
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; did the run finish? See its log") from None
