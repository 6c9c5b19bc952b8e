"""Read the folder of a recorded run. In: the folder of `--bpipe-report`. Out: a `Run`, or a ValueError that names file, line and way out.

Whatever a killed run may leave is accepted and noted: a torn last line, ranks without a file, no run.json. Whatever cannot be of one run
is refused. Unknown keys and columns are passed over: later versions add some. Knows no schedule and judges no number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from bpipe.ir.text import read_action
from bpipe.program import ProgramConfig
from bpipe.report.record import Iteration, LinkSpeed, RankRecord, Row, Run, RunInfo

VERSION = 1

_RECORD = re.compile(r"record_(\d+)\.jsonl")
# A host sets its clock to rank 0's to well below this.
_CLOCK_ERROR_S = 1.0

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
    return Run(path, info, ranks, _read_steps(path / "iterations.jsonl", notes), _read_peaks(path), tuple(notes))


def _read_info(path: Path, notes: list[str]) -> RunInfo:
    if not path.exists():
        notes.append("run.json is missing: the number of ranks, the links' speed and MFU are not known")
        return RunInfo()
    try:
        found = json.loads(path.read_text())
        _check_format(path, found, "bpipe-run")
        return RunInfo(
            started=found.get("started"),
            world_size=found.get("world_size"),
            num_pipelines=found.get("num_pipelines"),
            device=found.get("device"),
            synchronous=bool(found.get("synchronous")),
            versions=tuple((name, str(found[name])) for name in ("torch", "megatron_core") if found.get(name)),
            flops_per_iteration=found.get("flops_per_iteration"),
            peak_flops=found.get("peak_flops"),
            peak_source=found.get("peak_source"),
            links=tuple(_link(link) for link in found.get("links") or ()),
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not the description of a run ({_said(error)})") from None


def _link(found: Mapping[str, Any]) -> LinkSpeed:
    return LinkSpeed(frozenset(found["ranks"]), found.get("transport"), dict(found["bytes_per_s"]))


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
        for number, line in enumerate(file, 1):
            try:
                yield number, json.loads(line)
            except ValueError:
                if line.endswith(b"\n"):
                    raise ValueError(f"{path}, line {number}: no JSON, though lines follow or it is whole. Is the file damaged?") from None
                notes.append(f"{path.name} ends in a torn line, which is left out: the run was killed while it wrote")


def _read_rank(path: Path, notes: list[str]) -> RankRecord | None:
    lines = _lines(path, notes)
    header: Any = next(lines, (0, None))[1]
    if header is None:
        notes.append(f"{path.name} is empty")
        return None
    _check_format(path, header, "bpipe-record")
    iterations: dict[int, Iteration] = {}
    for number, line in lines:
        try:
            if "format" in line:
                _check_format(path, line, "bpipe-record")
                raise ValueError("a second header: two runs wrote into this file. Give every run a folder of its own")
            iteration = _iteration(line)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: {_said(error)}") from None
        if iteration.iteration in iterations:
            raise ValueError(f"{path}, line {number}: iteration {iteration.iteration} stands there twice: two runs wrote into this file")
        iterations[iteration.iteration] = iteration
    try:
        return _rank(path, header, iterations)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}, line 1: {_said(error)}") from None


def _rank(path: Path, header: Mapping[str, Any], iterations: dict[int, Iteration]) -> RankRecord:
    match = _RECORD.fullmatch(path.name)
    if match is None or int(match.group(1)) != header["rank"]:
        raise ValueError(f"{path}: the file says that it is of rank {header['rank']}. Was it renamed?")
    return RankRecord(
        rank=header["rank"],
        pipeline=header["pipeline"],
        place=header["place"],
        host=str(header.get("host", "")),
        device=str(header.get("device", "")),
        transport=header.get("transport"),
        partner=header.get("partner"),
        weights_bytes=header.get("weights_bytes"),
        limit_bytes=header.get("limit_bytes"),
        cores=header.get("cores"),
        iterations=iterations,
    )


def _iteration(line: Mapping[str, Any]) -> Iteration:
    return Iteration(
        iteration=line["iteration"],
        program=_program(line["program"]),
        begin_s=float(line["begin_s"]),
        elapsed_s=float(line["elapsed_s"]),
        saved_bytes={int(stage): size for stage, size in line["saved_bytes"].items()},
        moved_bytes={int(stage): size for stage, size in (line.get("moved_bytes") or {}).items()},
        received_bytes=line.get("received_bytes") or 0,
        host_bytes=line.get("host_bytes") or 0,
        device_peak_bytes=line.get("device_peak_bytes"),
        rows=_rows(line["columns"], line["actions"]),
    )


def _rows(columns: Sequence[str], actions: Sequence[Sequence[Any]]) -> tuple[Row, ...]:
    needed = ("action", "start_s", "end_s")
    missing = [name for name in needed if name not in columns]
    if missing:
        raise ValueError(f"columns {', '.join(missing)} are missing")
    if tuple(columns[: len(Row._fields)]) == Row._fields and all(len(row) == len(columns) for row in actions):
        known = len(Row._fields)
        return tuple(_ordered(Row(_action(row[0]), *row[1:known])) for row in actions)
    places = {name: index for index, name in enumerate(columns) if name in Row._fields}
    rows = []
    for row in actions:
        if len(row) != len(columns):
            raise ValueError(f"{str(row)[:60]} has {len(row)} values for {len(columns)} columns")
        values = {name: row[index] for name, index in places.items()}
        rows.append(_ordered(Row(_action(values.pop("action")), **values)))
    return tuple(rows)


def _ordered(row: Row) -> Row:
    if not row.start_s <= row.end_s:
        raise ValueError(f"{row.action} ends at {row.end_s} s, before it starts at {row.start_s} s")
    return row


def _program(found: Mapping[str, Any]) -> ProgramConfig:
    def numbers(name: str) -> tuple[int, ...] | None:
        return None if found.get(name) is None else tuple(found[name])

    return ProgramConfig(
        schedule=found["schedule"],
        num_stages=found["num_stages"],
        num_microbatches=found["num_microbatches"],
        num_chunks=found.get("num_chunks", 1),
        balance=found.get("balance", "none"),
        bounds=numbers("bounds"),
        partners=numbers("partners"),
    )


def _said(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


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
        if not 0 <= record.place < program.num_stages:
            raise ValueError(f"{folder}: rank {record.rank} is at place {record.place} of a pipeline of {program.num_stages}. {_EMPTY_IT}")
    late = max(ranks, key=lambda record: record.iterations[number].begin_s)
    early = min(ranks, key=lambda record: record.iterations[number].begin_s + record.iterations[number].elapsed_s)
    began, ended = late.iterations[number].begin_s, early.iterations[number].begin_s + early.iterations[number].elapsed_s
    if began > ended + _CLOCK_ERROR_S:
        raise ValueError(
            f"{folder}: rank {late.rank} began iteration {number} {began - ended:.0f} s after rank {early.rank} had ended it. {_EMPTY_IT}"
        )


def _described(program: ProgramConfig) -> str:
    return (
        f"{program.schedule} of {program.num_stages} stages, {program.num_microbatches} micro-batches, {program.num_chunks} chunks, "
        f"balance {program.balance}"
    )


def _missing(info: RunInfo, ranks: Sequence[RankRecord]) -> list[str]:
    """Which ranks have no record, by rank where the size of the world is known, else by place."""
    if info.world_size is not None:
        absent = sorted(set(range(info.world_size)) - {record.rank for record in ranks})
        noun = "rank" if len(absent) == 1 else "ranks"
        return [f"no record of {noun} {', '.join(map(str, absent))} (of {info.world_size})"] if absent else []
    num_pipelines = max(record.pipeline for record in ranks) + 1
    num_places = max(iteration.program.num_stages for record in ranks for iteration in record.iterations.values())
    missing = set(product(range(num_pipelines), range(num_places))) - {(record.pipeline, record.place) for record in ranks}
    named = [f"{place} of pipeline {pipeline}" for pipeline, place in sorted(missing)]
    return [f"no record of stage {', '.join(named)}"] if named else []


def _read_steps(path: Path, notes: list[str]) -> dict[int, float]:
    if not path.exists():
        return {}
    try:
        return {line["iteration"]: float(line["elapsed_s"]) for _, line in _lines(path, notes) if line.get("elapsed_s") is not None}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {_said(error)}") from None


def _read_peaks(folder: Path) -> dict[int, int]:
    """Of ranks that ended well."""
    peaks = {}
    for path in folder.glob("rank_*.json"):
        try:
            found = json.loads(path.read_text())
            peaks[int(found["rank"])] = int(found["peak_bytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not the measurements of a rank ({_said(error)})") from None
    return peaks
