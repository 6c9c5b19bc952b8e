"""Say why a run differs from its prediction.

In: a `Comparison` and which difference. Out: a sentence, or None: no likely cause found.

Every cause is a condition on recorded numbers, and its sentence names them. Tried in order, the first that holds is taken:
  an iteration      it was the first recorded, and most stages computed slower than later; one computation; one stage; transfers;
                    computations and hand-overs vary
  a computation     a few of them; those beside a transfer; all of them spread
  exposed time      transfers slower than probed; transfers longer than what they run beside
  one transfer      slower than probed
  waiting           another stage computed longer, or had more exposed time, than predicted; hand-overs took longer than predicted; times of
                    other stages vary
  a peak            more or fewer micro-batches at once; micro-batches of differing size; what is left after the last backward; what cannot
                    move; a received input
Knows no format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles

from bpipe.ir.action import Kind
from bpipe.record.format import Row
from bpipe.report.compare import Comparison, shared_cores
from bpipe.report.handover import late_starts
from bpipe.report.measured import SLOWER, Lane, Measured, Timeline, ended_transfers, lanes_of, warm_up_ratios
from bpipe.report.replay import probed_speed
from bpipe.report.units import bytes_text, percent_text, rate_text, seconds_text

Finder = Callable[[Comparison], str | None]

# A part explains a difference if it is at least this much of it.
MOST_OF_IT = 0.5
# A computation this much above the median is one that something else held up.
OUTLIER = 1.5
MIN_SAMPLES = 4


def transfer_seconds(measured: Measured, place: int, stage: int) -> list[float]:
    """Return seconds of every transfer of the stage in the iterations shown whose end is known."""
    return [row.seconds for row in ended_transfers(measured, measured.typical, place, stage)]


def idle_seconds(comparison: Comparison, place: int) -> float | None:
    """Return seconds between the pipeline's first and last computation in which a rank neither computes nor waits
    for a transfer."""
    lanes = lanes_of(comparison.measured.typical, place)
    found = [timeline.span_s - lane.busy_s - lane.exposed_s for timeline, lane in lanes]
    return median(found) if found else None


def _stages(comparison: Comparison, place: int) -> list[int]:
    return list(comparison.measured.schedule.layout.stages_of(place))


def _excess(comparison: Comparison, row: Row) -> float:
    """By how much a computation took longer than its stage's median."""
    return row.seconds - comparison.prediction.basis.seconds[row.action.stage, row.action.kind]


def _excess_of(comparison: Comparison, lane: Lane) -> float:
    return sum(_excess(comparison, row) for row in lane.computations)


def _slow_ones(comparison: Comparison, lane: Lane) -> float:
    """What a lane's computations that were slower than the median add up to, beyond it."""
    return sum(max(0.0, _excess(comparison, row)) for row in lane.computations)


def _varies(comparison: Comparison, timelines: Sequence[Timeline], places: Sequence[int], over: float) -> str | None:
    """Noise on every stage adds up along the pipeline: each waits for the slowest before it."""

    def lost(place: int) -> tuple[float, float]:
        present = lanes_of(timelines, place)
        if not present:
            return 0.0, 0.0
        slow = median(_slow_ones(comparison, lane) for _, lane in present)
        return slow, median(
            sum(late for late, _ in late_starts(comparison, timeline, place)) for timeline, _ in present
        )

    losses = {place: lost(place) for place in places}
    worst = max(losses, key=lambda place: sum(losses[place]), default=None)
    if worst is None or sum(losses[worst]) < MOST_OF_IT * over:
        return None
    slow, late = losses[worst]
    return (
        f"Times vary: on stage {worst}, slow computations took {seconds_text(slow)} longer than the median in total, "
        f"and messages from its neighbours {seconds_text(late)} longer than predicted. In a pipeline the slower "
        f"neighbour sets the pace."
        f"{_on_shared_cores(comparison)}"
    )


def _on_shared_cores(comparison: Comparison) -> str:
    shared = shared_cores(comparison)
    return f" {shared}." if shared else ""


