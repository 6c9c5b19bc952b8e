"""Read the folder of a recorded run.

Whatever a killed run may leave is accepted and noted: a torn last line, ranks without a file, no run.json. Whatever
cannot be of one run is refused, and so is a value that no run can have: of another type, a negative duration, more
FLOPs than the devices can do. Unknown keys and columns are ignored: later versions add some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bpipe.record import format as form
from bpipe.record.format import Held, Run
from bpipe.record.keys import keys_of, values_of
from bpipe.record.one_run import check_one_run, check_speed, missing, refuse_two_runs
from bpipe.values import a_list, load_json, printable

# Beyond what any later version adds.
MOST_COLUMNS = 200


def read_run(folder: str | Path) -> Run:
    """Read everything that a run recorded of its iterations. Raises ValueError if it is not the record of one run."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder: give the one that was the run's --bpipe-report")
    files = form.RECORD.files(path)
    if not files:
        raise ValueError(
            f"{path} has no record_*.jsonl: was it a run's --bpipe-report, and did the run record an iteration?"
        )
    notes: list[str] = []
    info = _read_info(path / form.RUN, notes)
    ranks = tuple(record for record in (_read_record(file, notes) for file in files) if record is not None)
    if not any(record.iterations for record in ranks):
        raise ValueError(
            f"{path}: no iteration is recorded in it: give --bpipe-report-iterations some that the run reaches"
        )
    check_one_run(path, info, ranks)
    notes += missing(info, ranks)
    steps = {
        step.iteration: step.elapsed_s for step in read_steps(path / form.STEPS, notes) if step.elapsed_s is not None
    }
    check_speed(path / form.RUN, info, steps)
    files = form.SUMMARY.files(path)
    summaries = [_value(file, form.RankSummary, "the file", "the measurements of a rank") for file in files]
    summaries = [summary for summary in summaries if summary.run == ranks[0].run]
    if len(summaries) < len(files):
        notes.append(
            f"left out {len(files) - len(summaries)} of the files rank_*.json, which are of another run: a killed rank "
            "writes none"
        )
    peaks = {summary.rank: summary.peak_bytes for summary in summaries}
    return Run(path, info, ranks, steps, peaks, tuple(notes), _verified(summaries))


def _verified(summaries: Sequence[form.RankSummary]) -> form.Verified | None:
    """Return what every rank checked, or None if one checked nothing or left no summary."""
    iterations = min((summary.verified_iterations for summary in summaries), default=0)
    if not iterations:
        return None
    microbatches = sum(summary.verified_microbatches for summary in summaries)
    return form.Verified(iterations, microbatches, sum(summary.verified_bytes for summary in summaries))


def has_iterations(folder: str | Path) -> bool:
    """Whether any rank recorded a whole iteration: a line after its header."""
    return any(file.read_bytes().count(b"\n") > 1 for file in form.RECORD.files(Path(folder)))


def read_held(folder: str | Path) -> Held | None:
    """Read the ranks' memory records, from their first forward on, if there are any."""
    path = Path(folder)
    ranks = tuple(rank for rank in map(_read_memory, form.MEMORY.files(path)) if rank is not None)
    if not ranks:
        return None
    refuse_two_runs(path, [(f"the memory of rank {rank.rank}", rank.run) for rank in ranks])
    file = path / form.FAILURE
    failure = _value(file, form.FirstFailure, "the file", "the failure of a run") if file.exists() else None
    return Held(path, ranks, failure)


def read_steps(path: Path, notes: list[str]) -> Iterator[form.TrainingStep]:
    """Yield every line of the file of iterations, if there is one."""
    keys = {key.name for key in keys_of(form.TrainingStep)}
    for count, line in _lines(path, notes) if path.exists() else ():
        try:
            values = values_of(form.TrainingStep, line, "a step")
            yield form.TrainingStep(
                **values, numbers={printable(name): _exact(value) for name, value in line.items() if name not in keys}
            )
        except ValueError as error:
            raise ValueError(f"{path}, line {count}: {error}") from None


def _exact(value: object) -> float | None:
    """Return a number as it was written, to the bit; None for anything else."""
    try:
        return float.fromhex(value) if isinstance(value, str) else None
    except (ValueError, OverflowError):
        return None


def _read_info(path: Path, notes: list[str]) -> form.RunInfo:
    if path.exists():
        return _value(path, form.RunInfo, form.RUN, "the description of a run")
    notes.append("run.json is missing: the number of ranks, the links' speed and MFU are not known")
    return form.RunInfo()


def _value[T](path: Path, kind: Callable[..., T], name: str, description: str) -> T:
    """Read a file of one value. Errors call the value `name`, and the file not `description`."""
    try:
        value = load_json(path.read_bytes())
        if hasattr(kind, "FORMAT"):
            _check_format(path, value, kind.FORMAT)
        return kind(**values_of(kind, value, name))  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{path}: not {description} ({error})") from None


