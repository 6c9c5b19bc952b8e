"""Read the folder of a recorded run. In: the folder of `--bpipe-report`. Out: a `Run`, or a ValueError that names file, line and way out.

Whatever a killed run may leave is accepted and noted: a torn last line, ranks without a file, no run.json. Whatever cannot be of one run
is refused, and so is a value that no run can have: one of another type, a negative duration, more FLOPs than the devices can do. Unknown
keys and columns are passed over: later versions add some. Knows no schedule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from bpipe.ir.text import read_action
from bpipe.models.flops import mfu
from bpipe.program import ScheduleConfig, from_document
from bpipe.report.record import Iteration, LinkSpeed, RankRecord, Row, Run, RunInfo
from bpipe.values import LARGEST, LARGEST_BYTES, Fields, a_list, a_number, a_text, a_whole, an_object, load_json

VERSION = 1

_RECORD = re.compile(r"record_(\d+)\.jsonl")
# A host sets its clock to rank 0's to well below this.
_CLOCK_ERROR_S = 1.0
# Two marks of one stream.
_TIMER_ERROR_S = 1e-3
# More ranks than any machine has: what is listed rank by rank must not grow with a damaged number.
_MOST_RANKS = 1_000_000

_action = lru_cache(maxsize=1 << 18)(read_action)


def read_run(folder: str | Path) -> Run:
    """Everything a run left in its folder."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{path} is no folder: name the one that the run was given as --bpipe-report")
    files = sorted(file for file in path.iterdir() if _RECORD.fullmatch(file.name))
    if not files:
        raise ValueError(f"{path} holds no record_*.jsonl: was it the --bpipe-report of a run, and did that record an iteration?")
    notes: list[str] = []
    info = _read_info(path / "run.json", notes)
    ranks = tuple(record for record in (_read_rank(file, notes) for file in files) if record is not None)
    if not any(record.iterations for record in ranks):
        raise ValueError(f"{path}: no iteration is recorded in it. Choose some that the run reaches with --bpipe-report-iterations")
    _check_one_run(path, info, ranks)
    notes += _missing(info, ranks)
    steps = _read_steps(path / "iterations.jsonl", notes)
    _check_speed(path / "run.json", info, steps)
    return Run(path, info, ranks, steps, _read_peaks(path), tuple(notes))


def has_iterations(folder: str | Path) -> bool:
    """Whether any rank recorded a whole one: a line after its header."""
    path = Path(folder)
    files = [file for file in path.iterdir() if _RECORD.fullmatch(file.name)] if path.is_dir() else []
    return any(file.read_bytes().count(b"\n") > 1 for file in files)


def _read_info(path: Path, notes: list[str]) -> RunInfo:
    if not path.exists():
        notes.append("run.json is missing: the number of ranks, the links' speed and MFU are not known")
        return RunInfo()
    try:
        found = load_json(path.read_bytes())
        _check_format(path, found, "bpipe-run")
        fields = Fields(found, "run.json")
        links = a_list(fields.known("links", []), "links")
        return RunInfo(
            started=fields.text("started"),
            world_size=fields.whole("world_size", 1, _MOST_RANKS),
            num_pipelines=fields.whole("num_pipelines", 1, _MOST_RANKS),
            device=fields.text("device"),
            synchronous=fields.flag("synchronous"),
            versions=tuple((name, text) for name in ("torch", "megatron_core", "megatron_core_path") if (text := fields.text(name))),
            flops_per_iteration=fields.number("flops_per_iteration", 0, 1e40),
            peak_flops=fields.number("peak_flops", 1, 1e20),
            peak_source=fields.text("peak_source"),
            links=tuple(_link(link) for link in links),
        )
    except ValueError as error:
        raise ValueError(f"{path}: not the description of a run ({error})") from None


def _link(found: object) -> LinkSpeed:
    fields = Fields(found, "a link")
    ranks = frozenset(a_whole(rank, "a rank of a link", 0, _MOST_RANKS) for rank in a_list(fields.needed("ranks"), "ranks of a link"))
    speeds = an_object(fields.needed("bytes_per_s"), "bytes_per_s of a link")
    return LinkSpeed(
        ranks, fields.text("transport"), {name: a_number(speed, f"{name} of a link", 1, 1e18) for name, speed in speeds.items()}
    )


