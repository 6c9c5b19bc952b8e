"""Find where a run differs most from its prediction: at most three differences, of different kinds.

Compared are an iteration's pipeline time, a forward, a backward, exposed transfer time, one transfer, waiting for
neighbours, and a peak. The size of a difference in time is its share of the predicted pipeline time, where a computation
counts as often as it runs; that of a difference in bytes is its share of the predicted peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean, median

from bpipe.record.report import context
from bpipe.record.report.compare import Comparison
from bpipe.record.report.selection import lanes_of
from bpipe.record.report.units import bytes_text, seconds_text
from bpipe.schedule.action import Action, Kind

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
            if difference.share >= context.SMALLEST_SHARE and (other is None or difference.share > other[0].share):
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
        yield replace(difference, iteration=timeline.iteration), context.beside_iteration(comparison, timeline)


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
                    context.beside_computation(comparison, stage, kind, place),
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
                context.beside_exposed(comparison, row.stage),
            )
    for stage in comparison.prediction.basis.bytes_per_s:
        for place in dict.fromkeys(measured.schedule.layout.replicas(stage)):
            seconds = context.transfer_seconds(measured, place, stage)
            if seconds:
                what = f"{_named(comparison, stage, place)}, one transfer (median)"
                predicted = float(costs[stage].transfer_s or 0)
                yield (
                    _seconds(comparison, "transfer", stage, what, median(seconds), predicted),
                    context.beside_transfer(comparison, stage, place),
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
                context.beside_waiting(comparison, row.stage),
            )


def _peaks(comparison: Comparison) -> Iterator[_Candidate]:
    for row in comparison.stages:
        if row.measured_bytes is not None and row.predicted_bytes:
            share = abs(row.measured_bytes - row.predicted_bytes) / row.predicted_bytes
            what = f"stage {row.stage}, peak of activations"
            yield (
                Difference("peak", row.stage, what, row.measured_bytes, row.predicted_bytes, "bytes", share),
                context.beside_peak(comparison, row.stage),
            )
