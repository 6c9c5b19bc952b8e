"""Predict a recorded run from its own measurements: the schedule simulated, and peaks.

Seconds of a computation are the median over all recorded iterations except a warm-up. The speed of transfers is that of
the link's probe, or of the measured ones if there was no probe or they were far faster. A message between stages takes
the median gap between a computation and the one that was waiting for it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.record.format import ONE_SIDED, Iteration
from bpipe.record.report.memory import RankPeaks, rank_peaks, whole_peaks, without_transfers
from bpipe.record.report.selection import OWN_TRANSFERS, Measured, Timeline, ended_transfers, lanes_of
from bpipe.schedule.action import Kind
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.hosts import Pair
from bpipe.schedule.memory import changes_in_time
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, Link, Links, ShardCost, StageCost
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Level, Simulation, levels_of

# Fewer gaps, in either direction, show nothing about a message.
MIN_GAPS = 3
# If transfers are faster than the probe by this factor, it did not measure the link: on an H200 that other processes
# used it showed 7 GB/s, and transfers then reached 351.
FAR_ABOVE_PROBE = 2.0

_FORWARD, _BACKWARD = Kind.FORWARD, Kind.BACKWARD


@dataclass(frozen=True, slots=True)
class Basis:
    """Inputs of a prediction."""

    seconds: Mapping[tuple[int, Kind], float]
    bytes_per_s: Mapping[int, float]  # of transfers, by stage
    message_s: float | None  # None if no message could be told from waiting; the prediction then has none


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction from measured times; `sizes` and peaks are by place."""

    report: Simulation
    basis: Basis
    sizes: tuple[Iteration | None, ...]
    peaks: tuple[RankPeaks, ...]
    unbalanced: tuple[RankPeaks, ...]  # without transfers
    balanced_bytes: (
        tuple[int, ...] | None
    )  # peaks of an unbalanced run if it were balanced; empty if nothing would move

    @property
    def span_s(self) -> float:
        return float(self.report.pipeline_s)

    def bubble(self, place: int) -> float:
        return 1 - float(self.report.busy_s(place)) / self.span_s if self.span_s else 0.0

    def levels(self, place: int) -> tuple[Level, ...]:
        """Return the bytes over time as the run counts them: host buffers held throughout."""
        size = self.sizes[place]
        if size is None:
            return ()
        moved = (timed for timed in self.report.transfers[place] if timed.action.kind in OWN_TRANSFERS)
        changes = changes_in_time((*self.report.computations[place], *moved), self.report.costs.memory)
        return levels_of([(0.0, size.host_bytes), *((float(time), change) for time, change in changes)])


def replay(measured: Measured) -> Prediction:
    """Predict the run from its schedule, with the measured times and sizes."""
    schedule = measured.schedule
    sizes = tuple(_sizes(measured, place) for place in range(schedule.num_ranks))
    seconds = _seconds(measured)
    speeds = _speeds(measured)
    nodes = _nodes(measured)
    inside, between = _messages(measured, nodes)
    costs = Costs(
        tuple(_stage_cost(schedule, stage, sizes, seconds, speeds.get(stage)) for stage in range(schedule.num_stages)),
        Links(Link(latency_s=inside or 0.0), Link(latency_s=between or 0.0), nodes),
        exchange=measured.program.passing.predicted,
        one_sided=_one_sided(measured),
        synchronous=measured.run.info.synchronous,
        shards=_shards(seconds, schedule.num_ranks) if schedule.layout.shard_kinds else (),
    )
    plain = without_transfers(schedule)
    return Prediction(
        report=simulate(schedule, costs),
        basis=Basis(seconds, speeds, inside),
        sizes=sizes,
        peaks=tuple(rank_peaks(schedule, place, size) for place, size in enumerate(sizes)),
        unbalanced=tuple(
            rank_peaks(plain, place, None if size is None else replace(size, moved_bytes={}, host_bytes=0))
            for place, size in enumerate(sizes)
        ),
        balanced_bytes=_balanced(measured.program, sizes) if measured.program.balance is None else None,
    )


