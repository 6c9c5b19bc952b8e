"""Write folders as a recorded run leaves them, from a simulation with known changes.

The run is simulated with its own costs and then disturbed, so that a test knows how it differs from the prediction:
seeded noise, single slow micro-batches, a slow first iteration, slow transfers, messages that take time.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.record.format import ONE_SIDED
from bpipe.record.report.memory import own_peak
from bpipe.schedule.action import SHARDS, Action, Kind
from bpipe.schedule.families.families import exchange_of
from bpipe.schedule.host_buffers import Residency, host_buffers, num_host_buffers
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.memory import live_bytes, memory_of
from bpipe.schedule.schedule import Schedule
from bpipe.simulate import engine
from bpipe.simulate.cost import Costs, Link, Links, ShardCost, StageCost
from bpipe.simulate.report import Simulation

SAVED, MOVED, RECEIVED = 11_000_000, 10_500_000, 32_768
BEGIN_S = 1_763_721_600.0
DOCS = Path(__file__).resolve().parents[4] / "docs" / "report.md"


@dataclass(frozen=True)
class Truth:
    """What the run does."""

    schedule: str = "1f1b"
    num_stages: int = 8
    num_microbatches: int = 16
    num_chunks: int = 1
    balance: str = "bpipe"
    vocabulary: str = "none"
    written: str | None = None
    iterations: tuple[int, ...] = (5, 6, 7)
    forward_s: float = 0.010
    backward_s: float = 0.020
    seconds: Mapping[str, float] = field(
        default_factory=dict
    )  # by stage and kind, such as 0F, instead of the two above
    noise: float = 0.0
    message_s: float = 0.0
    probe: float | None = 4e9  # bytes per second of the link when probed
    speed: float = 4e9  # bytes per second that transfers reach
    warm_up: int | None = None  # the iteration in which all computations take `warm_up_times` as long
    warm_up_times: float = 1.5
    slow: Mapping[tuple[int, str], float] = field(default_factory=dict)  # how much longer an iteration's action takes
    extra_bytes: Mapping[int, int] = field(default_factory=dict)  # by place, above the prediction
    moved_bytes: int = MOVED
    kept_bytes: int | None = None
    received_bytes: int = RECEIVED
    transport: str = "peer"
    synchronous: bool = False
    num_pipelines: int = 1
    clock_error_s: Mapping[int, float] = field(default_factory=dict)
    weights_bytes: int | None = 30_000_000
    limit_bytes: int | None = None
    cores: int | None = None
    flops: float | None = None
    peak_flops: float | None = None
    seed: int = 1

    @property
    def program(self) -> ScheduleConfig:
        return ScheduleConfig(
            self.schedule,
            self.num_stages,
            self.num_microbatches,
            num_chunks=self.num_chunks,
            balance=named_balance(self.balance),
            vocabulary=Vocabulary(self.vocabulary),
            written=self.written,
        )


COLUMNS = "action start_s end_s wait_s host_start_s host_end_s bytes slot live_bytes left_bytes".split()


def write_run(folder: Path, truth: Truth | None = None, **changes: Any) -> Path:
    """Write a folder with every file of a run that ended normally."""
    truth = replace(truth or Truth(), **changes)
    schedule = build(truth.program)
    places, world = schedule.num_ranks, schedule.num_ranks * truth.num_pipelines
    folder.mkdir(parents=True, exist_ok=True)
    partners = schedule.partners or (None,) * places
    links = [
        {
            "ranks": [place, partner],
            "transport": truth.transport,
            "bytes_per_s": {truth.transport: truth.probe, "nccl": 1.0},
            "refused": {},
        }
        for place, partner in enumerate(partners)
        if truth.probe and partner is not None and place < partner
    ]
    (folder / "run.json").write_text(
        json.dumps(
            {
                "format": "bpipe-run",
                "version": 1,
                "started": "2025-11-21T10:40:00+00:00",
                "world_size": world,
                "num_pipelines": truth.num_pipelines,
                "balanced": truth.balance != "none",
                "synchronous": truth.synchronous,
                "device": "cpu",
                "torch": "2.15.0",
                "megatron_core": "0.19.2",
                "megatron_core_path": "/venv/megatron/core",
                "flops_per_iteration": truth.flops,
                "peak_flops": truth.peak_flops,
                "peak_source": None if truth.peak_flops is None else "--bpipe-peak-tflops",
                "links": links,
                "unknown": "to be ignored",
            }
        )
    )
    reports = [(number, _simulated(schedule, truth, number)) for number in truth.iterations]
    for pipeline in range(truth.num_pipelines):
        for place in range(places):
            rank = pipeline * places + place
            partner = None if partners[place] is None else pipeline * places + partners[place]
            header = {"format": "bpipe-record", "version": 1, "rank": rank, "pipeline": pipeline, "place": place}
            header |= {"host": "node-0"}
            header |= {"device": "cpu", "transport": None if partner is None else truth.transport, "partner": partner}
            header |= {"weights_bytes": truth.weights_bytes, "limit_bytes": truth.limit_bytes, "cores": truth.cores}
            lines = [header, *(_line(schedule, truth, place, index, *row) for index, row in enumerate(reports))]
            (folder / f"record_{rank:05d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = [{"iteration": number, "elapsed_s": float(report.pipeline_s) + 0.05} for number, report in reports]
    (folder / "iterations.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return folder


def _simulated(schedule: Schedule, truth: Truth, number: int) -> Simulation:
    """Simulate one iteration as it went."""
    times = truth.warm_up_times if truth.warm_up == number else 1.0
    moved = truth.moved_bytes if truth.balance != "none" else 0
    stages = []
    for stage in range(schedule.num_stages):
        forward = truth.seconds.get(f"{stage}F", truth.forward_s)
        backward = truth.seconds.get(f"{stage}B", truth.backward_s)
        # If a backward has halves, each takes half of it.
        seconds = (forward * times, backward * times, backward * times / 2)
        stages.append(StageCost(*seconds, transfer_s=moved / truth.speed, moved_bytes=moved, saved_bytes=_saved(stage)))
    alone = frozenset(range(schedule.num_ranks)) if truth.transport in ONE_SIDED else frozenset[int]()
    links = Links(Link(latency_s=truth.message_s))
    shards = tuple(
        ShardCost(truth.seconds.get(f"{rank}S", 0.001), truth.seconds.get(f"{rank}T", 0.002))
        for rank in range(schedule.num_ranks)
    )
    costs = Costs(tuple(stages), links, exchange_of(schedule.name).predicted, alone, truth.synchronous, shards)
    source = random.Random(f"{truth.seed} {number}")
    plain = engine.durations

    def durations(costs: Costs, num_ranks: int) -> dict[Kind, Any]:
        return {
            kind: _Durations(truth, number, kind, values, source) for kind, values in plain(costs, num_ranks).items()
        }

    with mock.patch.object(engine, "durations", durations):
        return engine.simulate(schedule, costs)


def _saved(stage: int) -> int:
    return SAVED + 1000 * stage


class _Durations:
    """The seconds of one kind of computation: the engine reads them once per stage and micro-batch, in order."""

    def __init__(self, truth: Truth, number: int, kind: Kind, seconds: Any, source: random.Random) -> None:
        self._truth, self._number, self._kind, self._seconds, self._source = truth, number, kind, seconds, source
        self._asked: Counter[int] = Counter()

    def __getitem__(self, stage: int) -> float:
        action, truth = Action(stage, self._kind, self._asked[stage]), self._truth
        self._asked[stage] += 1
        seconds = self._seconds[stage] * (1 + truth.noise * self._source.uniform(-1, 1))
        return float(seconds + truth.slow.get((self._number, str(action)), 0.0))


def _line(schedule: Schedule, truth: Truth, place: int, index: int, number: int, report: Simulation) -> dict[str, Any]:
    """Return one rank's line of one iteration; its clock may be off by `clock_error_s`."""
    stages = schedule.layout.stages_of(place)
    moves = {action.stage for slot in schedule.ranks[place] for action in slot.transfers if action.kind is Kind.EVICT}
    host_bytes = num_host_buffers(schedule, place) * truth.moved_bytes
    saved = {stage: _saved(stage) for stage in stages}
    moved = dict.fromkeys(sorted(moves), truth.moved_bytes)
    peak = (
        own_peak(schedule, place, saved, moved, truth.received_bytes, {}) + host_bytes + truth.extra_bytes.get(place, 0)
    )
    return {
        "iteration": number,
        "program": {
            "schedule": truth.schedule,
            "num_stages": truth.num_stages,
            "num_microbatches": truth.num_microbatches,
            "num_chunks": truth.num_chunks,
            "balance": truth.balance,
            **({} if truth.vocabulary == "none" else {"vocabulary": truth.vocabulary}),
            **({} if truth.written is None else {"written": truth.written}),
        },
        "begin_s": BEGIN_S + index * max(10, 2 * float(report.pipeline_s)) + truth.clock_error_s.get(place, 0.0),
        "elapsed_s": float(report.pipeline_s),
        "saved_bytes": {str(stage): size for stage, size in saved.items()},
        "moved_bytes": {str(stage): size for stage, size in moved.items()},
        "kept_bytes": {
            str(stage): truth.moved_bytes if truth.kept_bytes is None else truth.kept_bytes for stage in moved
        },
        "kept_counted_by": "allocator" if moved else None,
        "received_bytes": truth.received_bytes,
        "host_bytes": host_bytes,
        "device_peak_bytes": None,
        "columns": [*COLUMNS, "unknown"],
        "actions": [[*row, None] for row in _rows(schedule, truth, place, report, peak)],
    }


