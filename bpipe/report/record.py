"""Hold what a run recorded. In: values read from its files. Out: frozen records of ranks and their iterations. Reads no file itself.

A *place* is a rank's position in its pipeline, 0 to p-1; with data or tensor parallelism there are several pipelines. Times of a row are
seconds from its iteration's `begin_s`, which is unix time on rank 0's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bpipe.ir.action import Action
from bpipe.program import ScheduleConfig

# Transports whose copies tell when they really ended.
ONE_SIDED = frozenset(("peer", "host"))

# A wait shorter than this found the transfer over: it is what asking costs.
SHORTEST_WAIT_S = 5e-5


class Row(NamedTuple):
    """One action of one rank. `wait_s`: how long computation stood still for this transfer; `live_bytes`: the most held meanwhile,
    `left_bytes`: what was held at its end.
    """

    action: Action
    start_s: float
    end_s: float
    wait_s: float = 0.0
    host_start_s: float | None = None
    host_end_s: float | None = None
    bytes: int | None = None
    slot: int | None = None
    live_bytes: int | None = None
    left_bytes: int | None = None

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Iteration:
    """One rank's part of one iteration. `saved_bytes`, `moved_bytes` and `kept_bytes` are of one micro-batch, by stage.

    `kept_bytes`: all that a forward keeps for its backward, of stages that leave, as the run counted it in its first iteration.
    """

    iteration: int
    program: ScheduleConfig
    begin_s: float
    elapsed_s: float
    saved_bytes: Mapping[int, int]
    moved_bytes: Mapping[int, int]
    kept_bytes: Mapping[int, int]
    received_bytes: int
    host_bytes: int
    device_peak_bytes: int | None
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank and its iterations, by number. `partner` is a rank of the world, like `rank`. `cores` are those it may use on `host`."""

    rank: int
    pipeline: int
    place: int
    host: str
    device: str
    transport: str | None
    partner: int | None
    weights_bytes: int | None
    limit_bytes: int | None
    cores: int | None
    iterations: Mapping[int, Iteration]

    def ended(self, row: Row) -> bool:
        """Whether the row's end is the transfer's own. A two-sided transport only says that it had ended when somebody asked.

        Then the end is its own where the one who asked had to wait for it.
        """
        return self.transport in ONE_SIDED or row.wait_s > SHORTEST_WAIT_S


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What a pair's link carried when it was probed at the start, by transport."""

    ranks: frozenset[int]
    transport: str | None
    bytes_per_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """run.json: what holds for the whole run. `flops_per_iteration` are those of all ranks, `peak_flops` one device's a second.

    `synchronous`: it waited for every transfer where it started it.
    """

    started: str | None = None
    world_size: int | None = None
    num_pipelines: int | None = None
    device: str | None = None
    synchronous: bool = False
    versions: tuple[tuple[str, str], ...] = ()
    flops_per_iteration: float | None = None
    peak_flops: float | None = None
    peak_source: str | None = None
    links: tuple[LinkSpeed, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """A whole folder. `step_s[iteration]` is a training step with its reduction and update; `run_peak_bytes[rank]` the peak over all
    iterations, recorded or not. `notes` tell what is missing.
    """

    folder: Path
    info: RunInfo
    ranks: tuple[RankRecord, ...]
    step_s: Mapping[int, float]
    run_peak_bytes: Mapping[int, int]
    notes: tuple[str, ...]
