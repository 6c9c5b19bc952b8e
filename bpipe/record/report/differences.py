"""Find where a run differs most from its prediction: at most three differences, of different kinds.

Compared are an iteration's pipeline time, a forward, a backward, exposed transfer time, one transfer, waiting for
neighbours, and a peak. The size of a difference in time is its share of the predicted pipeline time, where a computation
counts as often as it runs; that of a difference in bytes is its share of the predicted peak.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from statistics import mean, median

from bpipe.record.report.compare import Comparison, shared_cores
from bpipe.record.report.replay import probed_speed
from bpipe.record.report.selection import ended_transfers, lanes_of, warm_up_ratios
from bpipe.record.report.units import bytes_text, counted, rate_text, seconds_text
from bpipe.schedule.action import Action, Kind

MAX_DIFFERENCES = 3
# Smaller differences are not worth a reader's time.
SMALLEST_SHARE = 0.005

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


def differences(comparison: Comparison) -> tuple[Difference, ...]:
    """Return the largest difference of each kind, the largest ones first."""
    candidates = chain(
        _iterations(comparison),
        _computations(comparison),
        _transfers(comparison),
        _waiting(comparison),
        _peaks(comparison),
    )
    largest: dict[str, Difference] = {}
    for candidate in candidates:
        other = largest.get(candidate.kind)
        if candidate.share >= SMALLEST_SHARE and (other is None or candidate.share > other.share):
            largest[candidate.kind] = candidate
    return tuple(sorted(largest.values(), key=lambda difference: -difference.share)[:MAX_DIFFERENCES])


def _share(comparison: Comparison, seconds: float) -> float:
    span_s = comparison.totals.predicted_pipeline_s
    return abs(seconds) / span_s if span_s else 0.0


def _cores(comparison: Comparison) -> tuple[str, ...]:
    cores = shared_cores(comparison)
    return () if cores is None else (cores,)


def _iterations(comparison: Comparison) -> Iterator[Difference]:
    predicted_s = comparison.totals.predicted_pipeline_s
    for timeline in comparison.measured.shown:
        number, span_s, beside = timeline.iteration, timeline.span_s, _cores(comparison)
        if number == comparison.measured.warm_up:
            ratio = median(warm_up_ratios(comparison.measured.timelines))
            warm_up = f"the first recorded iteration, whose stages computed {ratio:.2f} times as long as later"
            beside = warm_up, *beside
        what, share = f"iteration {number}, pipeline time", _share(comparison, span_s - predicted_s)
        yield Difference("iteration", None, what, span_s, predicted_s, "s", share, beside, number)


def _computations(comparison: Comparison) -> Iterator[Difference]:
    """Compare the mean of an iteration, of which the median, with the median of all: rare slow ones make a difference."""
    layout = comparison.measured.schedule.layout
    for (stage, kind), predicted_s in comparison.prediction.basis.seconds.items():
        actions = (Action(stage, kind, pipe) for pipe in range(layout.num_pipes))
        for place in dict.fromkeys(map(layout.rank_of_action, actions)):
            iterations = [
                (timeline.iteration, rows)
                for timeline, lane in lanes_of(comparison.measured.typical, place)
                if (rows := lane.computations_of(stage, kind))
            ]
            if not iterations:
                continue
            samples = [(row.seconds, row.action, number) for number, rows in iterations for row in rows]
            slowest_s, action, number = max(samples, key=lambda sample: sample[0])
            slowest = f"the slowest of {len(samples)}, {action} in iteration {number}, took {seconds_text(slowest_s)}"
            measured_s = median(mean(row.seconds for row in rows) for _, rows in iterations)
            share = _share(comparison, (measured_s - predicted_s) * len(iterations[0][1]))
            what, beside = f"{_named(comparison, stage, place)}, {NAMES[kind]} (mean)", (slowest, *_cores(comparison))
            yield Difference(kind.name.lower(), stage, what, measured_s, predicted_s, "s", share, beside)


def _named(comparison: Comparison, stage: int, place: int) -> str:
    """Return a stage, with its replica if there are several pipes."""
    replicas = comparison.measured.schedule.layout.replicas(stage)
    return f"stage {stage}" if len(replicas) == 1 else f"stage {stage} of pipe {replicas.index(place)}"


def _transfers(comparison: Comparison) -> Iterator[Difference]:
    measured, costs = comparison.measured, comparison.prediction.report.costs.stages
    for row in comparison.stages:
        if row.exposed_s is not None:
            waits = [
                (transfer.wait_s, transfer.action, timeline.iteration)
                for timeline, lane in lanes_of(measured.typical, row.stage)
                for transfer in lane.transfers
                if transfer.wait_s > 0
            ]
            beside: tuple[str, ...] = ()
            if waits:
                wait_s, action, number = max(waits, key=lambda wait: wait[0])
                longest = (
                    f"{counted(len(waits), 'wait')}, {seconds_text(wait_s)}, was for {action} in iteration {number}"
                )
                beside = (f"the longest of {longest}",)
            what = f"stage {row.stage}, exposed transfer time"
            share = _share(comparison, row.exposed_s - row.predicted_exposed_s)
            yield Difference("exposed", row.stage, what, row.exposed_s, row.predicted_exposed_s, "s", share, beside)
    for stage in comparison.prediction.basis.bytes_per_s:
        for place in dict.fromkeys(measured.schedule.layout.replicas(stage)):
            seconds = [row.seconds for row in ended_transfers(measured, measured.typical, place, stage)]
            if seconds:
                measured_s, predicted_s = median(seconds), float(costs[stage].transfer_s or 0)
                probed, facts = probed_speed(measured, place), list[str]()
                if probed is not None:
                    reached = rate_text(costs[stage].moved_bytes / measured_s)
                    facts.append(f"transfers reached {reached}, the link's probe {rate_text(probed)}")
                what = f"{_named(comparison, stage, place)}, one transfer (median)"
                share = _share(comparison, measured_s - predicted_s)
                yield Difference("transfer", stage, what, measured_s, predicted_s, "s", share, tuple(facts))


def _waiting(comparison: Comparison) -> Iterator[Difference]:
    for row in comparison.stages:
        lanes = lanes_of(comparison.measured.typical, row.stage)
        if lanes:
            # Seconds in which the rank neither computes nor waits for a transfer.
            idle_s = median(timeline.span_s - lane.busy_s - lane.exposed_s for timeline, lane in lanes)
            predicted_s = comparison.prediction.idle_s(row.stage)
            what, share = f"stage {row.stage}, waiting for its neighbours", _share(comparison, idle_s - predicted_s)
            yield Difference("waiting", row.stage, what, idle_s, predicted_s, "s", share, _cores(comparison))


def _peaks(comparison: Comparison) -> Iterator[Difference]:
    for row in comparison.stages:
        if row.measured_bytes is None or not row.predicted_bytes:
            continue
        share = abs(row.measured_bytes - row.predicted_bytes) / row.predicted_bytes
        lanes = [lane for _, lane in lanes_of(comparison.measured.typical, row.stage)]
        sizes = {computation.bytes for lane in lanes for computation in lane.computations if computation.bytes}
        beside = [f"{row.measured_microbatches} micro-batches at once, {row.predicted_microbatches} in the schedule"]
        if lanes and len(lanes[0].source.saved_bytes) == 1 and len(sizes) > 1:
            beside.append(f"micro-batches of {bytes_text(min(sizes))} to {bytes_text(max(sizes))}")
        left = max(((lane.computations[-1].left_bytes or 0) - lane.source.host_bytes for lane in lanes), default=0)
        if left > 0:
            beside.append(f"{bytes_text(left)} of saved activations still in memory after the last backward")
        what, peaks = f"stage {row.stage}, peak of activations", (row.measured_bytes, row.predicted_bytes)
        yield Difference("peak", row.stage, what, *peaks, "bytes", share, tuple(beside))