def _asked(report: Simulation, place: int, action: Action, start: float) -> float:
    """Return when a rank waits for a two-sided transfer, which is all that is known of its end."""
    rows = report.computations[place]
    if action.kind is Kind.LOAD:
        return float(
            next(row.start_s for row in rows if row.action == Action(action.stage, Kind.BACKWARD, action.microbatch))
        )
    if action.kind is Kind.HOST:
        loaded = Action(action.stage, Kind.RETURN, action.microbatch)
        return float(
            min(row.start_s for row in report.transfers[place] if row.action == loaded and row.start_s > start)
        )
    return min((float(row.end_s) for row in rows if row.end_s > start), default=start)


def _rows(schedule: Schedule, truth: Truth, place: int, report: Simulation, peak: int) -> list[list[Any]]:
    """Return the rows by start. A rank's whole simulated wait for transfers is put on its first own transfer."""
    partner = schedule.partners[place] if schedule.partners else place
    slots = {**host_buffers(schedule, place), **host_buffers(schedule, partner)}
    stays: Counter[tuple[int, int]] = Counter()
    rows: list[list[Any]] = []
    left = float(report.exposed_s[place])
    for timed in report.transfers[place]:
        action, start, end = timed.action, float(timed.start_s), float(timed.end_s)
        key = (action.stage, action.microbatch)
        stays[key] += action.kind in (Kind.EVICT, Kind.HOST)
        own = action.kind in (Kind.EVICT, Kind.LOAD)
        if truth.transport in ONE_SIDED and not own:
            continue
        if truth.transport not in ONE_SIDED:
            end = max(end, _asked(report, place, action, start))
        slot = slots[Residency(*key, stays[key] - 1)]
        rows.append([str(action), start, end, left if own else 0.0, start, end, truth.moved_bytes, slot, None, None])
        left = 0.0 if own else left
    levels = live_bytes(schedule, place, memory_of([_saved(stage) for stage in range(schedule.num_stages)]))
    live = [level for level, slot in zip(levels, schedule.ranks[place], strict=True) for _ in slot.computations]
    top = live.index(max(live))
    for index, timed in enumerate(report.computations[place]):
        start, end, forward = float(timed.start_s), float(timed.end_s), timed.action.kind is Kind.FORWARD
        held_bytes = peak if index == top else min(live[index], peak)
        saved = _saved(timed.action.stage) * (timed.action.kind not in SHARDS)
        times = [start, end, 0.0, start, end]
        rows.append(
            [
                str(timed.action),
                *times,
                saved if forward else None,
                None,
                held_bytes,
                held_bytes - saved * (not forward),
            ]
        )
    return sorted(rows, key=lambda row: row[1])


def documented(heading: str) -> set[str]:
    """Return the keys in the first column of the table under a heading of docs/report.md."""
    section = DOCS.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = (line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row)}


def edit_rows(folder: Path, rank: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change every row of a rank's record, given as a dictionary by column."""
    path = folder / f"record_{rank:05d}.jsonl"
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    for line in lines:
        rows = [dict(zip(line["columns"], row, strict=True)) for row in line["actions"]]
        for row in rows:
            change(row)
        line["actions"] = [list(row.values()) for row in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