@dataclass(frozen=True, slots=True)
class IterationCauses:
    timeline: Timeline

    def __call__(self, comparison: Comparison) -> str | None:
        over = self.timeline.span_s - comparison.totals.predicted_pipeline_s
        if over <= 0:
            return self._faster(comparison, -over)
        return (
            self._warm_up(comparison)
            or self._one(comparison, over)
            or self._stage(comparison, over)
            or self._all(comparison, over)
        )

    def _warm_up(self, comparison: Comparison) -> str | None:
        if self.timeline.iteration != comparison.measured.warm_up:
            return None
        ratios = warm_up_ratios(comparison.measured.timelines)
        slower = sum(ratio > SLOWER for ratio in ratios)
        return (
            f"Warm-up: this is the first recorded iteration, and {slower} of {len(ratios)} stages computed "
            f"{median(ratios):.2f} times as long as later. Medians leave it out."
        )

    def _one(self, comparison: Comparison, over: float) -> str | None:
        rows = [row for lane in self.timeline.present for row in lane.computations]
        slowest = max(rows, key=lambda row: _excess(comparison, row))
        if _excess(comparison, slowest) < MOST_OF_IT * over:
            return None
        return (
            f"One computation: {_against_median(comparison, slowest)}. Did another process run on that machine, "
            f"or was something used for the first time?"
        )

    def _stage(self, comparison: Comparison, over: float) -> str | None:
        excess = {
            place: _excess_of(comparison, lane) for place, lane in enumerate(self.timeline.lanes) if lane is not None
        }
        worst = max(excess, key=lambda place: excess[place])
        if excess[worst] >= MOST_OF_IT * over:
            return (
                f"Stage {worst} computed {seconds_text(excess[worst])} longer than its medians, summed over its "
                f"micro-batches."
            )
        exposed = {
            place: lane.exposed_s - comparison.stages[place].predicted_exposed_s
            for place, lane in enumerate(self.timeline.lanes)
            if lane is not None
        }
        worst = max(exposed, key=lambda place: exposed[place])
        if exposed[worst] >= MOST_OF_IT * over:
            return f"The exposed time of stage {worst} was {seconds_text(exposed[worst])} longer than predicted."
        return None

    def _all(self, comparison: Comparison, over: float) -> str | None:
        return _varies(comparison, [self.timeline], range(len(comparison.stages)), over)

    def _faster(self, comparison: Comparison, under: float) -> str | None:
        least = min(_excess_of(comparison, lane) for lane in self.timeline.present)
        if -least < MOST_OF_IT * under:
            return None
        return (
            f"Its computations took up to {seconds_text(-least)} less per stage than the medians over all recorded "
            f"iterations."
        )


def _against_median(comparison: Comparison, row: Row) -> str:
    typical = comparison.prediction.basis.seconds[row.action.stage, row.action.kind]
    return f"{row.action} took {seconds_text(row.seconds)}; the median of its stage is {seconds_text(typical)}"