def _stage_cost(
    schedule: Schedule,
    stage: int,
    sizes: Sequence[Iteration | None],
    seconds: Mapping[tuple[int, Kind], float],
    bytes_per_s: float | None,
) -> StageCost:
    """Return the cost of a stage, with the largest sizes of its ranks."""
    replicas = [size for place in schedule.layout.replicas(stage) if (size := sizes[place]) is not None]
    saved = max((size.saved_bytes.get(stage, 0) for size in replicas), default=0)
    moved = max((min(saved, size.moved_bytes.get(stage, saved)) for size in replicas), default=0)
    between = [size.after_input_bytes[stage] for size in replicas if stage in size.after_input_bytes]
    weight = seconds.get((stage, Kind.BACKWARD_WEIGHT))
    return StageCost(
        forward_s=seconds[stage, _FORWARD],
        backward_s=seconds[stage, _BACKWARD] if weight is None else seconds[stage, Kind.BACKWARD_INPUT] + weight,
        weight_s=weight,
        transfer_s=0 if bytes_per_s is None else moved / bytes_per_s,
        moved_bytes=moved,
        saved_bytes=saved,
        after_input_bytes=max(between, default=None),
    )


def _shards(seconds: Mapping[tuple[int, Kind], float], num_ranks: int) -> tuple[ShardCost, ...]:
    """Return the costs of the shards. A message between them takes no time, because nobody measured it."""
    kinds = (Kind.SHARD_FORWARD, Kind.SHARD_BACKWARD, Kind.INPUT_FORWARD, Kind.INPUT_BACKWARD)

    def cost(rank: int) -> ShardCost:
        forward, backward, input_forward, input_backward = (seconds.get((rank, kind), 0.0) for kind in kinds)
        return ShardCost(forward, backward, input_forward, input_backward)

    return tuple(map(cost, range(num_ranks)))


def _one_sided(measured: Measured) -> frozenset[int]:
    """Return the places with a one-sided transport, as they or their partners recorded."""
    places = {
        place for place, record in enumerate(measured.records) if record is not None and record.transport in ONE_SIDED
    }
    partners = None if measured.schedule.is_pooled else measured.schedule.partners
    return frozenset(places | {partners[place] for place in places if partners})


def _balanced(program: ScheduleConfig, sizes: Sequence[Iteration | None]) -> tuple[int, ...] | None:
    """Return the peaks if the run were balanced: empty if nothing would move, None if a size is not known."""
    schedule = build(replace(program, balance=BalanceConfig()))
    if not any(slot.transfers for row in schedule.ranks for slot in row):
        return ()
    present = [size for size in sizes if size is not None]
    saved = {stage: num_bytes for size in present for stage, num_bytes in size.saved_bytes.items()}
    between = {stage: num_bytes for size in present for stage, num_bytes in size.after_input_bytes.items()}
    return whole_peaks(schedule, saved, between, max(size.shard_bytes for size in present))


def _sizes(measured: Measured, place: int) -> Iteration | None:
    """Return the sizes of the iteration shown in which they are largest: they differ only if micro-batches do."""
    parts = [lane.source for _, lane in lanes_of(measured.timelines, place)]
    if not parts:
        return None
    largest = max(parts, key=lambda part: sum(part.saved_bytes.values()))
    hosted, own = (max(getattr(part, name) for part in parts) for name in ("host_bytes", "own_bytes"))
    return replace(largest, host_bytes=hosted, own_bytes=own)


def _seconds(measured: Measured) -> dict[tuple[int, Kind], float]:
    """Return the median of every stage and kind; stages without a record have the medians of the others."""
    samples: dict[tuple[int, Kind], list[float]] = {}
    for timeline in measured.steady:
        for lane in timeline.present:
            for row in lane.computations:
                samples.setdefault((row.action.stage, row.action.kind), []).append(row.seconds)
    seconds = {key: median(values) for key, values in samples.items()}
    # In the order of the rows, because the order of a set of kinds changes from process to process.
    kinds = dict.fromkeys(kind for _, kind in seconds)
    assumed = tuple(stage for stage in range(measured.schedule.num_stages) if (stage, _FORWARD) not in seconds)
    typical = {kind: median([value for (_, other), value in seconds.items() if other is kind]) for kind in kinds}
    return seconds | {(stage, kind): typical[kind] for stage in assumed for kind in kinds}


