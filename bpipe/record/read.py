"""Read the folder of a recorded run.

Whatever a killed run may leave is accepted and noted: a torn last line, ranks without a file, no run.json. Whatever
cannot be of one run is refused, and so is a value that no run can have: of another type, a negative
duration. Unknown keys and columns are ignored: later versions add some.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bpipe.build import ScheduleConfig
from bpipe.record import format as form
from bpipe.record.format import CLOCK_ERROR_S, MOST_RANKS, Held, RankRecord, Run, RunInfo, keys_of, read_keys, values_of
from bpipe.values import a_list, a_text, load_json, printable

# As `float.hex` writes a number.
_EXACT = re.compile(r"-?0x[01]\.[0-9a-f]{1,13}p[+-][0-9]{1,4}|-?inf|nan")
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
    fault = next(_faults(info.world_size, ranks), None)
    if fault is not None:
        raise ValueError(f"{folder}: {fault}. {_EMPTY_IT}")


def _faults(world_size: int | None, ranks: Sequence[RankRecord]) -> Iterator[str]:
    taken: dict[tuple[int, int], int] = {}
    for record in ranks:
        if world_size is not None and record.rank >= world_size:
            yield f"there is a record of rank {record.rank}, but run.json has {world_size} ranks"
        other = taken.setdefault((record.pipeline, record.place), record.rank)
        if other != record.rank:
            place = f"place {record.place} of pipeline {record.pipeline}"
            yield f"ranks {other} and {record.rank} both say they are at {place}"
    widest = max((part.program.num_ranks for record in ranks for part in record.iterations.values()), default=0)
    if widest > (world_size or MOST_RANKS):
        yield f"{widest} stages ran, but run.json has {world_size or 'no number of'} ranks"
    for number in sorted({number for record in ranks for number in record.iterations}):
        yield from _faults_of(number, [record for record in ranks if number in record.iterations])


def _faults_of(number: int, ranks: Sequence[RankRecord]) -> Iterator[str]:
    first = ranks[0]
    program = first.iterations[number].program
    num_computations = 2 * program.num_microbatches * program.slices * program.num_chunks
    for record in ranks:
        part = record.iterations[number]
        if part.program != program:
            programs = f"{_described(program)}, rank {record.rank} ran {_described(part.program)}"
            yield f"in iteration {number} rank {first.rank} ran {programs}"
        # The rows are compared one by one later; the program is not even built for that if its size is very different.
        if num_computations > 2 * len(part.rows):
            actions = f"{len(part.rows)} actions, but its program has {num_computations} computations"
            yield f"iteration {number} of rank {record.rank} has {actions}"
        if record.place >= program.num_ranks:
            yield f"rank {record.rank} is at place {record.place} of a pipeline of {program.num_ranks}"
    late = max(ranks, key=lambda record: record.iterations[number].begin_s)
    early = min(ranks, key=lambda record: record.iterations[number].end_s)
    late_s = late.iterations[number].begin_s - early.iterations[number].end_s
    if late_s > CLOCK_ERROR_S:
        yield f"rank {late.rank} began iteration {number} {late_s:.0f} s after rank {early.rank} had ended it"


def _described(program: ScheduleConfig) -> str:
    return (
        f"{program.schedule} of {program.num_ranks} stages, {program.num_microbatches} micro-batches, "
        f"{program.num_chunks} chunks, balance {program.balance_name}"
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
    info = form.RunInfo()
    if (path / form.RUN).exists():
        info = read_value(path / form.RUN, form.RunInfo, form.RUN, "the description of a run")
    else:
        notes.append("run.json is missing: the number of ranks, the links' speed and MFU are not known")
    ranks = tuple(record for record in (_read_record(file, notes) for file in files) if record is not None)
    if not any(record.iterations for record in ranks):
        raise ValueError(
            f"{path}: no iteration is recorded in it: give --bpipe-report-iterations some that the run reaches"
        )
    check_one_run(path, info, ranks)
    absent = sorted(set(range(info.world_size or 0)) - {record.rank for record in ranks})
    if absent:
        listed = ", ".join(map(str, absent[:100])) + (f" and {len(absent) - 100} more" if len(absent) > 100 else "")
        notes.append(f"no record of rank{'s' * (len(absent) > 1)} {listed} (of {info.world_size})")
    steps = read_steps(path / form.STEPS, notes) if (path / form.STEPS).exists() else ()
    step_s = {step.iteration: step.elapsed_s for step in steps if step.elapsed_s is not None}
    files = form.SUMMARY.files(path)
    summaries = [read_value(file, form.RankSummary, "the file", "the measurements of a rank") for file in files]
    summaries = [summary for summary in summaries if summary.run == ranks[0].run]
    if len(summaries) < len(files):
        notes.append(
            f"left out {len(files) - len(summaries)} of the files rank_*.json, which are of another run: a killed rank "
            "writes none"
        )
    peaks = {summary.rank: summary.peak_bytes for summary in summaries}
    pools = [summary.graph_pool_bytes for summary in summaries if summary.graph_pool_bytes is not None]
    return Run(path, info, ranks, step_s, peaks, tuple(notes), max(pools, default=None), _verified(summaries))


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
    failure = read_value(file, form.FirstFailure, "the file", "the failure of a run") if file.exists() else None
    return Held(path, ranks, failure)


def read_steps(path: Path, notes: list[str]) -> Iterator[form.TrainingStep]:
    """Yield every line of the file of iterations."""
    keys = {key.name for key in keys_of(form.TrainingStep)}
    for count, line in _lines(path, notes):
        try:
            values = values_of(form.TrainingStep, line, "a step")
            numbers = {printable(name): _exact(name, value) for name, value in line.items() if name not in keys}
            yield form.TrainingStep(**values, numbers=numbers)
        except ValueError as error:
            raise ValueError(f"{path}, line {count}: {error}") from None


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


def read_value[T](path: Path, kind: Callable[..., T], name: str, description: str) -> T:
    """Read a file of one value. Errors call the value `name`, and the file not `description`."""
    try:
        value = load_json(path.read_bytes())
        if hasattr(kind, "FORMAT"):
            _check_format(value, kind.FORMAT)
        return kind(**values_of(kind, value, name))
    except ValueError as error:
        raise ValueError(f"{path}: not {description} ({error})") from None


def _check_format(value: object, expected: str) -> None:
    if not isinstance(value, dict) or value.get("format") != expected:
        raise ValueError(f"its format is not {expected}, so it is not a file of a --bpipe-report")
    if value.get("version") != form.VERSION:
        raise ValueError(
            f"{expected} version {value.get('version')}, but this bpipe reads version {form.VERSION}: use the bpipe "
            "that wrote it"
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


def _read_rank[T](
    path: Path,
    files: form.PerRank,
    kind: type[form.RankHeader | form.MemoryHeader],
    read: Callable[[object], T],
    notes: list[str],
) -> tuple[dict[str, Any], list[T]] | None:
    """Return a file's header as the arguments of a `kind`, and the values of its other lines.

    None if it has no whole line.
    """
    header: dict[str, Any] | None = None
    values: list[T] = []
    for count, line in _lines(path, notes):
        try:
            if header is None:
                _check_format(line, kind.FORMAT)
                header = values_of(kind, line, "the header")
                if files.rank(path) != header["rank"]:
                    raise ValueError(f"the file says that it is of rank {header['rank']}: was it renamed?")
            elif isinstance(line, dict) and "format" in line:
                raise ValueError("a second header: two runs wrote into this file. Give every run its own folder")
            else:
                values.append(read(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {count}: {error}") from None
    if header is None:
        notes.append(f"{path.name} is empty")
        return None
    return header, values


def _read_record(path: Path, notes: list[str]) -> form.RankRecord | None:
    contents = _read_rank(path, form.RECORD, form.RankHeader, _iteration, notes)
    if contents is None:
        return None
    header, iterations = contents
    by_number = {iteration.iteration: iteration for iteration in iterations}
    if len(by_number) < len(iterations):
        number = next(number for number, count in Counter(line.iteration for line in iterations).items() if count > 1)
        raise ValueError(f"{path}: iteration {number} appears twice: two runs wrote into this file")
    return form.RankRecord(**header, iterations=by_number)


def _read_memory(path: Path) -> form.RankHeld | None:
    def mark(line: object) -> form.MemoryMark:
        return form.MemoryMark(**values_of(form.MemoryMark, line, "what was held"))

    contents = _read_rank(path, form.MEMORY, form.MemoryHeader, mark, [])
    return None if contents is None else form.RankHeld(**contents[0], marks=tuple(contents[1]))


def _iteration(line: object) -> form.Iteration:
    values = values_of(form.Iteration, line, "a recorded iteration")
    assert isinstance(line, dict)
    columns = [a_text(column, "a column") for column in a_list(line.get("columns"), "columns")]
    rows = tuple(_row(columns, cells, values["elapsed_s"]) for cells in a_list(line.get("actions"), "actions"))
    return form.Iteration(**values, rows=rows)


def _row(columns: Sequence[str], cells: object, elapsed_s: float) -> form.Row:
    """Return a row, if each of its values can be one of an iteration of that length."""
    if not isinstance(cells, list) or len(cells) != len(columns):
        count = len(cells) if isinstance(cells, list) else "no"
        raise ValueError(f"{str(cells)[:60]} has {count} values for {len(columns)} columns")
    values = dict(zip(columns, cells, strict=True))
    try:
        row = form.Row(**read_keys(form.COLUMNS, values, ""))
        if not row.start_s <= row.end_s:
            raise ValueError(f"ends at {row.end_s} s, before it starts at {row.start_s} s")
        if row.end_s > elapsed_s + form.CLOCK_ERROR_S:
            raise ValueError(f"ends at {row.end_s} s, but its iteration took {elapsed_s} s")
    except ValueError as error:
        raise ValueError(f"{values.get('action')!s:.40} {error}") from None
    return row
