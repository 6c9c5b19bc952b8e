"""Compare a recorded run with its prediction: a row per stage, and totals.

If several iterations are shown, times are the median over them, without a warm-up, and bytes the maximum.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from bpipe.balance.config import BalanceConfig
from bpipe.predict.flops import mfu
from bpipe.record.compare import SideBySide
from bpipe.record.format import Iteration, Row
from bpipe.record.report.replay import Prediction
from bpipe.record.report.selection import Lane, Measured, Timeline, ended_transfers, lanes_of, peak_microbatches
from bpipe.schedule.action import Kind


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage, measured and predicted. Bytes are of activations; None: not measured, or there is no such thing."""

    stage: int
    rank: int | None
    measured_bytes: int | None
    predicted_bytes: int | None
    bound_bytes: int | None
    unbalanced_bytes: int | None  # predicted, without balancing
    baseline_bytes: int | None  # measured by the baseline
    weights_bytes: int | None  # with gradients and optimizer state
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
    all_measured_bytes: int | None  # the maximum over all pipelines, like the next
    all_exposed_s: float | None

    @property
    def without_balancing_bytes(self) -> int | None:
        """What the baseline held or, without a baseline, what the schedule would hold."""
        return self.unbalanced_bytes if self.baseline_bytes is None else self.baseline_bytes

    @property
    def held_bytes(self) -> int | None:
        """Activations, and weights if they are known."""
        return None if self.all_measured_bytes is None else self.all_measured_bytes + (self.weights_bytes or 0)


@dataclass(frozen=True, slots=True)
class Totals:
    """Times of an iteration. None: not known."""

    pipeline_s: float  # from the first computation to the last
    predicted_pipeline_s: float
    loop_s: float
    step_s: float | None  # of a whole training step
    bubble: float
    predicted_bubble: float
    mfu: float | None  # of a training step, from 0 to 1


@dataclass(frozen=True, slots=True)
class Comparison:
    measured: Measured
    prediction: Prediction
    stages: tuple[StageRow, ...]
    totals: Totals
    trainings: SideBySide | None  # the baseline and this run, number by number


def compare(measured: Measured, prediction: Prediction, trainings: SideBySide | None = None) -> Comparison:
    stages = tuple(_row(measured, prediction, place, trainings) for place in range(measured.schedule.num_ranks))
    return Comparison(measured, prediction, stages, _totals(measured, prediction), trainings)


def _row(measured: Measured, prediction: Prediction, place: int, trainings: SideBySide | None) -> StageRow:
    typical, shown = lanes_of(measured.typical, place), lanes_of(measured.shown, place)
    record, peaks = measured.records[place], prediction.peaks[place]
    weights, limit = (record.weights_bytes, record.limit_bytes) if record else (None, None)
    others = measured.others(place)
    return StageRow(
        stage=place,
        rank=measured.ranks[place],
        measured_bytes=max_known(lane.peak_bytes for _, lane in shown),
        predicted_bytes=peaks.num_bytes,
        bound_bytes=peaks.bound_bytes,
        unbalanced_bytes=prediction.unbalanced[place].num_bytes,
        baseline_bytes=None if trainings is None else trainings.first.stages[place].peak_bytes,
        weights_bytes=weights,
        device_peak_bytes=max_known(iteration.device_peak_bytes for iteration in others),
        limit_bytes=limit,
        measured_microbatches=max_known(peak_microbatches(measured.schedule, place, lane) for _, lane in shown),
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
        all_measured_bytes=max_known(row.live_bytes for iteration in others for row in iteration.rows),
        all_exposed_s=max((sum(row.wait_s for row in iteration.rows) for iteration in others), default=None),
    )


def max_known(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _median(values: Iterable[float]) -> float | None:
    samples = list(values)
    return median(samples) if samples else None


def _count(lanes: Sequence[tuple[Timeline, Lane]], kind: Kind) -> int | None:
    """Return how many transfers of a kind an iteration typically has."""
    count = _median(sum(row.action.kind is kind for row in lane.transfers) for _, lane in lanes)
    return None if count is None else int(count)


def _moved_fraction(sources: Sequence[Iteration], balance: BalanceConfig | None) -> float | None:
    """Return the share that leaves of what a forward keeps, or of the part that is to leave; the smallest stage's."""
    parts = {} if balance is None else balance.part_bytes
    wanted = [
        (iteration.moved_bytes.get(stage, 0), min(kept, parts.get(stage, kept)))
        for iteration in sources
        for stage, kept in iteration.kept_bytes.items()
    ]
    return min((min(1.0, moved / kept) for moved, kept in wanted if kept), default=None)


def _bubble(timeline: Timeline, lanes: Sequence[Lane]) -> float:
    """Return the share of these lanes' time in which they did not compute."""
    whole_s = timeline.span_s * len(lanes)
    return 1 - sum(lane.busy_s for lane in lanes) / whole_s if whole_s else 0.0


def _bytes_per_s(rows: list[Row]) -> float | None:
    """Return the bytes of a stage's own transfers divided by their durations."""
    sized = [(row.bytes, row.seconds) for row in rows if row.bytes]
    return sum(num_bytes for num_bytes, _ in sized) / sum(seconds for _, seconds in sized) if sized else None


def _totals(measured: Measured, prediction: Prediction) -> Totals:
    typical = measured.typical
    steps, info = measured.run.step_s, measured.run.info
    step = _median(steps[timeline.iteration] for timeline in typical if timeline.iteration in steps)
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
    """Return which ranks on a CPU have fewer cores than there are of them, if any.

    A transfer then takes its time from computations, and no clock shows how much.
    """
    ranks = comparison.measured.run.ranks
    for host in dict.fromkeys(record.host for record in ranks):
        of_host = [record for record in ranks if record.host == host and record.device == "cpu"]
        cores = min((record.cores for record in of_host if record.cores), default=None)
        if cores is not None and cores < len(of_host):
            return f"{len(of_host)} ranks share {cores} cores on {host}"
    return None
