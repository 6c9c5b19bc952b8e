"""Find where a run differs most from its prediction: at most three differences, of different kinds.

Compared are an iteration's pipeline time, a forward, a backward, exposed transfer time, one transfer, waiting for
neighbours, and a peak. The size of a difference in time is its share of the predicted pipeline time, where a computation
counts as often as it runs; that of a difference in bytes is its share of the predicted peak.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median, quantiles

from bpipe.record.format import Row
from bpipe.record.report.compare import Comparison, shared_cores
from bpipe.record.report.replay import probed_speed
from bpipe.record.report.selection import Lane, Measured, Timeline, ended_transfers, lanes_of, warm_up_ratios
from bpipe.record.report.units import bytes_text, counted, rate_text, seconds_text
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.simulate.report import Timed

# Smaller differences are not worth a reader's time.
SMALLEST_SHARE = 0.005


def transfer_seconds(measured: Measured, place: int, stage: int) -> list[float]:
    """Return seconds of every transfer of the stage in the iterations shown whose end is known."""
    return [row.seconds for row in ended_transfers(measured, measured.typical, place, stage)]


def beside_iteration(comparison: Comparison, timeline: Timeline) -> Iterator[str]:
    if timeline.iteration == comparison.measured.warm_up:
        ratio = median(warm_up_ratios(comparison.measured.timelines))
        yield f"the first recorded iteration, whose stages computed {ratio:.2f} times as long as later"
    rows = [row for lane in timeline.present for row in lane.computations]
    slowest = max(rows, key=lambda row: _excess(comparison, [row]))
    excess_s = _excess(comparison, [slowest])
    yield from _compared(comparison, f"{slowest.action} took", excess_s, "the median of its stage")
    yield from _furthest(comparison, {place: [lane] for place, lane in enumerate(timeline.lanes) if lane is not None})
    yield from filter(None, [shared_cores(comparison)])


def beside_computation(comparison: Comparison, stage: int, kind: Kind, place: int) -> Iterator[str]:
    samples = [
        (timeline.iteration, row, lane)
        for timeline, lane in lanes_of(comparison.measured.typical, place)
        for row in lane.computations_of(stage, kind)
    ]
    number, slowest, _ = max(samples, key=lambda sample: sample[1].seconds)
    yield f"the slowest of {len(samples)}, {slowest.action} in iteration {number}, took {seconds_text(slowest.seconds)}"
    if len(samples) > 1:
        low, _, high = quantiles([row.seconds for _, row, _ in samples], n=4)
        yield f"a quarter took less than {seconds_text(low)}, a quarter more than {seconds_text(high)}"
    during: list[float] = []
    alone: list[float] = []
    for _, row, lane in samples:
        overlaps = (min(row.end_s, other.end_s) - max(row.start_s, other.start_s) for other in lane.transfers)
        (during if max(overlaps, default=0.0) >= row.seconds / 2 else alone).append(row.seconds)
    if during and alone:
        yield f"those during a transfer took {seconds_text(mean(during))} on average, others {seconds_text(mean(alone))}"
    yield from filter(None, [shared_cores(comparison)])


def beside_exposed(comparison: Comparison, place: int) -> Iterator[str]:
    for stage in comparison.measured.schedule.layout.stages_of(place):
        yield from beside_transfer(comparison, stage, place)
        seconds = transfer_seconds(comparison.measured, place, stage)
        if seconds:
            forward_s = comparison.prediction.basis.seconds[stage, Kind.FORWARD]
            yield f"a transfer took {seconds_text(median(seconds))}, a forward {seconds_text(forward_s)}"
    waits = [
        (row.wait_s, row.action, timeline.iteration)
        for timeline, lane in lanes_of(comparison.measured.typical, place)
        for row in lane.transfers
        if row.wait_s > 0
    ]
    if waits:
        longest_s, action, number = max(waits, key=lambda wait: wait[0])
        wait = f"{counted(len(waits), 'wait')}, {seconds_text(longest_s)}"
        yield f"the longest of {wait}, was for {action} in iteration {number}"


def beside_transfer(comparison: Comparison, stage: int, place: int) -> Iterator[str]:
    measured = comparison.measured
    probed = probed_speed(measured, place)
    seconds = transfer_seconds(measured, place, stage)
    if probed is not None and seconds and median(seconds) > 0:
        reached = comparison.prediction.report.costs.stages[stage].moved_bytes / median(seconds)
        yield f"transfers reached {rate_text(reached)}, the link's probe {rate_text(probed)}"


def beside_waiting(comparison: Comparison, place: int) -> Iterator[str]:
    typical = comparison.measured.typical
    late = [(timeline.iteration, late_starts(comparison, timeline, place)) for timeline in typical]
    lost_s = median(sum(starts.values()) for _, starts in late)
    if _is_large(comparison, lost_s):
        longest_s, action, number = max(
            ((seconds, action, number) for number, starts in late for action, seconds in starts.items()),
            key=lambda start: start[0],
        )
        yield (
            f"messages from its neighbours took {seconds_text(lost_s)} longer than predicted in total, the longest "
            f"delay, {seconds_text(longest_s)}, before {action} in iteration {number}"
        )
    others = {other: [lane for _, lane in lanes_of(typical, other)] for other in range(len(comparison.stages))}
    yield from _furthest(comparison, {other: lanes for other, lanes in others.items() if lanes and other != place})
    yield from filter(None, [shared_cores(comparison)])


def late_starts(comparison: Comparison, timeline: Timeline, place: int) -> dict[Action, float]:
    """Return how much longer than predicted the hand-overs before a place's computations took, for those that did.

    A computation can start when the one before it is over, its neighbour has computed its input, and the transfers that
    its rank waited for have ended. The time from then on is the hand-over: the message, and with blocking exchanges also
    the wait for whoever it is exchanged with.
    """
    lane = timeline.lanes[place]
    if lane is None:
        return {}
    schedule, report = comparison.measured.schedule, comparison.prediction.report
    dependencies = Dependencies(schedule.layout, schedule.num_microbatches)
    inputs = {dependencies.operand_of(action) for cell in schedule.ranks[place] for action in cell.computations}
    makers = sorted({rank for value in inputs - {NOTHING} for rank in dependencies.route(value).makers})
    rows = [row for maker in makers if (other := timeline.lanes[maker]) is not None for row in other.computations]
    waits = sorted(row.end_s for row in lane.transfers if row.wait_s > 0)
    measured = _handovers(dependencies, lane.computations, rows, waits)
    # The simulation does not say where a rank waits for transfers; there such a wait counts as a hand-over, and less is
    # called late.
    timed = [timed for maker in makers for timed in report.computations[maker]]
    predicted = _handovers(dependencies, report.computations[place], timed, [])
    late = {action: seconds - predicted.get(action, 0.0) for action, seconds in measured.items()}
    return {action: seconds for action, seconds in late.items() if seconds > 0}


def _handovers(
    dependencies: Dependencies, rows: Sequence[Row | Timed], inputs: Iterable[Row | Timed], waits: Sequence[float]
) -> dict[Action, float]:
    """Return the seconds before every computation whose input is known.

    `inputs` are the computations that may make one; `waits` are when waits for transfers were over, in order.
    """
    ends: dict[int, float] = {}
    for row in inputs:
        value = dependencies.value_of(row.action)
        ends[value] = max(float(row.end_s), ends.get(value, float(row.end_s)))
    ends.pop(NOTHING, None)
    handovers = {}
    for before, row in pairwise(rows):
        input_s, start_s = ends.get(dependencies.operand_of(row.action)), float(row.start_s)
        if input_s is not None:
            waited = bisect_right(waits, start_s)
            handovers[row.action] = start_s - max(float(before.end_s), input_s, *waits[:waited][-1:])
    return handovers


def beside_peak(comparison: Comparison, place: int) -> Iterator[str]:
    row, size = comparison.stages[place], comparison.prediction.sizes[place]
    if row.measured_microbatches is not None:
        yield f"{row.measured_microbatches} micro-batches at once, {row.predicted_microbatches} in the schedule"
    lanes = [lane for _, lane in lanes_of(comparison.measured.typical, place)]
    sizes = [computation.bytes for lane in lanes for computation in lane.computations if computation.bytes]
    if size is not None and len(size.saved_bytes) == 1 and len(set(sizes)) > 1:
        yield f"micro-batches of {bytes_text(min(sizes))} to {bytes_text(max(sizes))}"
    left = max(((lane.computations[-1].left_bytes or 0) - lane.source.host_bytes for lane in lanes), default=0)
    if left > 0:
        yield f"{bytes_text(left)} of saved activations still in memory after the last backward"
    moved = {} if size is None else size.moved_bytes
    stays = max((size.saved_bytes.get(stage, 0) - num_bytes for stage, num_bytes in moved.items() if size), default=0)
    if stays > 0 and row.evictions:
        yield f"{bytes_text(stays)} of each of {counted(row.evictions, 'evicted micro-batch', 'es')} stay"


def _excess(comparison: Comparison, rows: Iterable[Row]) -> float:
    """Return how much longer computations took than the medians of their stages."""
    return sum(row.seconds - comparison.prediction.basis.seconds[row.action.stage, row.action.kind] for row in rows)


def _furthest(comparison: Comparison, lanes: Mapping[int, Sequence[Lane]]) -> Iterator[str]:
    """Yield, of these places, the computations and the exposed time that are furthest from the prediction."""
    computed = {
        place: median(_excess(comparison, lane.computations) for lane in of_place) for place, of_place in lanes.items()
    }
    exposed = {
        place: median(lane.exposed_s for lane in of_place) - comparison.stages[place].predicted_exposed_s
        for place, of_place in lanes.items()
    }
    for excess, verb, typical in (
        (computed, "computed", "its medians"),
        (exposed, "was exposed to transfers", "predicted"),
    ):
        if excess:
            place, seconds = max(excess.items(), key=lambda pair: abs(pair[1]))
            yield from _compared(comparison, f"stage {place} {verb}", seconds, typical)


def _compared(comparison: Comparison, subject: str, excess_s: float, typical: str) -> Iterator[str]:
    if _is_large(comparison, excess_s):
        yield f"{subject} {seconds_text(abs(excess_s))} {'longer' if excess_s > 0 else 'less'} than {typical}"


def _is_large(comparison: Comparison, seconds: float) -> bool:
    return abs(seconds) > SMALLEST_SHARE * comparison.totals.predicted_pipeline_s


MOST = 3

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward for inputs",
    Kind.BACKWARD_WEIGHT: "backward for weights",
    Kind.SHARD_FORWARD: "shard of the output layer, logits",
    Kind.SHARD_BACKWARD: "shard of the output layer, gradients",
    Kind.INPUT_FORWARD: "shard of the embedding",
    Kind.INPUT_BACKWARD: "shard of the embedding, gradients",
}


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
    beside: tuple[str, ...] = ()  # facts that were measured beside it
    iteration: int | None = None  # None for the median of all

    @property
    def measured_text(self) -> str:
        return self._text(self.measured)

    @property
    def predicted_text(self) -> str:
        return self._text(self.predicted)

    def _text(self, value: float) -> str:
        return seconds_text(value) if self.unit == "s" else bytes_text(value)


# A difference, and the facts beside it.
_Candidate = tuple[Difference, Iterator[str]]


def differences(comparison: Comparison) -> tuple[Difference, ...]:
    """Return the largest differences, each with what was measured beside it."""
    largest: dict[str, _Candidate] = {}
    for candidates in (_iterations, _computations, _transfers, _waiting, _peaks):
        for difference, facts in candidates(comparison):
            other = largest.get(difference.kind)
            if difference.share >= SMALLEST_SHARE and (other is None or difference.share > other[0].share):
                largest[difference.kind] = difference, facts
    chosen = sorted(largest.values(), key=lambda pair: -pair[0].share)[:MOST]
    return tuple(replace(difference, beside=tuple(facts)) for difference, facts in chosen)


def _seconds(
    comparison: Comparison, kind: str, stage: int | None, what: str, measured: float, predicted: float, times: int = 1
) -> Difference:
    span = comparison.totals.predicted_pipeline_s
    share = abs(measured - predicted) * times / span if span else 0.0
    return Difference(kind, stage, what, measured, predicted, "s", share)


def _iterations(comparison: Comparison) -> Iterator[_Candidate]:
    predicted = comparison.totals.predicted_pipeline_s
    for timeline in comparison.measured.shown:
        what = f"iteration {timeline.iteration}, pipeline time"
        difference = _seconds(comparison, "iteration", None, what, timeline.span_s, predicted)
        yield replace(difference, iteration=timeline.iteration), beside_iteration(comparison, timeline)


def _computations(comparison: Comparison) -> Iterator[_Candidate]:
    """Compare the mean of an iteration, of which the median, with the median of all: rare slow ones make a difference."""
    layout = comparison.measured.schedule.layout
    for (stage, kind), predicted in comparison.prediction.basis.seconds.items():
        actions = (Action(stage, kind, pipe) for pipe in range(layout.num_pipes))
        for place in dict.fromkeys(map(layout.rank_of_action, actions)):
            lanes = [lane for _, lane in lanes_of(comparison.measured.typical, place)]
            samples = [[row.seconds for row in lane.computations_of(stage, kind)] for lane in lanes]
            samples = [seconds for seconds in samples if seconds]
            if samples:
                what = f"{_named(comparison, stage, place)}, {NAMES[kind]} (mean)"
                measured = median(map(mean, samples))
                yield (
                    _seconds(comparison, kind.name.lower(), stage, what, measured, predicted, len(samples[0])),
                    beside_computation(comparison, stage, kind, place),
                )


def _named(comparison: Comparison, stage: int, place: int) -> str:
    """Return a stage, with its replica if there are several pipes."""
    replicas = comparison.measured.schedule.layout.replicas(stage)
    return f"stage {stage}" if len(replicas) == 1 else f"stage {stage} of pipe {replicas.index(place)}"


def _transfers(comparison: Comparison) -> Iterator[_Candidate]:
    measured = comparison.measured
    costs = comparison.prediction.report.costs.stages
    for row in comparison.stages:
        if row.exposed_s is not None:
            what = f"stage {row.stage}, exposed transfer time"
            yield (
                _seconds(comparison, "exposed", row.stage, what, row.exposed_s, row.predicted_exposed_s),
                beside_exposed(comparison, row.stage),
            )
    for stage in comparison.prediction.basis.bytes_per_s:
        for place in dict.fromkeys(measured.schedule.layout.replicas(stage)):
            seconds = transfer_seconds(measured, place, stage)
            if seconds:
                what = f"{_named(comparison, stage, place)}, one transfer (median)"
                predicted = float(costs[stage].transfer_s or 0)
                yield (
                    _seconds(comparison, "transfer", stage, what, median(seconds), predicted),
                    beside_transfer(comparison, stage, place),
                )


def _waiting(comparison: Comparison) -> Iterator[_Candidate]:
    for row in comparison.stages:
        lanes = lanes_of(comparison.measured.typical, row.stage)
        if lanes:
            what = f"stage {row.stage}, waiting for its neighbours"
            # Seconds in which the rank neither computes nor waits for a transfer.
            idle_s = median(timeline.span_s - lane.busy_s - lane.exposed_s for timeline, lane in lanes)
            yield (
                _seconds(comparison, "waiting", row.stage, what, idle_s, comparison.prediction.idle_s(row.stage)),
                beside_waiting(comparison, row.stage),
            )


def _peaks(comparison: Comparison) -> Iterator[_Candidate]:
    for row in comparison.stages:
        if row.measured_bytes is not None and row.predicted_bytes:
            share = abs(row.measured_bytes - row.predicted_bytes) / row.predicted_bytes
            what = f"stage {row.stage}, peak of activations"
            yield (
                Difference("peak", row.stage, what, row.measured_bytes, row.predicted_bytes, "bytes", share),
                beside_peak(comparison, row.stage),
            )
