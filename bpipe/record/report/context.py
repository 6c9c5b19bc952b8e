"""Facts that were measured where a run differs from its prediction, as short texts with their numbers.

A fact in seconds below `SMALLEST_SHARE` of the predicted pipeline time is left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