@dataclass(frozen=True, slots=True)
class ComputationCauses:
    stage: int
    kind: Kind
    place: int

    def __call__(self, comparison: Comparison) -> str | None:
        samples = [
            (timeline.iteration, row, lane)
            for timeline, lane in lanes_of(comparison.measured.typical, self.place)
            for row in lane.computations
            if row.action.stage == self.stage and row.action.kind is self.kind
        ]
        typical = comparison.prediction.basis.seconds[self.stage, self.kind]
        over = sum(row.seconds - typical for _, row, _ in samples)
        if over <= 0 or len(samples) < MIN_SAMPLES:
            return None
        return (
            self._few(comparison, [(number, row) for number, row, _ in samples], typical, over)
            or self._beside([(row, lane) for _, row, lane in samples], over)
            or self._spread(comparison, [row.seconds for _, row, _ in samples], typical)
        )

    def _few(
        self, comparison: Comparison, samples: Sequence[tuple[int, Row]], typical: float, over: float
    ) -> str | None:
        slow = [(number, row) for number, row in samples if row.seconds > OUTLIER * typical]
        if (
            not slow
            or len(slow) > max(1, len(samples) // 8)
            or sum(row.seconds - typical for _, row in slow) < MOST_OF_IT * over
        ):
            return None
        number, slowest = max(slow, key=lambda pair: pair[1].seconds)
        return (
            f"{len(slow)} of {len(samples)} took more than {OUTLIER} times the median, the slowest in iteration "
            f"{number}: "
            f"{_against_median(comparison, slowest)}. Something else held them up, such as another process."
        )

    def _beside(self, samples: Sequence[tuple[Row, Lane]], over: float) -> str | None:
        beside, alone = split_by_transfers(samples)
        if min(len(beside), len(alone)) < MIN_SAMPLES or mean(alone) <= 0:
            return None
        ratio = mean(beside) / mean(alone)
        if ratio < SLOWER or (mean(beside) - mean(alone)) * len(beside) < MOST_OF_IT * over:
            return None
        return (
            f"Those during a transfer took {ratio:.2f} times as long as the others: both share cores or memory "
            f"bandwidth."
        )

    def _spread(self, comparison: Comparison, seconds: Sequence[float], typical: float) -> str | None:
        low, _, high = quantiles(seconds, n=4)
        if high - low < 0.2 * typical:
            return None
        return (
            f"They vary throughout: a quarter took less than {seconds_text(low)}, a quarter more than "
            f"{seconds_text(high)}."
            f"{_on_shared_cores(comparison)}"
        )


def split_by_transfers(samples: Sequence[tuple[Row, Lane]]) -> tuple[list[float], list[float]]:
    """Return the seconds of computations that overlapped a transfer of their rank by half or more, and of the
    others."""
    beside: list[float] = []
    alone: list[float] = []
    for row, lane in samples:
        overlap = max(
            (min(row.end_s, other.end_s) - max(row.start_s, other.start_s) for other in lane.transfers), default=0.0
        )
        (beside if overlap >= row.seconds / 2 else alone).append(row.seconds)
    return beside, alone


def _slower_than_probed(comparison: Comparison, place: int, stage: int) -> str | None:
    """Return whether transfers reached clearly less than the link's probe did when nothing else ran."""
    measured = comparison.measured
    probed = probed_speed(measured, place)
    seconds = transfer_seconds(measured, place, stage)
    size = comparison.prediction.report.costs.stages[stage].moved_bytes
    if probed is None or not seconds or median(seconds) <= 0:
        return None
    reached = size / median(seconds)
    if probed < SLOWER * reached:
        return None
    return (
        f"Contention: transfers reached {rate_text(reached)}; the same link reached {rate_text(probed)} when it was "
        f"probed with nothing else running"
    )


@dataclass(frozen=True, slots=True)
class ExposedCauses:
    place: int

    def __call__(self, comparison: Comparison) -> str | None:
        row = comparison.stages[self.place]
        if (row.exposed_s or 0.0) <= row.predicted_exposed_s:
            return None
        for stage in _stages(comparison, self.place):
            slower = _slower_than_probed(comparison, self.place, stage)
            if slower is not None:
                return slower + "."
            seconds = transfer_seconds(comparison.measured, self.place, stage)
            forward = comparison.prediction.basis.seconds[stage, Kind.FORWARD]
            if seconds and median(seconds) > forward:
                return (
                    f"A transfer takes {seconds_text(median(seconds))}, longer than the forward of "
                    f"{seconds_text(forward)} that it has to "
                    f"hide behind."
                )
        return self._one(comparison)

    def _one(self, comparison: Comparison) -> str | None:
        rows = [
            (timeline.iteration, row)
            for timeline, lane in lanes_of(comparison.measured.typical, self.place)
            for row in lane.transfers
        ]
        total = sum(row.wait_s for _, row in rows)
        number, worst = max(rows, key=lambda pair: pair[1].wait_s)
        if worst.wait_s < MOST_OF_IT * total:
            return None
        return f"Most of it is one wait: {seconds_text(worst.wait_s)} for {worst.action} in iteration {number}."


@dataclass(frozen=True, slots=True)
class TransferCauses:
    stage: int
    place: int

    def __call__(self, comparison: Comparison) -> str | None:
        slower = _slower_than_probed(comparison, self.place, self.stage)
        if slower is None:
            return None
        if shared_cores(comparison):
            return f"{slower}."
        exposed = comparison.stages[self.place].exposed_s or 0.0
        share = exposed / comparison.totals.pipeline_s if comparison.totals.pipeline_s else 0.0
        return (
            f"{slower}. This cost {percent_text(share)} of the pipeline time."
            if share
            else f"{slower}. This cost no time: all transfers are hidden."
        )


@dataclass(frozen=True, slots=True)
class WaitingCauses:
    place: int

    def __call__(self, comparison: Comparison) -> str | None:
        idle = idle_seconds(comparison, self.place)
        over = (idle or 0.0) - comparison.prediction.idle_s(self.place)
        if over <= 0:
            return None
        return self._others(comparison, over) or self._messages(comparison, over) or self._noise(comparison, over)

    def _others(self, comparison: Comparison, over: float) -> str | None:
        places = [place for place in range(len(comparison.stages)) if place != self.place]
        longer = {
            place: self._typical(comparison, place, lambda lane: _excess_of(comparison, lane)) for place in places
        }
        worst = max(longer, key=lambda place: longer[place], default=None)
        if worst is not None and longer[worst] >= MOST_OF_IT * over:
            return f"It waited for stage {worst}, which computed {seconds_text(longer[worst])} longer than its medians."
        stood = {
            place: (comparison.stages[place].exposed_s or 0.0) - comparison.stages[place].predicted_exposed_s
            for place in places
        }
        worst = max(stood, key=lambda place: stood[place], default=None)
        if worst is not None and stood[worst] >= MOST_OF_IT * over:
            return (
                f"It waited for stage {worst}, whose exposed time was {seconds_text(stood[worst])} longer than "
                f"predicted."
            )
        return None

    def _noise(self, comparison: Comparison, over: float) -> str | None:
        places = [place for place in range(len(comparison.stages)) if place != self.place]
        return _varies(comparison, comparison.measured.typical, places, over)

    def _typical(self, comparison: Comparison, place: int, value: Callable[[Lane], float]) -> float:
        return median([value(lane) for _, lane in lanes_of(comparison.measured.typical, place)] or [0.0])

    def _messages(self, comparison: Comparison, over: float) -> str | None:
        found = [
            (timeline.iteration, late_starts(comparison, timeline, self.place))
            for timeline in comparison.measured.typical
        ]
        lost = median(sum(late for late, _ in one) for _, one in found)
        if lost < MOST_OF_IT * over:
            return None
        number, (longest, action) = max(
            ((number, late) for number, one in found for late in one), key=lambda pair: pair[1][0]
        )
        missing = (
            " The prediction has no messages: too few could be told from waiting."
            if comparison.prediction.basis.message_s is None
            else ""
        )
        return (
            f"Messages from its neighbours took {seconds_text(lost)} longer than predicted in total, while the "
            f"input was ready and there was nothing else to wait for; the longest delay, {seconds_text(longest)}, was "
            f"before {action} in iteration {number}.{missing}"
        )


@dataclass(frozen=True, slots=True)
class PeakCauses:
    place: int

    def __call__(self, comparison: Comparison) -> str | None:
        row, size = comparison.stages[self.place], comparison.prediction.sizes[self.place]
        if row.measured_bytes is None or row.predicted_bytes is None or size is None:
            return None
        over = row.measured_bytes - row.predicted_bytes
        held = row.measured_microbatches
        if held is not None and (held - row.predicted_microbatches) * over > 0:
            word = "more" if over > 0 else "fewer"
            return f"It held {held} micro-batches at once, {word} than the schedule's {row.predicted_microbatches}."
        sizes = [
            other.bytes
            for _, lane in lanes_of(comparison.measured.typical, self.place)
            for other in lane.computations
            if other.bytes
        ]
        if (
            sizes
            and len(size.saved_bytes) == 1
            and max(sizes) - min(sizes) >= MOST_OF_IT * abs(over) / max(1, row.predicted_microbatches)
        ):
            return f"Its micro-batches differ in size, from {bytes_text(min(sizes))} to {bytes_text(max(sizes))}."
        return self._stays(comparison, over) if over > 0 else None

    def _stays(self, comparison: Comparison, over: int) -> str | None:
        row, size = comparison.stages[self.place], comparison.prediction.sizes[self.place]
        assert size is not None
        left = self._left(comparison)
        if left > size.received_bytes and over <= SLOWER * left:
            return (
                f"After its last backward, {bytes_text(left)} of saved activations were still in memory: something in "
                f"the model, such as a cache, refers to them longer than their backward needs."
            )
        stays = max((size.saved_bytes.get(stage, 0) - moved for stage, moved in size.moved_bytes.items()), default=0)
        if stays > 0 and over <= stays * (row.evictions or 0):
            return (
                f"Storages that could not move: {bytes_text(stays)} of every evicted micro-batch stays; for all "
                f"{row.evictions} evictions that is at least the difference."
            )
        if (
            size.received_bytes
            and over <= SLOWER * size.received_bytes * row.predicted_microbatches
            and over >= size.received_bytes / SLOWER
        ):
            return (
                f"The difference is about {over / size.received_bytes:.1f} times the "
                f"{bytes_text(size.received_bytes)} that the stage receives per micro-batch: Megatron's loop may hold "
                f"inputs longer than their backward needs."
            )
        return None

    def _left(self, comparison: Comparison) -> int:
        """Return the bytes of activations that were there when every micro-batch was over, host buffers left out."""
        lanes = lanes_of(comparison.measured.typical, self.place)
        return max(((lane.computations[-1].left_bytes or 0) - lane.source.host_bytes for _, lane in lanes), default=0)
