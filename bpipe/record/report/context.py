"""Say what was measured beside a difference.

In: a `Comparison` and where the difference is. Out: short facts with their numbers.

A fact in seconds below `SMALLEST_SHARE` of the predicted pipeline time is left out. Knows no format, and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mean, median, quantiles

from bpipe.record.format import Row
from bpipe.record.report.compare import Comparison, shared_cores
from bpipe.record.report.handover import late_starts
from bpipe.record.report.replay import probed_speed
from bpipe.record.report.selection import Lane, Measured, Timeline, ended_transfers, lanes_of, warm_up_ratios
from bpipe.record.report.units import bytes_text, counted, rate_text, seconds_text
from bpipe.schedule.action import Kind

# What differs by less is no difference worth a reader's time.
SMALLEST_SHARE = 0.005


def transfer_seconds(measured: Measured, place: int, stage: int) -> list[float]:
    """Return seconds of every transfer of the stage in the iterations shown whose end is known."""
    return [row.seconds for row in ended_transfers(measured, measured.typical, place, stage)]


def idle_seconds(comparison: Comparison, place: int) -> float | None:
    """Return seconds between the pipeline's first and last computation in which a rank neither computes nor waits
    for a transfer."""
    lanes = lanes_of(comparison.measured.typical, place)
    idle = [timeline.span_s - lane.busy_s - lane.exposed_s for timeline, lane in lanes]
    return median(idle) if idle else None


def beside_iteration(comparison: Comparison, timeline: Timeline) -> Iterator[str]:
    if timeline.iteration == comparison.measured.warm_up:
        ratio = median(warm_up_ratios(comparison.measured.timelines))
        yield f"the first recorded iteration, whose stages computed {ratio:.2f} times as long as later"
    rows = [row for lane in timeline.present for row in lane.computations]
    slowest = max(rows, key=lambda row: _excess(comparison, [row]))
    yield from _compared(
        comparison, f"{slowest.action} took", _excess(comparison, [slowest]), "the median of its stage"
    )
    yield from _furthest(comparison, {place: [lane] for place, lane in enumerate(timeline.lanes) if lane is not None})
    yield from filter(None, [shared_cores(comparison)])


def beside_computation(comparison: Comparison, stage: int, kind: Kind, place: int) -> Iterator[str]:
    lanes = lanes_of(comparison.measured.typical, place)
    samples = [
        (timeline.iteration, row, lane)
        for timeline, lane in lanes
        for row in lane.computations
        if row.action.stage == stage and row.action.kind is kind
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
        yield f"the longest of {counted(len(waits), 'wait')}, {seconds_text(longest_s)}, was for {action} in iteration {number}"


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
    lost_s = median(sum(seconds for seconds, _ in starts) for _, starts in late)
    if _is_large(comparison, lost_s):
        number, (longest_s, action) = max(
            ((number, start) for number, starts in late for start in starts), key=lambda pair: pair[1].seconds
        )
        yield (
            f"messages from its neighbours took {seconds_text(lost_s)} longer than predicted in total, the longest "
            f"delay, {seconds_text(longest_s)}, before {action} in iteration {number}"
        )
    others = {other: [lane for _, lane in lanes_of(typical, other)] for other in range(len(comparison.stages))}
    yield from _furthest(comparison, {other: lanes for other, lanes in others.items() if lanes and other != place})
    yield from filter(None, [shared_cores(comparison)])


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
    stays = (
        0
        if size is None
        else max((size.saved_bytes.get(stage, 0) - moved for stage, moved in size.moved_bytes.items()), default=0)
    )
    if stays > 0 and row.evictions:
        yield f"{bytes_text(stays)} of each of {counted(row.evictions, 'evicted micro-batch', 'es')} stay"


def _excess(comparison: Comparison, rows: Iterable[Row]) -> float:
    """By how much computations took longer than the medians of their stages."""
    return sum(row.seconds - comparison.prediction.basis.seconds[row.action.stage, row.action.kind] for row in rows)


def _furthest(comparison: Comparison, lanes: Mapping[int, Sequence[Lane]]) -> Iterator[str]:
    """Of these places, the computations and the exposed time that are furthest from what was predicted."""
    computed = {at: median(_excess(comparison, lane.computations) for lane in some) for at, some in lanes.items()}
    exposed = {
        at: median(lane.exposed_s for lane in some) - comparison.stages[at].predicted_exposed_s
        for at, some in lanes.items()
    }
    for excess, what, typical in (
        (computed, "computed", "its medians"),
        (exposed, "was exposed to transfers", "predicted"),
    ):
        if excess:
            at, seconds = max(excess.items(), key=lambda pair: abs(pair[1]))
            yield from _compared(comparison, f"stage {at} {what}", seconds, typical)


def _compared(comparison: Comparison, what: str, excess_s: float, typical: str) -> Iterator[str]:
    if _is_large(comparison, excess_s):
        yield f"{what} {seconds_text(abs(excess_s))} {'longer' if excess_s > 0 else 'less'} than {typical}"


def _is_large(comparison: Comparison, seconds: float) -> bool:
    return abs(seconds) > SMALLEST_SHARE * comparison.totals.predicted_pipeline_s
