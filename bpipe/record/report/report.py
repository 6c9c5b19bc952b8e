"""A recorded run beside its prediction: a row per stage, and totals.

Times are the median over all iterations, without a warm-up, and bytes the maximum.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bpipe.balance.config import BalanceConfig
from bpipe.predict.flops import mfu
from bpipe.record.compare import SideBySide, compare, read_training
from bpipe.record.format import SUMMARY, Iteration, RankSummary, Row
from bpipe.record.read import read_run, read_value, refuse_two_runs
from bpipe.record.report.replay import Prediction, replay
from bpipe.record.report.selection import Lane, Measured, Timeline, choose, ended_transfers, lanes_of, peak_microbatches
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
    evictions: int | None
    loads: int | None
    moved_fraction: float | None
    bubble: float | None
    predicted_bubble: float
    exposed_s: float | None
    predicted_exposed_s: float
    bytes_per_s: float | None
    all_measured_bytes: int | None  # the maximum over all pipelines

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
    step_s: float | None  # of a whole training step
    bubble: float
    predicted_bubble: float
    mfu: float | None  # of a training step; above 1 if the peak is too low


@dataclass(frozen=True, slots=True)
class Report:
    """A recorded run beside its prediction, by stage and as a whole."""

    measured: Measured
    prediction: Prediction
    stages: tuple[StageRow, ...]
    totals: Totals
    trainings: SideBySide | None  # the baseline and this run, number by number

    @property
    def num_pipelines(self) -> int:
        return len({record.pipeline for record in self.measured.run.ranks})


def report_of(folder: str | Path, baseline: str | Path | None = None) -> Report:
    """Make the report of a folder.

    Args:
        folder: the folder of a run's --bpipe-report.
        baseline: the folder of the same training without balancing.

    Returns:
        The run beside its prediction.

    Raises:
        ValueError: a folder has no record of one run, or the baseline is not such a training.
    """
    measured = choose(read_run(folder))
    trainings, peaks = None, dict[int, int]()
    if baseline is not None:
        peaks = _unbalanced_peaks(Path(baseline), measured.schedule.num_ranks)
        unbalanced, balanced = read_training(Path(baseline)), read_training(Path(folder))
        trainings = compare(unbalanced, balanced, only_common=True)
    prediction, places = replay(measured), range(measured.schedule.num_ranks)
    stages = tuple(_row(measured, prediction, place, peaks.get(place)) for place in places)
    return Report(measured, prediction, stages, _totals(measured, prediction), trainings)


def _unbalanced_peaks(folder: Path, num_ranks: int) -> dict[int, int]:
    """Return the peak of each stage of a run without balancing. Of replicas of a stage, the largest counts."""
    rows = {path.name: read_value(path, RankSummary, "the file", "a rank's summary") for path in SUMMARY.files(folder)}
    refuse_two_runs(folder, [(name, row.run) for name, row in rows.items()])
    peaks: dict[int, int] = {}
    for name, row in rows.items():
        if row.balanced or row.stage is None:
            raise ValueError(f"{folder / name}: this run was balanced: give the one without balancing as --baseline")
        peaks[row.stage] = max(row.peak_bytes, peaks.get(row.stage, 0))
    if sorted(peaks) != list(range(num_ranks)):
        raise ValueError(
            f"{folder}: has reports of stages {sorted(peaks)}, not of 0 to {num_ranks - 1}; did every rank finish?"
        )
    return peaks


def _row(measured: Measured, prediction: Prediction, place: int, baseline_bytes: int | None) -> StageRow:
    steady, lanes = lanes_of(measured.steady, place), lanes_of(measured.timelines, place)
    record, peaks = measured.records[place], prediction.peaks[place]
    weights, limit = (record.weights_bytes, record.limit_bytes) if record else (None, None)
    others = measured.others(place)
    return StageRow(
        stage=place,
        rank=measured.ranks[place],
        measured_bytes=max_known(lane.peak_bytes for _, lane in lanes),
        predicted_bytes=peaks.num_bytes,
        bound_bytes=peaks.bound_bytes,
        unbalanced_bytes=prediction.unbalanced[place].num_bytes,
        baseline_bytes=baseline_bytes,
        weights_bytes=weights,
        device_peak_bytes=max_known(iteration.device_peak_bytes for iteration in others),
        limit_bytes=limit,
        measured_microbatches=max_known(peak_microbatches(measured.schedule, place, lane) for _, lane in lanes),
        predicted_microbatches=peaks.microbatches,
        evictions=_count(steady, Kind.EVICT),
        loads=_count(steady, Kind.LOAD),
        moved_fraction=_moved_fraction([lane.source for _, lane in steady], measured.program.balance),
        bubble=_median(_bubble(timeline, [lane]) for timeline, lane in steady),
        predicted_bubble=prediction.bubble(place),
        exposed_s=_median(lane.exposed_s for _, lane in steady),
        predicted_exposed_s=float(prediction.report.exposed_s[place]),
        bytes_per_s=_bytes_per_s(ended_transfers(measured, measured.steady, place)),
        all_measured_bytes=max_known(row.live_bytes for iteration in others for row in iteration.rows),
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
    steady = measured.steady
    steps, info = measured.run.step_s, measured.run.info
    step = _median(steps[timeline.iteration] for timeline in steady if timeline.iteration in steps)
    reached = None
    if step and info.flops_per_iteration and info.peak_flops and info.world_size:
        reached = mfu(info.flops_per_iteration, step, info.world_size, info.peak_flops)
    places = range(measured.schedule.num_ranks)
    return Totals(
        pipeline_s=median(timeline.span_s for timeline in steady),
        predicted_pipeline_s=prediction.span_s,
        step_s=step,
        bubble=median(_bubble(timeline, timeline.present) for timeline in steady),
        predicted_bubble=sum(prediction.bubble(place) for place in places) / len(places),
        mfu=reached,
    )


def shared_cores(report: Report) -> str | None:
    """Return which ranks on a CPU have fewer cores than there are of them, if any.

    A transfer then takes its time from computations, and no clock shows how much.
    """
    ranks = report.measured.run.ranks
    for host in dict.fromkeys(record.host for record in ranks):
        of_host = [record for record in ranks if record.host == host and record.device == "cpu"]
        cores = min((record.cores for record in of_host if record.cores), default=None)
        if cores is not None and cores < len(of_host):
            return f"{len(of_host)} ranks share {cores} cores on {host}"
    return None
