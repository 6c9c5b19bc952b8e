"""Choose what a report is about: the places of one pipeline and their iterations, on one clock.

The pipeline is number 0, or the first of those from which most ranks left a record. Of the others only maxima are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from bpipe.build import ScheduleConfig, build
from bpipe.record.format import Iteration, RankRecord, Row, Run
from bpipe.schedule.action import COMPUTE, Kind
from bpipe.schedule.host_buffers import guests_of, num_host_buffers, residencies_by_host
from bpipe.schedule.hosts import Host
from bpipe.schedule.memory import changes_in_time, counting
from bpipe.schedule.schedule import Schedule

# A stage is slower if it computes this many times as long; an iteration is a warm-up if this share of its stages is slower.
_SLOWER = 1.1
MOST_STAGES = 0.75

# The halves of transfers that a rank has of its own activations.
OWN_TRANSFERS = {Kind.EVICT, Kind.LOAD}


@dataclass(frozen=True, slots=True)
class Lane:
    """One place in one iteration, with rows by start in seconds of the common clock."""

    source: Iteration
    computations: tuple[Row, ...]
    transfers: tuple[Row, ...]  # those that a one-sided partner made for it included

    def computations_of(self, stage: int, kind: Kind) -> list[Row]:
        return [row for row in self.computations if row.action.stage == stage and row.action.kind is kind]

    @property
    def busy_s(self) -> float:
        return sum(row.seconds for row in self.computations)

    @property
    def exposed_s(self) -> float:
        """Seconds in which the rank waited for transfers."""
        return sum(row.wait_s for row in self.transfers)

    @property
    def peak_bytes(self) -> int | None:
        """The maximum during a computation."""
        return max((row.live_bytes for row in self.computations if row.live_bytes is not None), default=None)

    @property
    def levels(self) -> list[tuple[float, int]]:
        """Held bytes over time: the peak during each computation, then what it left."""
        levels: list[tuple[float, int]] = []
        for row in self.computations:
            if row.live_bytes is not None:
                levels.append((row.start_s, row.live_bytes))
            if row.left_bytes is not None:
                levels.append((row.end_s, row.left_bytes))
        if levels:
            # Every micro-batch is over by then; host buffers stay.
            levels.append((self.computations[-1].end_s, self.source.host_bytes))
        return levels


@dataclass(frozen=True, slots=True)
class Timeline:
    """One iteration of all places. Time 0 is when the first rank began its loop."""

    iteration: int
    lanes: tuple[Lane | None, ...]  # by place, None without a record

    @property
    def present(self) -> list[Lane]:
        return [lane for lane in self.lanes if lane is not None]

    @property
    def begin_s(self) -> float:
        """The first computation's start."""
        return min(lane.computations[0].start_s for lane in self.present)

    @property
    def end_s(self) -> float:
        """The last computation's end."""
        return max(lane.computations[-1].end_s for lane in self.present)

    @property
    def span_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Measured:
    """The subject of a report."""

    run: Run
    program: ScheduleConfig  # what the schedule was built from
    schedule: Schedule
    pipeline: int  # the reported one, if the run has replicas or tensor-parallel ranks
    records: tuple[RankRecord | None, ...]  # by place of this pipeline, None without a record
    timelines: tuple[Timeline, ...]  # all recorded iterations of this program
    warm_up: int | None  # the first iteration if it was slower; steady times leave it out if there are others
    notes: tuple[str, ...]

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """The rank of every place, None without a record."""
        return tuple(None if record is None else record.rank for record in self.records)

    @property
    def steady(self) -> tuple[Timeline, ...]:
        """All iterations except a warm-up."""
        return tuple(timeline for timeline in self.timelines if timeline.iteration != self.warm_up) or self.timelines

    def others(self, place: int) -> list[Iteration]:
        """Return the iterations of this place in all pipelines."""
        numbers = {timeline.iteration for timeline in self.timelines}
        return [
            iteration
            for record in self.run.ranks
            if record.place == place
            for number, iteration in record.iterations.items()
            if number in numbers
        ]


