"""Find where a run differs most from its prediction.

In: a `Comparison`. Out: at most three `Difference`s, the largest first.

What is compared, one candidate of each: an iteration's pipeline time, a forward, a backward, exposed transfer
time, one transfer, waiting for neighbours, a peak. The size of a difference in time is its share of the predicted
pipeline time, where a computation counts as often as it runs; that of bytes its share of the predicted peak. `causes`
says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean, median

from bpipe.ir.action import Action, Kind
from bpipe.report import causes
from bpipe.report.compare import Comparison
from bpipe.report.measured import Timeline
from bpipe.report.units import bytes_text, seconds_text

MOST = 3

# What differs by less is no difference worth a reader's time.
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
    """A difference of measured and predicted.

    `share` is its size, `unit` is "s" or "bytes"; `stage` is None for a whole iteration, `iteration` for the median of
    all.
    """

    kind: str
    stage: int | None
    what: str
    measured: float
    predicted: float
    unit: str
    share: float
    cause: str
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
    """Return the largest differences. A cause is looked for only in those that are shown."""
    largest: dict[str, tuple[Difference, causes.Finder]] = {}
    for found, finder in _candidates(comparison):
        if found.share >= SMALLEST_SHARE and (found.kind not in largest or found.share > largest[found.kind][0].share):
            largest[found.kind] = found, finder
    chosen = sorted(largest.values(), key=lambda pair: -pair[0].share)[:MOST]
    return tuple(_explained(found, finder(comparison)) for found, finder in chosen)


def _explained(found: Difference, cause: str | None) -> Difference:
    text = cause or "No likely cause was found in the record."
    return replace(found, cause=text)


def _candidates(comparison: Comparison) -> Iterator[tuple[Difference, causes.Finder]]:
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
    return Difference(kind, stage, what, measured, predicted, "s", share, "")


def _iterations(comparison: Comparison) -> Iterator[tuple[Difference, causes.Finder]]:
    predicted = comparison.totals.predicted_pipeline_s
    for timeline in comparison.measured.shown:
        what = f"iteration {timeline.iteration}, pipeline time"
        found = _seconds(comparison, "iteration", None, what, timeline.span_s, predicted)
        yield replace(found, iteration=timeline.iteration), causes.IterationCauses(timeline)


def _computations(comparison: Comparison) -> Iterator[tuple[Difference, causes.Finder]]:
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
                    causes.ComputationCauses(stage, kind, place),
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


def _transfers(comparison: Comparison) -> Iterator[tuple[Difference, causes.Finder]]:
    measured = comparison.measured
    costs = comparison.prediction.report.costs.stages
    for row in comparison.stages:
        if row.exposed_s is not None:
            what = f"stage {row.stage}, exposed transfer time"
            found = _seconds(comparison, "exposed", row.stage, what, row.exposed_s, row.predicted_exposed_s)
            yield found, causes.ExposedCauses(row.stage)
    for stage in comparison.prediction.basis.bytes_per_s:
        for place in dict.fromkeys(measured.schedule.layout.replicas(stage)):
            seconds = causes.transfer_seconds(measured, place, stage)
            if seconds:
                what = f"{_named(comparison, stage, place)}, one transfer (median)"
                found = _seconds(
                    comparison, "transfer", stage, what, median(seconds), float(costs[stage].transfer_s or 0)
                )
                yield found, causes.TransferCauses(stage, place)


def _waiting(comparison: Comparison) -> Iterator[tuple[Difference, causes.Finder]]:
    for row in comparison.stages:
        idle = causes.idle_seconds(comparison, row.stage)
        if idle is not None:
            what = f"stage {row.stage}, waiting for its neighbours"
            found = _seconds(comparison, "waiting", row.stage, what, idle, comparison.prediction.idle_s(row.stage))
            yield found, causes.WaitingCauses(row.stage)


def _peaks(comparison: Comparison) -> Iterator[tuple[Difference, causes.Finder]]:
    for row in comparison.stages:
        if row.measured_bytes is not None and row.predicted_bytes:
            share = abs(row.measured_bytes - row.predicted_bytes) / row.predicted_bytes
            what = f"stage {row.stage}, peak of activations"
            yield (
                Difference("peak", row.stage, what, row.measured_bytes, row.predicted_bytes, "bytes", share, ""),
                causes.PeakCauses(row.stage),
            )
