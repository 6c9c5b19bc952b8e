"""Find where a run differs most from its prediction.

In: a `Comparison`. Out: at most three `Difference`s, the largest first.

What is compared, one candidate of each: an iteration's pipeline time, a forward, a backward, exposed transfer
time, one transfer, waiting for neighbours, a peak. The size of a difference in time is its share of the predicted
pipeline time, where a computation counts as often as it runs; that of bytes its share of the predicted peak. `beside`
says what was measured beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean, median

from bpipe.record.report.compare import Comparison
from bpipe.record.report.context import (
    SMALLEST_SHARE,
    beside_computation,
    beside_exposed,
    beside_iteration,
    beside_peak,
    beside_transfer,
    beside_waiting,
    idle_seconds,
    transfer_seconds,
)
from bpipe.record.report.selection import Timeline
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
    """A difference of measured and predicted.

    `share` is its size, `unit` is "s" or "bytes"; `stage` is None for a whole iteration, `iteration` for the median of
    all; `beside` are facts that were measured beside it.
    """

    kind: str
    stage: int | None
    what: str
    measured: float
    predicted: float
    unit: str
    share: float
    beside: tuple[str, ...] = ()
    iteration: int | None = None

    @property
    def measured_text(self) -> str:
        return self._text(self.measured)

    @property
    def predicted_text(self) -> str:
        return self._text(self.predicted)

    def _text(self, value: float) -> str:
        return seconds_text(value) if self.unit == "s" else bytes_text(value)


def differences(comparison: Comparison) -> tuple[Difference, ...]:
    """Return the largest differences, each with what was measured beside it."""
    largest: dict[str, tuple[Difference, Iterator[str]]] = {}
    for found, facts in _candidates(comparison):
        if found.share >= SMALLEST_SHARE and (found.kind not in largest or found.share > largest[found.kind][0].share):
            largest[found.kind] = found, facts
    chosen = sorted(largest.values(), key=lambda pair: -pair[0].share)[:MOST]
    return tuple(replace(found, beside=tuple(facts)) for found, facts in chosen)


def _candidates(comparison: Comparison) -> Iterator[tuple[Difference, Iterator[str]]]:
    yield from _iterations(comparison)
    yield from _computations(comparison)
    yield from _transfers(comparison)
    yield from _waiting(comparison)
    yield from _peaks(comparison)


def _seconds(
    comparison: Comparison, kind: str, stage: int | None, what: str, measured: float, predicted: float, times: int = 1
) -> Difference:
    span = comparison.totals.predicted_pipeline_s
    share = abs(measured - predicted) * times / span if span else 0.0
    return Difference(kind, stage, what, measured, predicted, "s", share)


def _iterations(comparison: Comparison) -> Iterator[tuple[Difference, Iterator[str]]]:
    predicted = comparison.totals.predicted_pipeline_s
    for timeline in comparison.measured.shown:
        what = f"iteration {timeline.iteration}, pipeline time"
        found = _seconds(comparison, "iteration", None, what, timeline.span_s, predicted)
        yield replace(found, iteration=timeline.iteration), beside_iteration(comparison, timeline)


def _computations(comparison: Comparison) -> Iterator[tuple[Difference, Iterator[str]]]:
    """Return the mean of an iteration, the median over iterations, against the median of all: they differ by what is
    rare and slow."""
    layout = comparison.measured.schedule.layout
    for (stage, kind), predicted in comparison.prediction.basis.seconds.items():
        for place in dict.fromkeys(
            layout.rank_of_action(Action(stage, kind, pipe)) for pipe in range(layout.num_pipes)
        ):
            samples = [_durations(timeline, place, stage, kind) for timeline in comparison.measured.typical]
            present = [one for one in samples if one]
            if present:
                measured = median(mean(one) for one in present)
                what = f"{_named(comparison, stage, place)}, {NAMES[kind]} (mean)"
                yield (
                    _seconds(comparison, kind.name.lower(), stage, what, measured, predicted, len(present[0])),
                    beside_computation(comparison, stage, kind, place),
                )


def _named(comparison: Comparison, stage: int, place: int) -> str:
    """Return a stage, and with several pipes which replica of it."""
    replicas = comparison.measured.schedule.layout.replicas(stage)
    return f"stage {stage}" if len(replicas) == 1 else f"stage {stage} of pipe {replicas.index(place)}"


def _durations(timeline: Timeline, place: int, stage: int, kind: Kind) -> list[float]:
    lane = timeline.lanes[place]
    return (
        [row.seconds for row in lane.computations if row.action.stage == stage and row.action.kind is kind]
        if lane
        else []
    )


def _transfers(comparison: Comparison) -> Iterator[tuple[Difference, Iterator[str]]]:
    measured = comparison.measured
    costs = comparison.prediction.report.costs.stages
    for row in comparison.stages:
        if row.exposed_s is not None:
            what = f"stage {row.stage}, exposed transfer time"
            found = _seconds(comparison, "exposed", row.stage, what, row.exposed_s, row.predicted_exposed_s)
            yield found, beside_exposed(comparison, row.stage)
    for stage in comparison.prediction.basis.bytes_per_s:
        for place in dict.fromkeys(measured.schedule.layout.replicas(stage)):
            seconds = transfer_seconds(measured, place, stage)
            if seconds:
                what = f"{_named(comparison, stage, place)}, one transfer (median)"
                found = _seconds(
                    comparison, "transfer", stage, what, median(seconds), float(costs[stage].transfer_s or 0)
                )
                yield found, beside_transfer(comparison, stage, place)


def _waiting(comparison: Comparison) -> Iterator[tuple[Difference, Iterator[str]]]:
    for row in comparison.stages:
        idle = idle_seconds(comparison, row.stage)
        if idle is not None:
            what = f"stage {row.stage}, waiting for its neighbours"
            found = _seconds(comparison, "waiting", row.stage, what, idle, comparison.prediction.idle_s(row.stage))
            yield found, beside_waiting(comparison, row.stage)


def _peaks(comparison: Comparison) -> Iterator[tuple[Difference, Iterator[str]]]:
    for row in comparison.stages:
        if row.measured_bytes is not None and row.predicted_bytes:
            share = abs(row.measured_bytes - row.predicted_bytes) / row.predicted_bytes
            what = f"stage {row.stage}, peak of activations"
            yield (
                Difference("peak", row.stage, what, row.measured_bytes, row.predicted_bytes, "bytes", share),
                beside_peak(comparison, row.stage),
            )
