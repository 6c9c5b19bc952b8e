"""Lay a recorded run beside its prediction.

In: a `Measured` and its `Prediction`. Out: a `Comparison`: a row per stage, totals, differences.

Where several iterations are shown, times are the median over them, a warm-up left out, and bytes the most. Knows no
format and no words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from bpipe.balance.config import BalanceConfig
from bpipe.predict.flops import mfu
from bpipe.record.format import Iteration, Row
from bpipe.record.report.replay import Prediction
from bpipe.record.report.selection import (
    Lane,
    Measured,
    Timeline,
    ended_transfers,
    lanes_of,
    peak_microbatches,
    steps_of,
)
from bpipe.schedule.action import Kind


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage, measured and predicted. None: not measured, or there is no such thing.

    `all_*` are the most over all pipelines, the one shown included. Bytes are activations; `weights_bytes` are beside
    them.
    """

    stage: int
    rank: int | None
    measured_bytes: int | None
    predicted_bytes: int | None
    bound_bytes: int | None
    unbalanced_bytes: int | None
    weights_bytes: int | None
    device_peak_bytes: int | None
    limit_bytes: int | None
    measured_microbatches: int | None
    predicted_microbatches: int
    bound_microbatches: int | None
    evictions: int | None
    loads: int | None
    moved_fraction: float | None
    bubble: float | None
    predicted_bubble: float
    exposed_s: float | None
    predicted_exposed_s: float
    bytes_per_s: float | None
    all_measured_bytes: int | None
    all_exposed_s: float | None

    @property
    def held_bytes(self) -> int | None:
        """Weights, where they are known, plus activations."""
        return None if self.all_measured_bytes is None else self.all_measured_bytes + (self.weights_bytes or 0)


@dataclass(frozen=True, slots=True)
class Totals:
    """Times of an iteration.

    `pipeline_s`: from the first computation to the last. `step_s`: a whole training step; None where the run did not
    say.

    `mfu` is of `step_s`, from 0 to 1; None where FLOPs, step or the device's peak are not known.
    """

    pipeline_s: float
    predicted_pipeline_s: float
    loop_s: float
    step_s: float | None
    bubble: float
    predicted_bubble: float
    mfu: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    measured: Measured
    prediction: Prediction
    stages: tuple[StageRow, ...]
    totals: Totals


def compare(measured: Measured, prediction: Prediction) -> Comparison:
    stages = tuple(_row(measured, prediction, place) for place in range(measured.schedule.num_ranks))
    return Comparison(measured, prediction, stages, _totals(measured, prediction))


def _row(measured: Measured, prediction: Prediction, place: int) -> StageRow:
    typical, shown = lanes_of(measured.typical, place), lanes_of(measured.shown, place)
    record, peaks = measured.records[place], prediction.peaks[place]
    weights, limit = (record.weights_bytes, record.limit_bytes) if record else (None, None)
    others = measured.others(place)
    return StageRow(
        stage=place,
        rank=measured.ranks[place],
        measured_bytes=_most(lane.peak_bytes for _, lane in shown),
        predicted_bytes=peaks.num_bytes,
        bound_bytes=peaks.bound_bytes,
        unbalanced_bytes=prediction.unbalanced[place].num_bytes,
        weights_bytes=weights,
        device_peak_bytes=_most(one.device_peak_bytes for one in others),
        limit_bytes=limit,
        measured_microbatches=_most(peak_microbatches(measured.schedule, place, lane) for _, lane in shown),
        predicted_microbatches=peaks.microbatches,
        bound_microbatches=peaks.bound_microbatches,
        evictions=_count(typical, Kind.EVICT),
        loads=_count(typical, Kind.LOAD),
        moved_fraction=_moved_fraction([lane.source for _, lane in typical], measured.program.balance),
        bubble=_median(_bubble(timeline, [lane]) for timeline, lane in typical),
        predicted_bubble=prediction.bubble(place),
        exposed_s=_median(lane.exposed_s for _, lane in typical),
        predicted_exposed_s=float(prediction.report.exposed_s[place]),
        bytes_per_s=_bytes_per_s(ended_transfers(measured, measured.typical, place)),
        all_measured_bytes=_most(row.live_bytes for one in others for row in one.rows),
        all_exposed_s=max((sum(row.wait_s for row in one.rows) for one in others), default=None),
    )


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None


def _count(lanes: Sequence[tuple[Timeline, Lane]], kind: Kind) -> int | None:
    """Return how many transfers of a kind an iteration typically has."""
    found = _median(lane.count(kind) for _, lane in lanes)
    return None if found is None else int(found)


def _moved_fraction(sources: Sequence[Iteration], how: BalanceConfig | None) -> float | None:
    """Return the smallest of the rank's stages': the share that leaves of what a forward keeps for its backward, or
    of the part that is to."""
    parts = {} if how is None else how.part_bytes
    wanted = [
        (one.moved_bytes.get(stage, 0), min(kept, parts.get(stage, kept)))
        for one in sources
        for stage, kept in one.kept_bytes.items()
    ]
    shares = [min(1.0, moved / least) for moved, least in wanted if least]
    return min(shares, default=None)


def _bubble(timeline: Timeline, lanes: Sequence[Lane]) -> float:
    """Return the share of these lanes' time in which they did not compute."""
    whole_s = timeline.span_s * len(lanes)
    return 1 - sum(lane.busy_s for lane in lanes) / whole_s if whole_s else 0.0


def _bytes_per_s(rows: list[Row]) -> float | None:
    """Return the bytes of a stage's own transfers over how long they took."""
    known = [row for row in rows if row.bytes]
    return sum(row.bytes or 0 for row in known) / sum(row.seconds for row in known) if known else None


def _totals(measured: Measured, prediction: Prediction) -> Totals:
    typical = measured.typical
    step = _median(steps_of(measured).values())
    info = measured.run.info
    reached = None
    if step and info.flops_per_iteration and info.peak_flops and info.world_size:
        reached = mfu(info.flops_per_iteration, step, info.world_size, info.peak_flops)
    places = range(measured.schedule.num_ranks)
    return Totals(
        pipeline_s=median(timeline.span_s for timeline in typical),
        predicted_pipeline_s=prediction.span_s,
        loop_s=median(max(lane.source.elapsed_s for lane in timeline.present) for timeline in typical),
        step_s=step,
        bubble=median(_bubble(timeline, timeline.present) for timeline in typical),
        predicted_bubble=sum(prediction.bubble(place) for place in places) / len(places),
        mfu=reached,
    )


def shared_cores(comparison: Comparison) -> str | None:
    """Say where ranks that compute on the CPU have fewer cores than there are of them: a transfer then takes its
    time from computations, and no clock tells how much."""
    ranks = comparison.measured.run.ranks
    for host in dict.fromkeys(record.host for record in ranks):
        here = [record for record in ranks if record.host == host and record.device == "cpu"]
        cores = min((record.cores for record in here if record.cores), default=None)
        if cores is not None and cores < len(here):
            return f"{len(here)} ranks share {cores} cores on {host}"
    return None