def _check_format(path: Path, value: object, expected: str) -> None:
    if not isinstance(value, dict) or value.get("format") != expected:
        raise ValueError(f"{path}: its format is not {expected}, so it is not a file of a --bpipe-report")
    if value.get("version") != form.VERSION:
        raise ValueError(
            f"{path}: {expected} version {value.get('version')}, but this bpipe reads version {form.VERSION}: use the bpipe "
            f"that wrote it"
        )


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[int, Any]]:
    """Yield the values of a file with one per line, numbered from 1. A torn last line is left out and noted."""
    with path.open("rb") as file:
        for count, line in enumerate(file, 1):
            try:
                yield count, load_json(line)
            except ValueError as error:
                if line.endswith(b"\n"):
                    raise ValueError(
                        f"{path}, line {count}: not JSON ({error}), although the line is complete. Is the file damaged?"
                    ) from None
                notes.append(f"{path.name} ends in a torn line, which is left out: the run was killed while writing it")


def _of_a_rank(
    path: Path, files: form.PerRank, kind: type[form.RankHeader | form.MemoryHeader], notes: list[str]
) -> Iterator[tuple[int, Any]]:
    """Yield a file's header as the arguments of a `kind`, then its lines; nothing if it has no whole line."""
    lines = _lines(path, notes)
    header: Any = next(lines, (0, None))[1]
    if header is None:
        notes.append(f"{path.name} is empty")
        return
    _check_format(path, header, kind.FORMAT)
    try:
        values = values_of(kind, header, "the header")
        if files.rank(path) != values["rank"]:
            raise ValueError(f"the file says that it is of rank {values['rank']}: was it renamed?")
    except ValueError as error:
        raise ValueError(f"{path}, line 1: {error}") from None
    yield 1, values
    for count, line in lines:
        if isinstance(line, dict) and "format" in line:
            _check_format(path, line, kind.FORMAT)
            again = "a second header: two runs wrote into this file. Give every run its own folder"
            raise ValueError(f"{path}, line {count}: {again}")
        yield count, line


def _read_record(path: Path, notes: list[str]) -> form.RankRecord | None:
    lines = _of_a_rank(path, form.RECORD, form.RankHeader, notes)
    header: Any = next(lines, (0, None))[1]
    if header is None:
        return None
    iterations: dict[int, form.Iteration] = {}
    for count, line in lines:
        try:
            iteration = _iteration(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {count}: {error}") from None
        if iteration.iteration in iterations:
            raise ValueError(
                f"{path}, line {count}: iteration {iteration.iteration} appears twice: two runs wrote into this file"
            )
        iterations[iteration.iteration] = iteration
    return form.RankRecord(**header, iterations=iterations)


def _read_memory(path: Path) -> form.RankHeld | None:
    lines = _of_a_rank(path, form.MEMORY, form.MemoryHeader, [])
    header: Any = next(lines, (0, None))[1]
    if header is None:
        return None
    marks = []
    for count, line in lines:
        try:
            marks.append(form.MemoryMark(**values_of(form.MemoryMark, line, "what was held")))
        except ValueError as error:
            raise ValueError(f"{path}, line {count}: {error}") from None
    return form.RankHeld(**header, marks=tuple(marks))


def _iteration(line: object) -> form.Iteration:
    values = values_of(form.Iteration, line, "a recorded iteration")
    assert isinstance(line, dict)
    for name in ("columns", "actions"):
        if line.get(name) is None:
            raise ValueError(f"{name!r} is missing")
    return form.Iteration(
        **values,
        rows=_rows(a_list(line["columns"], "columns"), a_list(line["actions"], "actions"), values["elapsed_s"]),
    )


def _check_columns(columns: Sequence[object]) -> None:
    """Refuse columns of which no row can be read: one missing, one twice, more than any version has."""
    absent = [column.name for column in form.COLUMNS if column.needed and column.name not in columns]
    if absent:
        raise ValueError(f"columns {', '.join(absent)} are missing")
    if len(columns) > MOST_COLUMNS:
        raise ValueError(f"it has {len(columns)} columns, more than {MOST_COLUMNS}")
    doubled = next((name for name in columns if columns.count(name) > 1), None)
    if doubled is not None:
        raise ValueError(f"column {doubled!r:.40} appears twice")


def _rows(columns: Sequence[object], actions: Sequence[object], elapsed_s: float) -> tuple[form.Row, ...]:
    _check_columns(columns)
    places = [columns.index(column.name) if column.name in columns else None for column in form.COLUMNS]
    rows = []
    for row in actions:
        if not isinstance(row, list) or len(row) != len(columns):
            count = len(row) if isinstance(row, list) else "no"
            raise ValueError(f"{str(row)[:60]} has {count} values for {len(columns)} columns")
        rows.append(_row([None if place is None else row[place] for place in places], elapsed_s))
    return tuple(rows)


def _row(cells: Sequence[Any], elapsed_s: float) -> form.Row:
    """Return a row, if each of its values can be one of an iteration of that length."""
    first, *others = form.COLUMNS
    action = first.rule.read(cells[0], first.name)
    try:
        values = [
            column.default if value is None and not column.needed else column.rule.read(value, column.name)
            for column, value in zip(others, cells[1:], strict=True)
        ]
        row = form.Row(action, *values)
        if not row.start_s <= row.end_s:
            raise ValueError(f"ends at {row.end_s} s, before it starts at {row.start_s} s")
        if row.end_s > elapsed_s + form.CLOCK_ERROR_S:
            raise ValueError(f"ends at {row.end_s} s, but its iteration took {elapsed_s} s")
    except ValueError as error:
        raise ValueError(f"{action} {error}") from None
    return row
