"""Compare a recorded run with its prediction: a row per stage, totals, and where they differ most.

Times are the median over all iterations, without a warm-up, and bytes the maximum.

At most three differences are listed, of different kinds: an iteration's pipeline time, a forward, a backward, exposed
transfer time, and a peak. The size of a difference in time is its share of the predicted pipeline time, where a
computation counts as often as it runs; that of a difference in bytes is its share of the predicted peak.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from bpipe.balance.config import BalanceConfig
from bpipe.predict.flops import mfu
from bpipe.record.compare import SideBySide
from bpipe.record.format import Iteration, Row
from bpipe.record.report.replay import Prediction
from bpipe.record.report.selection import (
    Lane,
    Measured,
    Timeline,
    ended_transfers,
    lanes_of,
    peak_microbatches,
    warm_up_ratios,
)
from bpipe.record.report.units import bytes_text, counted, seconds_text
from bpipe.schedule.action import Action, Kind


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
    mfu: float | None  # of a training step, from 0 to 1


@dataclass(frozen=True, slots=True)
class Comparison:
    measured: Measured
    prediction: Prediction
    stages: tuple[StageRow, ...]
    totals: Totals
    trainings: SideBySide | None  # the baseline and this run, number by number


def compare(
    measured: Measured, prediction: Prediction, trainings: SideBySide | None, baseline_bytes: Mapping[int, int]
) -> Comparison:
    """Compare a run with its prediction, and with the peaks of another run, by stage."""
    places = range(measured.schedule.num_ranks)
    stages = tuple(_row(measured, prediction, place, baseline_bytes.get(place)) for place in places)
    return Comparison(measured, prediction, stages, _totals(measured, prediction), trainings)


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


_MAX_DIFFERENCES = 3
# Smaller differences are not worth a reader's time.
_SMALLEST_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of measured and predicted."""

    kind: str
    stage: int | None  # None for a whole iteration
    what: str
    measured: float
    predicted: float
    unit: str  # "s" or "bytes"
    share: float  # its size
    beside: tuple[str, ...]  # facts that were measured beside it
    iteration: int | None = None  # None for the median of all

    def text(self, value: float) -> str:
        return seconds_text(value) if self.unit == "s" else bytes_text(value)


def differences(comparison: Comparison) -> tuple[Difference, ...]:
    """Return the largest difference of each kind, the largest ones first."""
    largest: dict[str, Difference] = {}
    for candidate in (*_differing_times(comparison), *_differing_peaks(comparison)):
        other = largest.get(candidate.kind)
        if candidate.share >= _SMALLEST_SHARE and (other is None or candidate.share > other.share):
            largest[candidate.kind] = candidate
    return tuple(sorted(largest.values(), key=lambda difference: -difference.share)[:_MAX_DIFFERENCES])


def _differing_times(comparison: Comparison) -> Iterator[Difference]:
    measured, span_s, cores = comparison.measured, comparison.totals.predicted_pipeline_s, shared_cores(comparison)
    crowded, layout = [] if cores is None else [cores], measured.schedule.layout

    def difference(
        kind: str,
        stage: int | None,
        what: str,
        seconds: float,
        predicted_s: float,
        beside: Sequence[str],
        times: int = 1,
        iteration: int | None = None,
    ) -> Difference:
        share = abs(seconds - predicted_s) * times / span_s if span_s else 0.0
        return Difference(kind, stage, what, seconds, predicted_s, "s", share, tuple(beside), iteration)

    for timeline in measured.timelines:
        number, beside = timeline.iteration, crowded
        if number == measured.warm_up:
            ratio = median(warm_up_ratios(measured.timelines))
            slow = f"the first recorded iteration, whose stages computed {ratio:.2f} times as long as later"
            beside = [slow, *crowded]
        what = f"iteration {number}, pipeline time"
        yield difference("iteration", None, what, timeline.span_s, span_s, beside, iteration=number)
    for (stage, kind), predicted_s in comparison.prediction.basis.seconds.items():
        replicas = layout.replicas(stage)
        places = (layout.rank_of_action(Action(stage, kind, pipe)) for pipe in range(layout.num_pipes))
        for place in dict.fromkeys(places):
            lanes = [(timeline.iteration, lane) for timeline, lane in lanes_of(measured.steady, place)]
            iterations = [(number, rows) for number, lane in lanes if (rows := lane.computations_of(stage, kind))]
            if not iterations:
                continue
            samples = [(row.seconds, row.action, number) for number, rows in iterations for row in rows]
            slowest_s, action, number = max(samples, key=lambda sample: sample[0])
            slowest = f"the slowest of {len(samples)}, {action} in iteration {number}, took {seconds_text(slowest_s)}"
            # The mean of an iteration, of which the median: rare slow ones make a difference.
            seconds = median(mean(row.seconds for row in rows) for _, rows in iterations)
            pipe = f" of pipe {replicas.index(place)}" if len(replicas) > 1 else ""
            name, times = kind.name.lower(), len(iterations[0][1])
            what = f"stage {stage}{pipe}, {name.replace('_', ' ')} (mean)"
            yield difference(name, stage, what, seconds, predicted_s, [slowest, *crowded], times)
    for row in comparison.stages:
        if row.exposed_s is None:
            continue
        waited = [
            (transfer.wait_s, transfer.action, timeline.iteration)
            for timeline, lane in lanes_of(measured.steady, row.stage)
            for transfer in lane.transfers
            if transfer.wait_s > 0
        ]
        beside = []
        if waited:
            wait_s, action, number = max(waited, key=lambda wait: wait[0])
            waits = f"{counted(len(waited), 'wait')}, {seconds_text(wait_s)}"
            beside = [f"the longest of {waits}, was for {action} in iteration {number}"]
        what = f"stage {row.stage}, exposed transfer time"
        yield difference("exposed", row.stage, what, row.exposed_s, row.predicted_exposed_s, beside)


def _differing_peaks(comparison: Comparison) -> Iterator[Difference]:
    for row in comparison.stages:
        if row.measured_bytes is None or not row.predicted_bytes:
            continue
        share = abs(row.measured_bytes - row.predicted_bytes) / row.predicted_bytes
        lanes = [lane for _, lane in lanes_of(comparison.measured.steady, row.stage)]
        sizes = {computation.bytes for lane in lanes for computation in lane.computations if computation.bytes}
        beside = [f"{row.measured_microbatches} micro-batches at once, {row.predicted_microbatches} in the schedule"]
        if lanes and len(lanes[0].source.saved_bytes) == 1 and len(sizes) > 1:
            beside.append(f"micro-batches of {bytes_text(min(sizes))} to {bytes_text(max(sizes))}")
        left = max(((lane.computations[-1].left_bytes or 0) - lane.source.host_bytes for lane in lanes), default=0)
        if left > 0:
            beside.append(f"{bytes_text(left)} of saved activations still in memory after the last backward")
        what, peaks = f"stage {row.stage}, peak of activations", (row.measured_bytes, row.predicted_bytes)
        yield Difference("peak", row.stage, what, *peaks, "bytes", share, tuple(beside))