def choose(run: Run) -> Measured:
    """Return the part of a run to report on: all iterations that ran the program of the last one."""
    programs = {number: part.program for record in run.ranks for number, part in record.iterations.items()}
    program = programs[max(programs)]
    numbers = sorted(number for number, other in programs.items() if other == program)
    schedule = build(program)
    notes = list(run.notes)
    if len(numbers) < len(programs):
        left_out = _listed(sorted(set(programs) - set(numbers)))
        notes.append(f"left out iterations {left_out}: they had another number of micro-batches or another schedule")
    pipeline, records = _pipeline(run, schedule.num_ranks, notes)
    timelines = tuple(_timeline(run, schedule, records, number, notes) for number in numbers)
    timelines = tuple(timeline for timeline in timelines if timeline.present)
    if not timelines:
        raise ValueError(f"{run.folder}: no rank of pipeline {pipeline} recorded iterations {_listed(numbers)}")
    notes += _higher_peaks(run, timelines, records)
    return Measured(run, program, schedule, pipeline, records, timelines, _warm_up(timelines), tuple(notes))


def lanes_of(timelines: Sequence[Timeline], place: int) -> list[tuple[Timeline, Lane]]:
    """Return one place's lane of every iteration in which it has a record."""
    return [(timeline, lane) for timeline in timelines if (lane := timeline.lanes[place]) is not None]


def _higher_peaks(run: Run, timelines: Sequence[Timeline], records: Sequence[RankRecord | None]) -> list[str]:
    """Return a note of the ranks that held more in an iteration that is not shown."""
    higher = []
    for place, record in enumerate(records):
        peaks = [lane.peak_bytes for _, lane in lanes_of(timelines, place) if lane.peak_bytes is not None]
        if record is not None and peaks and run.run_peak_bytes.get(record.rank, 0) > max(peaks):
            higher.append(f"rank {record.rank} {run.run_peak_bytes[record.rank]} bytes")
    return [f"iterations that are not shown held more: {', '.join(higher)}"] if higher else []


def warm_up_ratios(timelines: Sequence[Timeline]) -> list[float]:
    """Return, by stage, the computing time of the first iteration divided by the median of the later ones."""
    ratios = []
    for place, lane in enumerate(timelines[0].lanes):
        busy = [later.busy_s for _, later in lanes_of(timelines[1:], place)]
        if lane is not None and busy and median(busy) > 0:
            ratios.append(lane.busy_s / median(busy))
    return ratios


def _warm_up(timelines: Sequence[Timeline]) -> int | None:
    ratios = warm_up_ratios(timelines)
    slower = sum(ratio > _SLOWER for ratio in ratios)
    return timelines[0].iteration if ratios and slower >= MOST_STAGES * len(ratios) else None


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) < 9 else f"{', '.join(map(str, numbers[:8]))} ... {numbers[-1]}"


def _pipeline(run: Run, num_places: int, notes: list[str]) -> tuple[int, tuple[RankRecord | None, ...]]:
    """Return the number of the pipeline to show, the first of those with the most records, and its records."""
    by_pipeline: dict[int, dict[int, RankRecord]] = {}
    for record in run.ranks:
        by_pipeline.setdefault(record.pipeline, {})[record.place] = record
    shown = min(by_pipeline, key=lambda number: (-len(by_pipeline[number]), number))
    if shown:
        notes.append(f"pipeline {shown} is shown: it has records of more ranks than the pipelines before it")
    return shown, tuple(by_pipeline[shown].get(place) for place in range(num_places))


