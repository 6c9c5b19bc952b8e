"""Predict a recorded run from its own measurements.

In: a `Measured`. Out: a `Prediction`: the schedule simulated, and peaks from it alone.

Seconds of a computation are the median over all recorded iterations but a warm-up. A transfer takes what the link's
probe says, or the median of the measured ones if there was no probe or they were far faster, and waits for its partner
if the transport does. A message between stages takes the median gap between a computation and the one that was waiting
for it. `Basis` says which. Knows no difference.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.record.format import ONE_SIDED, Row
from bpipe.record.report.memory import RankPeaks, RankSizes, rank_peaks, whole_peaks, without_transfers
from bpipe.record.report.selection import OWN_TRANSFERS, Measured, Timeline, ended_transfers, lanes_of
from bpipe.schedule.action import Kind
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.hosts import Pair
from bpipe.schedule.memory import changes_in_time
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, Link, Links, ShardCost, StageCost
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Level, Simulation, levels_of

# Fewer gaps than this, in either direction, tell nothing of a message.
MIN_GAPS = 3
# A probe that transfers beat by this factor measured something other than the link: on one H200 whose other processes
# were at work it found 7 GB/s, and transfers then reached 351.
FAR_ABOVE_PROBE = 2.0

_FORWARD, _BACKWARD = Kind.FORWARD, Kind.BACKWARD


@dataclass(frozen=True, slots=True)
class Basis:
    """Inputs of a prediction.

    By stage: seconds of computations by kind, and bytes a second of transfers with their source.

    `message_s` is None where no message could be told from waiting; then the prediction has none. `assumed` are stages
    without a record.
    """

    seconds: Mapping[tuple[int, Kind], float]
    bytes_per_s: Mapping[int, float]
    bytes_source: Mapping[int, str]
    message_s: float | None
    message_between_s: float | None
    assumed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction from measured times. `peaks[place]` follow from the schedule; `unbalanced` are without transfers.

    `balanced_bytes`: peaks that balancing would give an unbalanced run; empty where there is nothing to balance.
    """

    report: Simulation
    basis: Basis
    sizes: tuple[RankSizes | None, ...]
    peaks: tuple[RankPeaks, ...]
    unbalanced: tuple[RankPeaks, ...]
    balanced_bytes: tuple[int, ...] | None

    @property
    def span_s(self) -> float:
        return float(self.report.pipeline_s)

    def bubble(self, place: int) -> float:
        return 1 - float(self.report.busy_s(place)) / self.span_s if self.span_s else 0.0

    def idle_s(self, place: int) -> float:
        """Return seconds in which a rank waits for its neighbours: it neither computes nor waits for a transfer."""
        return self.span_s - float(self.report.busy_s(place)) - float(self.report.exposed_s[place])

    def levels(self, place: int) -> tuple[Level, ...]:
        """Return the bytes over time as the run counts them: host buffers held throughout."""
        size = self.sizes[place]
        if size is None:
            return ()
        moved = (timed for timed in self.report.transfers[place] if timed.action.kind in OWN_TRANSFERS)
        changes = changes_in_time((*self.report.computations[place], *moved), self.report.costs.memory)
        return levels_of([(0.0, size.host_bytes), *((float(time), change) for time, change in changes)])


def replay(measured: Measured) -> Prediction:
    """Predict what the schedule should have done with the measured times and sizes."""
    schedule = measured.schedule
    sizes = tuple(_sizes(measured, place) for place in range(schedule.num_ranks))
    seconds, assumed = _seconds(measured)
    speeds, sources = _speeds(measured)
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
        basis=Basis(seconds, speeds, sources, inside, between, assumed),
        sizes=sizes,
        peaks=tuple(rank_peaks(schedule, place, size) for place, size in enumerate(sizes)),
        unbalanced=tuple(rank_peaks(plain, place, _without_buffers(size)) for place, size in enumerate(sizes)),
        balanced_bytes=_balanced(measured.program, sizes) if measured.program.balance is None else None,
    )


