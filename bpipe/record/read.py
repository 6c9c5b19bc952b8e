"""Read the folder of a recorded run.

Whatever a killed run may leave is accepted and noted: a torn last line, ranks without a file, no run.json. Whatever
cannot be of one run is refused, and so is a value that no run can have: of another type, a negative duration, more
FLOPs than the devices can do. Unknown keys and columns are ignored: later versions add some.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bpipe.build import ScheduleConfig
from bpipe.predict.flops import mfu
from bpipe.record import format as form
from bpipe.record.format import CLOCK_ERROR_S, MOST_RANKS, Held, RankRecord, Run, RunInfo, keys_of, values_of
from bpipe.values import a_list, load_json, printable

# Beyond what any later version adds.
MOST_COLUMNS = 200
_EMPTY_IT = "The folder has files of two runs: delete those of the older one, and give every run its own folder"


def refuse_two_runs(folder: Path, runs: Sequence[tuple[str, str | None]]) -> None:
    """Raise ValueError if files are of different runs. `runs`: a description of each file, and the name of its run."""
    for other in runs[1:]:
        if other[1] != runs[0][1]:
            names = (
                f"{file} is of {'an older run' if name is None else f'run {name[:40]}'}"
                for file, name in (runs[0], other)
            )
            raise ValueError(f"{folder}: {', '.join(names)}. {_EMPTY_IT}")


def check_one_run(folder: Path, info: RunInfo, ranks: Sequence[RankRecord]) -> None:
    """Refuse ranks that the run does not have, two at one place, other programs, and loops at different times."""
    refuse_two_runs(folder, [(f"the record of rank {record.rank}", record.run) for record in ranks])
    if info.run is not None:
        refuse_two_runs(folder, [("run.json", info.run), (f"the record of rank {ranks[0].rank}", ranks[0].run)])
    _check_ranks(folder, info.world_size, ranks)
    iterations = [iteration for record in ranks for iteration in record.iterations.values()]
    widest = max((iteration.program.num_ranks for iteration in iterations), default=0)
    if widest > (info.world_size or MOST_RANKS):
        raise ValueError(
            f"{folder}: {widest} stages ran, but run.json has {info.world_size or 'no number of'} ranks. {_EMPTY_IT}"
        )
    for number in sorted({number for record in ranks for number in record.iterations}):
        _check_iteration(folder, [record for record in ranks if number in record.iterations], number)


def _check_ranks(folder: Path, world_size: int | None, ranks: Sequence[RankRecord]) -> None:
    taken: dict[tuple[int, int], int] = {}
    for record in ranks:
        if world_size is not None and record.rank >= world_size:
            raise ValueError(
                f"{folder}: there is a record of rank {record.rank}, but run.json has {world_size} ranks. {_EMPTY_IT}"
            )
        other = taken.setdefault((record.pipeline, record.place), record.rank)
        if other != record.rank:
            raise ValueError(
                f"{folder}: ranks {other} and {record.rank} both say they are at place {record.place} of pipeline "
                f"{record.pipeline}. {_EMPTY_IT}"
            )


def _check_iteration(folder: Path, ranks: Sequence[RankRecord], number: int) -> None:
    first = ranks[0]
    program = first.iterations[number].program
    for record in ranks:
        other = record.iterations[number].program
        if other != program:
            raise ValueError(
                f"{folder}: in iteration {number} rank {first.rank} ran {_described(program)}, rank {record.rank} ran "
                f"{_described(other)}. {_EMPTY_IT}"
            )
        num_computations = 2 * program.num_microbatches * program.slices * program.num_chunks
        num_rows = len(record.iterations[number].rows)
        # The rows are compared one by one later; the program is not even built for that if its size is very different.
        if num_computations > 2 * num_rows:
            raise ValueError(
                f"{folder}: iteration {number} of rank {record.rank} has {num_rows} actions, but its program has "
                f"{num_computations} computations"
            )
        if not 0 <= record.place < program.num_ranks:
            raise ValueError(
                f"{folder}: rank {record.rank} is at place {record.place} of a pipeline of {program.num_ranks}. "
                f"{_EMPTY_IT}"
            )
    late = max(ranks, key=lambda record: record.iterations[number].begin_s)
    early = min(ranks, key=lambda record: record.iterations[number].end_s)
    began, ended = late.iterations[number].begin_s, early.iterations[number].end_s
    if began > ended + CLOCK_ERROR_S:
        raise ValueError(
            f"{folder}: rank {late.rank} began iteration {number} {began - ended:.0f} s after rank {early.rank} had "
            f"ended it. {_EMPTY_IT}"
        )


def _described(program: ScheduleConfig) -> str:
    return (
        f"{program.schedule} of {program.num_ranks} stages, {program.num_microbatches} micro-batches, "
        f"{program.num_chunks} chunks, balance {program.balance_name}"
    )


def missing(info: RunInfo, ranks: Sequence[RankRecord]) -> list[str]:
    """Return a note of the ranks without a record, or of the stages if the size of the world is not known."""
    if info.world_size is not None:
        absent = sorted(set(range(info.world_size)) - {record.rank for record in ranks})
        noun = "rank" if len(absent) == 1 else "ranks"
        return [f"no record of {noun} {_listed(list(map(str, absent)))} (of {info.world_size})"] if absent else []
    num_pipelines = max(record.pipeline for record in ranks) + 1
    num_places = max(iteration.program.num_ranks for record in ranks for iteration in record.iterations.values())
    if num_pipelines * num_places > MOST_RANKS:
        raise ValueError(
            f"a rank says that it is of pipeline {num_pipelines - 1}, of {num_places} stages: no run has that many ranks"
        )
    places = set(product(range(num_pipelines), range(num_places)))
    places -= {(record.pipeline, record.place) for record in ranks}
    named = [f"{place} of pipeline {pipeline}" for pipeline, place in sorted(places)]
    return [f"no record of stage {_listed(named)}"] if named else []


def _listed(names: Sequence[str], limit: int = 100) -> str:
    return ", ".join(names) if len(names) <= limit else f"{', '.join(names[:limit])} and {len(names) - limit} more"


def check_speed(path: Path, info: RunInfo, step_s: Mapping[int, float]) -> None:
    """Raise ValueError if a device exceeds its peak: then one of the numbers is wrong."""
    if info.flops_per_iteration is None or info.peak_flops is None or info.world_size is None:
        return
    for iteration, elapsed_s in step_s.items():
        reached = mfu(info.flops_per_iteration, elapsed_s, info.world_size, info.peak_flops) if elapsed_s > 0 else 2.0
        if reached > 1:
            raise ValueError(
                f"{path}: iteration {iteration} would have an MFU of {100 * reached:.4g} %: "
                f"{info.flops_per_iteration:g} FLOPs in {elapsed_s} s on {info.world_size} devices of "
                f"{info.peak_flops:g} FLOP/s ({info.peak_source or 'source not given'}). Correct peak_flops there, or set "
                "it to null"
            )


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
    pools = [summary.graph_pool_bytes for summary in summaries if summary.graph_pool_bytes is not None]
    return Run(path, info, ranks, steps, peaks, tuple(notes), max(pools, default=None), _verified(summaries))


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