def _speeds(measured: Measured) -> dict[int, float]:
    """Return the speed of transfers of every stage that is moved, in bytes per second."""
    slots = (slot for row in measured.schedule.ranks for slot in row)
    moved = {action.stage for slot in slots for action in slot.transfers if action.kind is Kind.EVICT}
    speeds = {stage: speed for stage in sorted(moved) if (speed := _speed(measured, stage)) is not None}
    return speeds | dict.fromkeys(moved - speeds.keys(), median(speeds.values())) if speeds else {}


def _speed(measured: Measured, stage: int) -> float | None:
    """Return the speed of one stage's transfers, if it is known."""
    places = dict.fromkeys(measured.schedule.layout.replicas(stage))
    speeds = [speed for place in places if (speed := _probed_speed(measured, place)) is not None]
    rows = (row for place in places for row in ended_transfers(measured, measured.steady, place, stage))
    rates = [row.bytes / row.seconds for row in rows if row.bytes]
    if speeds and (not rates or median(rates) <= FAR_ABOVE_PROBE * median(speeds)):
        return median(speeds)
    return median(rates) if rates else None


def _probed_speed(measured: Measured, place: int) -> float | None:
    """Return the probed speed of this place's pair for the transport that ran."""
    record = measured.records[place]
    if record is None or record.partner is None:
        return None
    pair = frozenset((record.rank, record.partner))
    for link in measured.run.info.links:
        if link.ranks == pair:
            return link.bytes_per_s.get(record.transport or link.transport or "")
    return None


def _nodes(measured: Measured) -> tuple[int, ...]:
    """Return the node of every place; empty if there is only one, or not all are known."""
    hosts = [None if record is None else record.host for record in measured.records]
    names = list(dict.fromkeys(hosts))
    return tuple(names.index(host) for host in hosts) if len(names) > 1 and None not in names else ()


def _messages(measured: Measured, nodes: Sequence[int]) -> tuple[float | None, float | None]:
    """Return the seconds of a message inside a node and between nodes: the median over pairs of neighbours.

    Of a pair it is the mean of both directions' median gaps, so that the difference of their clocks cancels out.
    """
    dependencies = Dependencies(measured.schedule.layout, measured.schedule.num_microbatches)
    gaps_of: dict[Pair, list[float]] = {}
    for timeline in measured.steady:
        for pair, gap in gaps(timeline, dependencies):
            gaps_of.setdefault(pair, []).append(gap)
    inside: list[float] = []
    between: list[float] = []
    for (sender, receiver), forward_gaps in gaps_of.items():
        backward_gaps = gaps_of.get((receiver, sender), [])
        if sender < receiver and min(len(forward_gaps), len(backward_gaps)) >= MIN_GAPS:
            message = max(0.0, (median(forward_gaps) + median(backward_gaps)) / 2)
            (between if nodes and nodes[sender] != nodes[receiver] else inside).append(message)
    return (median(inside) if inside else None), (median(between) if between else None)


def gaps(timeline: Timeline, dependencies: Dependencies) -> Iterator[tuple[Pair, float]]:
    """Yield seconds from the end of a computation to the start of the one that it allows on another rank, with the
    places of both.

    Only if the other rank waited for nothing else: it had ended its computation before, and waited for no transfer.
    """
    ends = {dependencies.value_of(row.action): row.end_s for lane in timeline.present for row in lane.computations}
    for place, lane in enumerate(timeline.lanes):
        if lane is None:
            continue
        waits = sorted(row.end_s for row in lane.transfers if row.wait_s > 0)
        free_s = float("-inf")
        for row in lane.computations:
            value = dependencies.operand_of(row.action)
            input_s = None if value == NOTHING else ends.get(value)
            before_s, free_s = free_s, row.end_s
            if input_s is None or before_s >= input_s:
                continue
            makers, takers = dependencies.route(value)
            # Messages between shards have more than two ends.
            waited = bisect_left(waits, before_s) < bisect_right(waits, row.start_s)
            if len(makers) == len(takers) == 1 and makers != (place,) and not waited:
                yield (makers[0], place), row.start_s - input_s