def _stage_cost(
    schedule: Schedule,
    stage: int,
    sizes: Sequence[RankSizes | None],
    seconds: Mapping[tuple[int, Kind], float],
    bytes_per_s: float | None,
) -> StageCost:
    """What a stage takes and holds, by those of its ranks of which sizes are known."""
    known = [size for place in schedule.layout.replicas(stage) if (size := sizes[place]) is not None]
    saved = max((size.saved_bytes.get(stage, 0) for size in known), default=0)
    moved = max((min(saved, size.moved_bytes.get(stage, saved)) for size in known), default=0)
    weight = seconds.get((stage, Kind.BACKWARD_WEIGHT))
    return StageCost(
        forward_s=seconds[stage, _FORWARD],
        backward_s=seconds[stage, _BACKWARD] if weight is None else seconds[stage, Kind.BACKWARD_INPUT] + weight,
        weight_s=weight,
        transfer_s=0 if bytes_per_s is None else moved / bytes_per_s,
        moved_bytes=moved,
        saved_bytes=saved,
        after_input_bytes=max(
            (size.after_input_bytes[stage] for size in known if stage in size.after_input_bytes), default=None
        ),
    )


def _shards(seconds: Mapping[tuple[int, Kind], float], num_ranks: int) -> tuple[ShardCost, ...]:
    """What passes between shards takes no more than a message does: nobody measured how long."""

    def of(rank: int, kind: Kind) -> float:
        return seconds.get((rank, kind), 0.0)

    return tuple(
        ShardCost(
            forward_s=of(rank, Kind.SHARD_FORWARD),
            backward_s=of(rank, Kind.SHARD_BACKWARD),
            input_forward_s=of(rank, Kind.INPUT_FORWARD),
            input_backward_s=of(rank, Kind.INPUT_BACKWARD),
        )
        for rank in range(num_ranks)
    )


def _one_sided(measured: Measured) -> frozenset[int]:
    """Return the places whose pair has a one-sided transport, as either of its ranks recorded; of a pool, as they
    recorded themselves."""
    found = {
        place for place, record in enumerate(measured.records) if record is not None and record.transport in ONE_SIDED
    }
    partners = None if measured.schedule.is_pooled else measured.schedule.partners
    return frozenset(found | {partners[place] for place in found if partners})


def _without_buffers(size: RankSizes | None) -> RankSizes | None:
    return None if size is None else replace(size, moved_bytes={}, host_bytes=0)


def _balanced(program: ScheduleConfig, sizes: Sequence[RankSizes | None]) -> tuple[int, ...] | None:
    """What balancing would make of a run without it: nothing where there is nothing to balance, None where a size is
    not known."""
    schedule = build(replace(program, balance=BalanceConfig()))
    if not any(slot.transfers for row in schedule.ranks for slot in row):
        return ()
    saved = {stage: size for one in sizes if one is not None for stage, size in one.saved_bytes.items()}
    between = {stage: size for one in sizes if one is not None for stage, size in one.after_input_bytes.items()}
    return whole_peaks(schedule, saved, between, max(one.shard_bytes for one in sizes if one is not None))


def _sizes(measured: Measured, place: int) -> RankSizes | None:
    """Of the iteration shown in which they are largest; they only differ where micro-batches do."""
    found = [lane.source for _, lane in lanes_of(measured.shown, place)]
    if not found:
        return None
    one = max(found, key=lambda iteration: sum(iteration.saved_bytes.values()))
    host_bytes, own_bytes = (
        max(sizes) for sizes in zip(*((each.host_bytes, each.own_bytes) for each in found), strict=True)
    )
    return RankSizes(
        saved_bytes=one.saved_bytes,
        moved_bytes=one.moved_bytes,
        received_bytes=one.received_bytes,
        host_bytes=host_bytes,
        after_input_bytes=one.after_input_bytes,
        shard_bytes=one.shard_bytes,
        own_bytes=own_bytes,
    )


def _seconds(measured: Measured) -> tuple[dict[tuple[int, Kind], float], tuple[int, ...]]:
    """Return the median of every stage and kind, and the stages whose time had to be taken from the others."""
    samples: dict[tuple[int, Kind], list[float]] = {}
    for timeline in measured.steady:
        for lane in timeline.present:
            for row in lane.computations:
                samples.setdefault((row.action.stage, row.action.kind), []).append(row.seconds)
    seconds = {key: median(values) for key, values in samples.items()}
    # In the order they were met: a set's order of kinds changes from process to process.
    kinds = dict.fromkeys(kind for _, kind in seconds)
    assumed = tuple(stage for stage in range(measured.schedule.num_stages) if (stage, _FORWARD) not in seconds)
    typical = {kind: median([value for (_, other), value in seconds.items() if other is kind]) for kind in kinds}
    seconds |= {(stage, kind): typical[kind] for stage in assumed for kind in kinds}
    return seconds, assumed