def _timeline(
    run: Run, schedule: Schedule, records: Sequence[RankRecord | None], number: int, notes: list[str]
) -> Timeline:
    parts = [None if record is None else record.iterations.get(number) for record in records]
    begin_s = min((part.begin_s for part in parts if part is not None), default=0.0)
    lanes: list[Lane | None] = []
    for place, (record, part) in enumerate(zip(records, parts, strict=True)):
        if part is None:
            if record is not None:
                notes.append(f"rank {record.rank} did not record iteration {number}: was the run killed?")
            lanes.append(None)
            continue
        _check_rows(run, schedule, place, part)
        rows = [_shifted(row, part.begin_s - begin_s) for row in part.rows]
        computations = tuple(row for row in rows if row.action.kind in COMPUTE)
        lanes.append(Lane(part, computations, tuple(row for row in rows if row.action.kind not in COMPUTE)))
    return Timeline(number, _with_other_ends(schedule, lanes))


def _shifted(row: Row, shift: float) -> Row:
    host_start_s = None if row.host_start_s is None else row.host_start_s + shift
    host_end_s = None if row.host_end_s is None else row.host_end_s + shift
    return row._replace(
        start_s=row.start_s + shift, end_s=row.end_s + shift, host_start_s=host_start_s, host_end_s=host_end_s
    )


def _check_rows(run: Run, schedule: Schedule, place: int, part: Iteration) -> None:
    """Refuse rows that are not those of the program, in its order."""
    expected = [action for slot in schedule.ranks[place] for action in slot.computations]
    actual = [row.action for row in part.rows if row.action.kind in COMPUTE]
    if actual == expected:
        return
    index = next(
        (index for index, pair in enumerate(zip(actual, expected, strict=False)) if pair[0] != pair[1]),
        min(map(len, (actual, expected))),
    )
    recorded, planned = (str(row[index]) if index < len(row) else "nothing" for row in (actual, expected))
    raise ValueError(
        f"{run.folder}: in iteration {part.iteration}, computation {index} of stage {place} is {recorded}, but its program "
        f"says {planned}. Was it recorded by another version of bpipe?"
    )


def _with_other_ends(schedule: Schedule, lanes: Sequence[Lane | None]) -> tuple[Lane | None, ...]:
    """Add the hosts' ends of transfers, of which one-sided hosts have no rows."""
    completed = list(lanes)
    for place, lane in enumerate(lanes):
        if lane is None:
            continue
        written = {row.action.stage for row in lane.transfers if row.action.kind not in OWN_TRANSFERS}
        ends = []
        for guest in guests_of(schedule, place):
            sender, residencies = lanes[guest], residencies_by_host(schedule, guest).get(Host(place), ())
            hosted = {residency.key for residency in residencies}
            ends += [
                Row(row.action.other_end, row.start_s, row.end_s, bytes=row.bytes, slot=row.slot)
                for row in (() if sender is None else sender.transfers)
                if row.action.kind in OWN_TRANSFERS and row.action.key in hosted and row.action.stage not in written
            ]
        if ends:
            transfers = sorted((*lane.transfers, *ends), key=lambda row: row.start_s)
            completed[place] = Lane(lane.source, lane.computations, tuple(transfers))
    return tuple(completed)


def peak_microbatches(schedule: Schedule, place: int, lane: Lane) -> int:
    """Return the most micro-batches that the rank held at once, host buffers for its partner included.

    As in the schedule's own count these are whole ones: none is away between the halves of its backward.
    """
    rows = (*lane.computations, *(row for row in lane.transfers if row.action.kind in OWN_TRANSFERS))
    changes = (change for _, change in changes_in_time(rows, counting(schedule.num_stages)))
    # If the partner keeps its activations itself, or moves none, no host buffer was made here.
    return max(accumulate(changes, initial=0)) + (num_host_buffers(schedule, place) if lane.source.host_bytes else 0)


def ended_transfers(
    measured: Measured, timelines: Sequence[Timeline], place: int, stage: int | None = None
) -> list[Row]:
    """Return the evictions and loads that a place made, of one stage or all, whose duration is known."""
    record = measured.records[place]
    if record is None:
        return []
    rows = (row for _, lane in lanes_of(timelines, place) for row in lane.transfers)
    own = (row for row in rows if row.action.kind in OWN_TRANSFERS and stage in (None, row.action.stage))
    return [row for row in own if row.seconds > 0 and record.ended(row)]
