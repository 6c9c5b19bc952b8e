"""Refuse files that cannot be of one run. Each value was checked alone when it was read; here they are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from bpipe.build import ScheduleConfig
from bpipe.predict.flops import mfu
from bpipe.record.format import CLOCK_ERROR_S, MOST_RANKS, RankRecord, RunInfo

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