def _speeds(measured: Measured) -> tuple[dict[int, float], dict[int, str]]:
    """Return the bytes a second of every stage that is moved, and where the number is from."""
    moved = {
        action.stage
        for row in measured.schedule.ranks
        for slot in row
        for action in slot.transfers
        if action.kind is Kind.EVICT
    }
    known = {stage: found for stage in sorted(moved) if (found := _speed(measured, stage)) is not None}
    if known:
        others = median([speed for speed, _ in known.values()]), "other stages"
        known |= dict.fromkeys(moved - known.keys(), others)
    return {stage: speed for stage, (speed, _) in known.items()}, {
        stage: source for stage, (_, source) in known.items()
    }


def _speed(measured: Measured, stage: int) -> tuple[float, str] | None:
    """Return the speed of a stage's transfers in bytes per second, and its source: the probe of its links, or the
    transfers themselves if no link was probed or they were far faster."""
    places = dict.fromkeys(measured.schedule.layout.replicas(stage))
    speeds = [speed for place in places if (speed := probed_speed(measured, place)) is not None]
    rows = (row for place in places for row in ended_transfers(measured, measured.steady, place, stage))
    rates = [row.bytes / row.seconds for row in rows if row.bytes]
    if speeds and (not rates or median(rates) <= FAR_ABOVE_PROBE * median(speeds)):
        return median(speeds), "probe"
    if not rates:
        return None
    return median(rates), "measured, the probe was too low" if speeds else "measured"


def probed_speed(measured: Measured, place: int) -> float | None:
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
    """Return the node of every place; empty where all are on one, or not all are known."""
    hosts = [None if record is None else record.host for record in measured.records]
    names = list(dict.fromkeys(hosts))
    return tuple(names.index(host) for host in hosts) if len(names) > 1 and None not in names else ()


def _messages(measured: Measured, nodes: Sequence[int]) -> tuple[float | None, float | None]:
    """Return the seconds of a message inside a node and between nodes: the median over pairs of neighbours.

    Of a pair it is the mean of both directions' median gaps, so that what two clocks differ by drops out.
    """
    dependencies = Dependencies(measured.schedule.layout, measured.schedule.num_microbatches)
    found: dict[Pair, list[float]] = {}
    for timeline in measured.steady:
        for ranks, gap in gaps(timeline, dependencies):
            found.setdefault(ranks, []).append(gap)
    inside: list[float] = []
    between: list[float] = []
    for (one, other), forth in found.items():
        back = found.get((other, one), [])
        if one < other and min(len(forth), len(back)) >= MIN_GAPS:
            message = max(0.0, (median(forth) + median(back)) / 2)
            (between if nodes and nodes[one] != nodes[other] else inside).append(message)
    return (median(inside) if inside else None), (median(between) if between else None)


def gaps(timeline: Timeline, dependencies: Dependencies) -> Iterator[tuple[Pair, float]]:
    """Yield seconds from the end of a computation to the start of the one that it allows on another rank, with the
    places of both.

    Only where the other rank waited for nothing else: it had ended its computation before, and waited for no transfer.
    """
    ends = {dependencies.value_of(row.action): row.end_s for lane in timeline.present for row in lane.computations}
    for place, lane in enumerate(timeline.lanes):
        if lane is None:
            continue
        waits = sorted(row.end_s for row in lane.transfers if row.wait_s > 0)
        for free, row in _with_free(lane.computations):
            value = dependencies.operand_of(row.action)
            made = None if value == NOTHING else ends.get(value)
            if made is None or free >= made:
                continue
            makers, takers = dependencies.route(value)
            # What passes between shards is no message of two.
            waited = bisect_left(waits, free) < bisect_right(waits, row.start_s)
            if len(makers) == len(takers) == 1 and makers != (place,) and not waited:
                yield (makers[0], place), row.start_s - made


def _with_free(rows: Sequence[Row]) -> Iterator[tuple[float, Row]]:
    """Return every computation of a rank with when the one before it was over."""
    return zip([float("-inf"), *(row.end_s for row in rows)], rows, strict=False)