def _check_format(path: Path, found: object, expected: str) -> None:
    if not isinstance(found, dict) or found.get("format") != expected:
        raise ValueError(f"{path}: it does not say that it is {expected}, so it is no file of bpipe's --bpipe-report")
    if found.get("version") != VERSION:
        raise ValueError(
            f"{path}: {expected} version {found.get('version')}, this bpipe reads version {VERSION}: use the one that wrote it"
        )


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[int, Any]]:
    """The values of a file with one a line, numbered from 1. A torn last line is left out and noted."""
    with path.open("rb") as file:
        for count, line in enumerate(file, 1):
            try:
                yield count, load_json(line)
            except ValueError as error:
                if line.endswith(b"\n"):
                    raise ValueError(f"{path}, line {count}: no JSON ({error}), though the line is whole. Is the file damaged?") from None
                notes.append(f"{path.name} ends in a torn line, which is left out: the run was killed while it wrote")


def _read_rank(path: Path, notes: list[str]) -> RankRecord | None:
    lines = _lines(path, notes)
    header: Any = next(lines, (0, None))[1]
    if header is None:
        notes.append(f"{path.name} is empty")
        return None
    _check_format(path, header, "bpipe-record")
    iterations: dict[int, Iteration] = {}
    for count, line in lines:
        try:
            if isinstance(line, dict) and "format" in line:
                _check_format(path, line, "bpipe-record")
                raise ValueError("a second header: two runs wrote into this file. Give every run a folder of its own")
            iteration = _iteration(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {count}: {error}") from None
        if iteration.iteration in iterations:
            raise ValueError(f"{path}, line {count}: iteration {iteration.iteration} stands there twice: two runs wrote into this file")
        iterations[iteration.iteration] = iteration
    try:
        return _rank(path, header, iterations)
    except ValueError as error:
        raise ValueError(f"{path}, line 1: {error}") from None


def _rank(path: Path, header: object, iterations: dict[int, Iteration]) -> RankRecord:
    fields = Fields(header, "the header")
    rank, pipeline, place = (a_whole(fields.needed(key), key, 0, _MOST_RANKS) for key in ("rank", "pipeline", "place"))
    match = _RECORD.fullmatch(path.name)
    if match is None or int(match.group(1)) != rank:
        raise ValueError(f"the file says that it is of rank {rank}. Was it renamed?")
    return RankRecord(
        rank=rank,
        pipeline=pipeline,
        place=place,
        host=fields.text("host") or "",
        device=fields.text("device") or "",
        transport=fields.text("transport"),
        partner=fields.whole("partner", 0, _MOST_RANKS),
        weights_bytes=fields.whole("weights_bytes"),
        limit_bytes=fields.whole("limit_bytes"),
        cores=fields.whole("cores", 1, _MOST_RANKS),
        iterations=iterations,
    )


def _iteration(line: object) -> Iteration:
    fields = Fields(line, "a recorded iteration")
    elapsed_s = a_number(fields.needed("elapsed_s"), "elapsed_s")
    return Iteration(
        iteration=a_whole(fields.needed("iteration"), "iteration"),
        program=_program(fields.needed("program")),
        begin_s=a_number(fields.needed("begin_s"), "begin_s"),
        elapsed_s=elapsed_s,
        saved_bytes=_by_stage(fields.needed("saved_bytes"), "saved_bytes"),
        moved_bytes=_by_stage(fields.known("moved_bytes", {}), "moved_bytes"),
        kept_bytes=_by_stage(fields.known("kept_bytes", {}), "kept_bytes"),
        received_bytes=fields.whole("received_bytes") or 0,
        host_bytes=fields.whole("host_bytes") or 0,
        device_peak_bytes=fields.whole("device_peak_bytes"),
        rows=_rows(a_list(fields.needed("columns"), "columns"), a_list(fields.needed("actions"), "actions"), elapsed_s),
    )


def _by_stage(found: object, name: str) -> dict[int, int]:
    sizes = an_object(found, name)
    if not all(re.fullmatch("[0-9]{1,9}", stage) for stage in sizes):
        raise ValueError(f"{name} has {next(iter(sizes))!r:.40}: keys are stages")
    return {int(stage): a_whole(size, f"{name} of stage {stage}", 0, LARGEST_BYTES) for stage, size in sizes.items()}


def _rows(columns: Sequence[object], actions: Sequence[object], elapsed_s: float) -> tuple[Row, ...]:
    needed = ("action", "start_s", "end_s")
    missing = [name for name in needed if name not in columns]
    if missing:
        raise ValueError(f"columns {', '.join(missing)} are missing")
    doubled = next((name for name in columns if columns.count(name) > 1), None)
    if doubled is not None:
        raise ValueError(f"column {doubled!r:.40} stands there twice")
    places = [columns.index(name) if name in columns else None for name in Row._fields]
    rows = []
    for row in actions:
        if not isinstance(row, list) or len(row) != len(columns):
            raise ValueError(f"{str(row)[:60]} has {len(row) if isinstance(row, list) else 'no'} values for {len(columns)} columns")
        rows.append(_row([None if place is None else row[place] for place in places], elapsed_s))
    return tuple(rows)


_WHOLE = ("bytes", "slot", "live_bytes", "left_bytes")


def _row(values: Sequence[Any], elapsed_s: float) -> Row:
    """A row, if each of its values can be one of an iteration of that length."""
    row = Row(_action(a_text(values[0], "an action")), *values[1:])
    try:
        start_s, end_s = a_number(row.start_s, "start_s", -_CLOCK_ERROR_S), a_number(row.end_s, "end_s", -LARGEST)
        if not start_s <= end_s:
            raise ValueError(f"ends at {end_s} s, before it starts at {start_s} s")
        if end_s > elapsed_s + _CLOCK_ERROR_S:
            raise ValueError(f"ends at {end_s} s, but its iteration took {elapsed_s} s")
        wait_s = 0.0 if row.wait_s is None else max(0.0, a_number(row.wait_s, "wait_s", -_TIMER_ERROR_S))
        host_s = (None if time is None else a_number(time, "host time", -_CLOCK_ERROR_S) for time in (row.host_start_s, row.host_end_s))
        sizes = (None if size is None else a_whole(size, name, 0, LARGEST_BYTES) for name, size in zip(_WHOLE, row[6:], strict=True))
        return Row(row.action, start_s, end_s, wait_s, *host_s, *sizes)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{row.action} {error}") from None


def _program(found: object) -> ScheduleConfig:
    fields = Fields(found, "program")

    def numbers(name: str) -> tuple[int, ...] | None:
        values = fields.known(name, None)
        return None if values is None else tuple(a_whole(one, f"program.{name}") for one in a_list(values, f"program.{name}"))

    return from_document(
        {
            "schedule": a_text(fields.needed("schedule"), "program.schedule"),
            "num_stages": a_whole(fields.needed("num_stages"), "program.num_stages", 1),
            "num_microbatches": a_whole(fields.needed("num_microbatches"), "program.num_microbatches", 1),
            "num_chunks": fields.whole("num_chunks", 1),
            "balance": fields.text("balance"),
            "bounds": numbers("bounds"),
            "partners": numbers("partners"),
            "group_size": fields.whole("group_size", 1),
        }
    )


def _check_one_run(folder: Path, info: RunInfo, ranks: Sequence[RankRecord]) -> None:
    """Refuse what cannot be of one run: ranks that it does not have, two at one place, disagreement, loops at different times."""
    taken: dict[tuple[int, int], int] = {}
    for record in ranks:
        if info.world_size is not None and record.rank >= info.world_size:
            raise ValueError(f"{folder}: a record of rank {record.rank}, but run.json says {info.world_size} ranks. {_EMPTY_IT}")
        other = taken.setdefault((record.pipeline, record.place), record.rank)
        if other != record.rank:
            raise ValueError(
                f"{folder}: ranks {other} and {record.rank} both say they are at place {record.place} of pipeline {record.pipeline}. "
                f"{_EMPTY_IT}"
            )
    widest = max((one.program.num_ranks for record in ranks for one in record.iterations.values()), default=0)
    if widest > (info.world_size or _MOST_RANKS):
        raise ValueError(f"{folder}: {widest} stages were run, but run.json says {info.world_size or 'no number of'} ranks. {_EMPTY_IT}")
    for number in sorted({number for record in ranks for number in record.iterations}):
        _check_iteration(folder, [record for record in ranks if number in record.iterations], number)


_EMPTY_IT = "Records of two runs lie in one folder: give every run a folder of its own"


def _check_iteration(folder: Path, ranks: Sequence[RankRecord], number: int) -> None:
    first = ranks[0]
    program = first.iterations[number].program
    for record in ranks:
        other = record.iterations[number].program
        if other != program:
            raise ValueError(
                f"{folder}: in iteration {number} rank {first.rank} ran {_described(program)}, rank {record.rank} ran {_described(other)}. "
                f"{_EMPTY_IT}"
            )
        needed, rows = 2 * program.num_microbatches * program.num_chunks, len(record.iterations[number].rows)
        # The rows are compared one by one later; a program of another size altogether is not even built for that.
        if needed > 2 * rows:
            raise ValueError(
                f"{folder}: iteration {number} of rank {record.rank} has {rows} actions, but its program {needed} computations"
            )
        if not 0 <= record.place < program.num_ranks:
            raise ValueError(f"{folder}: rank {record.rank} is at place {record.place} of a pipeline of {program.num_ranks}. {_EMPTY_IT}")
    late = max(ranks, key=lambda record: record.iterations[number].begin_s)
    early = min(ranks, key=lambda record: record.iterations[number].begin_s + record.iterations[number].elapsed_s)
    began, ended = late.iterations[number].begin_s, early.iterations[number].begin_s + early.iterations[number].elapsed_s
    if began > ended + _CLOCK_ERROR_S:
        raise ValueError(
            f"{folder}: rank {late.rank} began iteration {number} {began - ended:.0f} s after rank {early.rank} had ended it. {_EMPTY_IT}"
        )


def _described(program: ScheduleConfig) -> str:
    return (
        f"{program.schedule} of {program.num_ranks} stages, {program.num_microbatches} micro-batches, {program.num_chunks} chunks, "
        f"balance {program.balance_name}"
    )


def _missing(info: RunInfo, ranks: Sequence[RankRecord]) -> list[str]:
    """Which ranks have no record, by rank where the size of the world is known, else by place."""
    if info.world_size is not None:
        absent = sorted(set(range(info.world_size)) - {record.rank for record in ranks})
        noun = "rank" if len(absent) == 1 else "ranks"
        return [f"no record of {noun} {_listed(list(map(str, absent)))} (of {info.world_size})"] if absent else []
    num_pipelines = max(record.pipeline for record in ranks) + 1
    num_places = max(iteration.program.num_ranks for record in ranks for iteration in record.iterations.values())
    if num_pipelines * num_places > _MOST_RANKS:
        raise ValueError(f"a rank says that it is of pipeline {num_pipelines - 1}, of {num_places} stages: that many ranks there are not")
    missing = set(product(range(num_pipelines), range(num_places))) - {(record.pipeline, record.place) for record in ranks}
    named = [f"{place} of pipeline {pipeline}" for pipeline, place in sorted(missing)]
    return [f"no record of stage {_listed(named)}"] if named else []


def _listed(names: Sequence[str], most: int = 100) -> str:
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:most])} and {len(names) - most} more"


def _read_steps(path: Path, notes: list[str]) -> dict[int, float]:
    steps: dict[int, float] = {}
    if not path.exists():
        return steps
    for count, line in _lines(path, notes):
        try:
            fields = Fields(line, "a step")
            iteration, elapsed_s = a_whole(fields.needed("iteration"), "iteration"), fields.number("elapsed_s", 0, LARGEST)
            if elapsed_s is not None:
                steps[iteration] = elapsed_s
        except ValueError as error:
            raise ValueError(f"{path}, line {count}: {error}") from None
    return steps


def _read_peaks(folder: Path) -> dict[int, int]:
    """Of ranks that ended well."""
    peaks = {}
    for path in sorted(folder.glob("rank_*.json")):
        try:
            fields = Fields(load_json(path.read_bytes()), "the file")
            rank, peak = a_whole(fields.needed("rank"), "rank"), a_whole(fields.needed("peak_bytes"), "peak_bytes", 0, LARGEST_BYTES)
        except ValueError as error:
            raise ValueError(f"{path}: not the measurements of a rank ({error})") from None
        peaks[rank] = peak
    return peaks


def _check_speed(path: Path, info: RunInfo, step_s: Mapping[int, float]) -> None:
    """No device does more than it can: then one of the numbers that say so is wrong."""
    if info.flops_per_iteration is None or info.peak_flops is None or info.world_size is None:
        return
    for iteration, elapsed_s in step_s.items():
        reached = mfu(info.flops_per_iteration, elapsed_s, info.world_size, info.peak_flops) if elapsed_s > 0 else 2.0
        if reached > 1:
            raise ValueError(
                f"{path}: iteration {iteration} would have an MFU of {100 * reached:.4g} %: {info.flops_per_iteration:g} FLOPs in "
                f"{elapsed_s} s on {info.world_size} devices of {info.peak_flops:g} FLOP/s ({info.peak_source or 'source not said'}). "
                "Correct peak_flops there, or make it null"
            )
