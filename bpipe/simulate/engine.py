"""Simulation: run a checked schedule on costs instead of devices.

Every rank follows its program (`schedule.lowering.lower`) and waits as the runtime does; the code refers to these
numbers:

  [1] A computation starts when the one before it is over and its operand from a neighbouring stage has arrived. Two
      that overlap start when the operands of both have arrived, take as long as one after the other, and pass on their
      results when both are over.
  [2] An eviction ends before the next computation on its rank, and before an earlier load: they take its memory.
  [3] A transfer is posted with the computation of its slot, or at the end of the one before its bubble (after a rank's
      last: once that one's message has passed). It starts when both of its ends are posted (if one-sided: the
      evictor's), its activations are there, and the transfer before it in its direction is over. Waits of an acceptor
      delay its transfers, not its computations.
  [4] A backward waits for the load of its activations; if transfers are synchronous an evictor waits for each when it
      posts it.
  [5] A message leaves when it is sent, in parallel to computation. In the exchanges of Megatron's loops it starts when
      both sides are there, and the rank goes on when it has passed.
  [6] A collective starts when all its ranks are there, and the one before it of its sort is over.
  [7] Gradients are reduced over replicas after or during all that (`_reductions`), and then all ranks update weights.

A transfer to the own node's memory has no other end, and takes the rank's link there: one port out and one in. Messages
that share a port take turns, first ready first, outputs before gradients. A transfer pauses while a message passes one
of its ports: it takes hundreds of times as long, and loses the same bandwidth as if both shared it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from bpipe.schedule.action import OF_THE_WEIGHTS, Action, Key, Kind
from bpipe.schedule.dependencies import Dependencies
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.lowering.lower import lower
from bpipe.schedule.program import Exchange, Op, Program, Transfer
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, Number, StageCost, check_fits, durations, host_port, ports
from bpipe.simulate.report import Reduced, Simulation, Timed, Wait

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
_EVICT, _HOST, _RETURN, _LOAD = Kind.EVICT, Kind.HOST, Kind.RETURN, Kind.LOAD
_RUN, _POST, _SEND, _WAIT, _START, _FINISH = map(int, Op)

_NOTHING = -1

# By port, the times in which it carries something.
Busy = Mapping[int, Sequence[tuple[Number, Number]]]
# Yields the event it waits for, ends with the rank's iteration.
_Process = Generator[int, None, None]


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Simulate a schedule.

    Args:
        schedule: The schedule to run.
        costs: Durations, sizes and links, in seconds and bytes.

    Returns:
        The time of every action, and what every rank holds.

    Raises:
        ValueError: The costs do not cover it, or its ranks wait for each other.
    """
    layout = schedule.layout
    check_fits(costs, schedule.num_stages, schedule.num_ranks, schedule.split_stages, layout.slices)
    if not costs.shards and layout.shard_kinds:
        raise ValueError(f"schedule {schedule.name} splits the vocabulary: give the costs of its shards")
    run = _Run(schedule, costs)
    run.execute()
    return run.report()


@dataclass(slots=True)
class _Transfer:
    """One move of a micro-batch's activations from `sender` to `receiver`.

    `outward` is the transfer that brought to the host what returns now. The two ends of each rank's link to its node's
    memory, on its device and in the memory, are p + rank and 2p + rank.
    """

    event: int
    sender: int
    receiver: int
    seconds: Number
    actions: dict[int, Action]
    outward: _Transfer | None = None
    num_posted: int = 0
    is_let: bool = False
    ready: Number = 0
    start: Number = 0
    end: Number = 0
    paused_until: Number = 0

    def pause(self, start: Number, end: Number) -> None:
        """Pause while a message takes a port. Two at once, on either port, pause it once."""
        if start < self.end and end > self.paused_until:
            self.end += end - max(start, self.paused_until)
            self.paused_until = end


class _Run:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.dependencies = Dependencies(schedule.layout, schedule.num_microbatches)
        self.width = schedule.num_microbatches
        self.first_transfer = self.dependencies.num_values
        # When each event is over: values, by number, then transfers in the order in which they are first posted.
        self.over: list[Number | None] = [None] * self.first_transfer
        self.transfers: list[_Transfer] = []
        # By the rank whose half is still missing, sender and receiver.
        self.open: dict[tuple[int, int, int], deque[_Transfer]] = {}
        # By sender: posted transfers in order, the first of which may be under way.
        self.queues: dict[int, deque[_Transfer]] = {}
        self.under_way: dict[int, _Transfer] = {}
        # By port into a rank: transfers that wait for the one under way there, each with its port out of its sender.
        self.held_up: dict[int, deque[tuple[_Transfer, int]]] = {}
        self.hosted: dict[Key, _Transfer] = {}
        # Started halves by their identity: one that leaves a second time is an equal value.
        self.started: dict[int, _Transfer] = {}
        # Next events: a message or transfer is ready, or (negative) a transfer may be over.
        self.ready: list[tuple[Number, int, int, int, Number]] = []
        self.port_free: list[Number] = [0] * (6 * schedule.num_ranks)
        # By port, when messages pass it: reductions that run during computations give way to them.
        self.messages: dict[int, list[tuple[Number, Number]]] = {}
        self.waiting: dict[int, list[_Process]] = {}
        self.compute: list[list[Timed]] = [[] for _ in range(schedule.num_ranks)]
        self.waits: list[list[Wait]] = [[] for _ in range(schedule.num_ranks)]
        self.clocks: list[Number] = [0] * schedule.num_ranks
        self.durations = durations(costs, schedule.num_ranks)
        # Messages differ by pipe or by slice, and repeat after that many micro-batches; two pipes have no slices.
        alike = range(min(max(schedule.layout.num_pipes, costs.slices), self.width))
        self.num_alike = len(alike)
        self.paths = [_paths(self.dependencies, costs, first, schedule.num_ranks) for first in alike]
        groups = range(self.dependencies.num_values // self.width)
        self.num_parties = [
            [len(self.dependencies.route(group * self.width + first).parties) for group in groups] for first in alike
        ]
        # When the last of each sort of collectives is over.
        self.turns: dict[int, Number] = {}
        rendezvous = costs.exchange is not Exchange.POSTED
        # By group of values: whether they pass only when all their ranks are there.
        self.meets = [rendezvous or (path is not None and path.is_collective) for path in self.paths[0]]
        # From this value on a rank also waits for what it has sent itself.
        self.first_waited = 0 if rendezvous else self.dependencies.first_shared
        # Of such values: how many ranks are still missing, and when the latest one came.
        self.missing: dict[int, tuple[int, Number]] = {}

    def _ports(self, sender: int, receiver: int) -> tuple[int, int]:
        return _ports_between(self.costs, self.schedule.num_ranks, sender, receiver)

    def execute(self) -> None:
        programs = lower(self.schedule, self.costs.exchange)
        runnable = [self._rank(program) for program in programs]
        waiting, ready, first_transfer = self.waiting, self.ready, self.first_transfer
        while True:
            while runnable:
                process = runnable.pop()
                event = next(process, _NOTHING)
                if event != _NOTHING:
                    waiting.setdefault(event, []).append(process)
            if not ready:
                break
            # Nothing that becomes ready from here on is ready before this, so first ready is first served.
            time, event, port_out, port_in, seconds = heapq.heappop(ready)
            if 0 <= event < first_transfer:
                self._pass(time, event, port_out, port_in, seconds)
            elif event >= first_transfer:
                self._begin(time, self.transfers[event - first_transfer], port_out, port_in)
                continue
            else:
                event = ~event
                if not self._finish(time, self.transfers[event - first_transfer], port_out, port_in):
                    continue
            if event in waiting:
                runnable += waiting.pop(event)
        if waiting:
            stuck = ", ".join(sorted(self._where(event) for event in waiting))
            raise ValueError(
                f"schedule {self.schedule.name}: the ranks wait for each other: {stuck}. "
                "Does it pass bpipe.schedule.check.rules?"
            )

    def _pass(self, now: Number, event: int, port_out: int, port_in: int, seconds: Number) -> None:
        """Let a message take its ports for as long as it lasts."""
        port_free = self.port_free
        if port_out < 0:
            self.over[event] = self.turns[port_out] = max(now, self.turns.get(port_out, now)) + seconds  # [6]
            return
        start = max(now, port_free[port_out], port_free[port_in])
        end = start + seconds
        self.over[event] = end
        if not seconds:
            return
        port_free[port_out] = port_free[port_in] = end
        for port in (port_out, port_in):
            if port in self.under_way:
                self.under_way[port].pause(start, end)
            if self.costs.eager:
                self.messages.setdefault(port, []).append((start, end))

    def _begin(self, now: Number, transfer: _Transfer, port_out: int, port_in: int) -> None:
        if port_in in self.under_way:
            # Another sender's is on its way to the same host: in turn they take as long as both at once.
            self.held_up.setdefault(port_in, deque()).append((transfer, port_out))
            return
        transfer.start = transfer.paused_until = max(now, self.port_free[port_out], self.port_free[port_in])
        transfer.end = transfer.start + transfer.seconds
        self.under_way[port_out] = self.under_way[port_in] = transfer
        heapq.heappush(self.ready, (transfer.end, ~transfer.event, port_out, port_in, 0))

    def _finish(self, now: Number, transfer: _Transfer, port_out: int, port_in: int) -> bool:
        """Return whether the transfer is over; if it was paused meanwhile, look again later."""
        if transfer.end > now:
            heapq.heappush(self.ready, (transfer.end, ~transfer.event, port_out, port_in, 0))
            return False
        self.over[transfer.event] = transfer.end
        for port in {port_out, port_in}:
            del self.under_way[port]
        if self.held_up.get(port_in):
            following, out_of = self.held_up[port_in].popleft()
            heapq.heappush(self.ready, (transfer.end, following.event, out_of, port_in, 0))
        self.queues[transfer.sender].popleft()
        self._begin_next(transfer.sender, transfer.end)
        # The receiver may now return what it hosts.
        if self.queues.get(transfer.receiver):
            self._begin_next(transfer.receiver, transfer.end)
        return True

    def _where(self, event: int) -> str:
        if event >= self.first_transfer:
            transfer = self.transfers[event - self.first_transfer]
            return f"a rank for {' and '.join(str(action) for action in transfer.actions.values())}"
        return f"a rank for {self.dependencies.describe(event)}"

    def _rank(self, program: Program) -> _Process:
        """One rank's iteration."""
        rank = program.rank
        done, durations, slices = self.compute[rank].append, self.durations, self.costs.slices
        # What a NamedTuple's own constructor does, but faster: there are millions.
        new_tuple = tuple.__new__
        clock: Number = 0
        first_waited, meets, width = self.first_waited, self.meets, self.width
        # Synchronous transfers for which the rank has to wait before a computation or a message.
        issued: list[int] = []
        over: list[Any] = self.over
        # A rank waits for what it has sent only to release it, which takes no time.
        sent: set[int] = set()
        operand: Any
        for op, operand in zip(program.ops, program.operands, strict=True):
            if issued and op <= _WAIT:
                clock = yield from self._await(rank, issued, clock)  # [4]
                issued.clear()
            if op == _RUN:
                end = clock + durations[operand.kind][operand.stage * slices + operand.microbatch % slices]
                done(new_tuple(Timed, (operand, clock, end)))
                clock = end
            elif op == _WAIT:
                if operand not in sent or operand >= first_waited:  # [1], [5]
                    if over[operand] is None:
                        yield operand
                    end = over[operand]
                    clock = end if end > clock else clock
            elif op == _SEND:
                sent.add(operand)
                self._come(operand, clock)
            elif op == _POST:
                if meets[operand // width]:
                    self._come(operand, clock)
            else:
                clock = yield from self._transfer(rank, op, operand, issued, clock)
        self.clocks[rank] = clock

    def _transfer(
        self, rank: int, op: int, half: Transfer, issued: list[int], clock: Number
    ) -> Generator[int, None, Number]:
        """Start a rank's half of a transfer, or finish it, for which only an evictor waits."""
        evicts = half.action.kind in (_EVICT, _LOAD)
        if op == _START:
            transfer = self.started[id(half)] = self._meet(rank, half)
            self._post_end(transfer, half.action, clock)
            if self.costs.synchronous and evicts:
                issued.append(transfer.event)
        elif evicts:
            clock = yield from self._await(rank, [self.started[id(half)].event], clock)  # [2], [4]
        return clock

    def _end(self, event: int) -> Number:
        end = self.over[event]
        assert end is not None
        return end

    def _come(self, value: int, clock: Number) -> None:
        """[5], [6] Note that a rank has come to its part of a message or, if all must meet, to receive it."""
        group, microbatch = divmod(value, self.width)
        if self.meets[group]:
            missing, latest = self.missing.pop(value, (self.num_parties[microbatch % self.num_alike][group], clock))
            clock = max(latest, clock)
            if missing > 1:
                self.missing[value] = missing - 1, clock
                return
        path = self.paths[microbatch % self.num_alike][group]
        assert path is not None, "what is sent has another rank to go to"
        heapq.heappush(self.ready, (clock, value, *path))

    def _await(self, rank: int, events: list[int], clock: Number) -> Generator[int, None, Number]:
        """Wait for transfers; time in which a rank waits for nothing else is exposed."""
        for event in events:
            if self.over[event] is None:
                yield event
            end = self._end(event)
            if end > clock:
                self.waits[rank].append(Wait(end, end - clock))
                clock = end
        return clock

    def _post_end(self, transfer: _Transfer, action: Action, clock: Number) -> None:
        """[3] Post one end of a transfer. A one-sided one has only the evictor's."""
        evictor = self.schedule.layout.rank_of(*action.key)
        alone = evictor in self.costs.one_sided or transfer.sender >= self.schedule.num_ranks
        leaving, returning = (_EVICT, _LOAD) if alone else (_HOST, _RETURN)
        if alone and action.kind not in (leaving, returning):
            return
        if action.kind is leaving:
            self.hosted[action.key] = transfer
        elif action.kind is returning:
            transfer.outward = self.hosted.pop(action.key)
        transfer.ready = max(transfer.ready, clock)
        transfer.num_posted += 1
        if alone or transfer.num_posted == 2:
            self.queues.setdefault(transfer.sender, deque()).append(transfer)
            self._begin_next(transfer.sender, transfer.ready)

    def _meet(self, rank: int, half: Transfer) -> _Transfer:
        """Return the transfer of this half: the n-th one sent is the n-th received."""
        action, sender, receiver = half
        met = self.open.setdefault((rank, sender, receiver), deque())
        if met:
            transfer = met.popleft()
        else:
            cost = self.costs.of(*action.key)
            link = self.costs.links.link(sender, receiver)
            seconds = link.seconds(cost.moved_bytes) if cost.transfer_s is None else cost.transfer_s
            p, ends = self.schedule.num_ranks, (sender, receiver)
            if sender == receiver:
                ends = (p + rank, 2 * p + rank) if action.kind is _EVICT else (2 * p + rank, p + rank)
            transfer = _Transfer(len(self.over), *ends, seconds, {})
            self.over.append(None)
            self.transfers.append(transfer)
            if sender != receiver:
                other = receiver if rank == sender else sender
                self.open.setdefault((other, sender, receiver), deque()).append(transfer)
        transfer.actions[rank] = action
        return transfer

    def _begin_next(self, sender: int, now: Number) -> None:
        """Let the first of a sender's posted transfers begin, unless it has, or what it returns has not arrived."""
        queue = self.queues[sender]
        if not queue or queue[0].is_let:
            return
        transfer = queue[0]
        if transfer.outward is not None and self.over[transfer.outward.event] is None:
            return
        transfer.is_let = True
        heapq.heappush(
            self.ready, (max(transfer.ready, now), transfer.event, *self._ports(sender, transfer.receiver), 0)
        )

    def report(self) -> Simulation:
        moves: list[list[Timed]] = [[] for _ in range(self.schedule.num_ranks)]
        for transfer in self.transfers:
            for rank, action in transfer.actions.items():
                moves[rank].append(Timed(action, transfer.start, self._end(transfer.event)))
        costs, layout = self.costs, self.schedule.layout
        updates = [
            sum(costs.of(stage).optimizer_s for stage in layout.stages_of(rank))
            for rank in range(self.schedule.num_ranks)
        ]
        reduced = _reductions(self.schedule, self.costs, self.compute, self.clocks, self._busy())
        pipeline = max(self.clocks)
        # The norm of all gradients scales every update, so no rank updates before the last has reduced.
        complete = max([pipeline, *(row[-1].end_s for row in reduced if row)])
        return Simulation(
            schedule=self.schedule,
            costs=self.costs,
            computations=tuple(tuple(row) for row in self.compute),
            transfers=tuple(tuple(sorted(row, key=lambda timed: (timed.start_s, timed.end_s))) for row in moves),
            waits=tuple(map(tuple, self.waits)),
            pipeline_s=pipeline,
            makespan_s=complete + max(updates),
            reductions=reduced,
        )

    def _busy(self) -> dict[int, list[tuple[Number, Number]]]:
        """Return when messages and transfers pass each port, if reductions run during computations."""
        busy = self.messages
        for transfer in self.transfers if self.costs.eager else ():
            for port in self._ports(transfer.sender, transfer.receiver):
                busy.setdefault(port, []).append((transfer.start, transfer.end))
        return busy


class _Path(NamedTuple):
    """Ports that a message takes, and its seconds. A collective takes no ports, but turns with others of its sort."""

    port_out: int
    port_in: int
    seconds: Number

    @property
    def is_collective(self) -> bool:
        return self.port_out < 0


def _paths(dependencies: Dependencies, costs: Costs, microbatch: int, num_ranks: int) -> list[_Path | None]:
    """Return the paths of one micro-batch's or slice's messages by group of values; None if they stay on their rank."""
    links, num_stages, width = costs.links, dependencies.num_stages, dependencies.num_microbatches
    # After T nothing is reduced with algorithm 2: that is done with the statistics.
    also_reduced = costs.collectives.reduce_s if dependencies.layout.vocabulary is Vocabulary.TWO else 0
    collective_s = {
        "output": costs.collectives.broadcast_s,
        "gradient": costs.collectives.input_broadcast_s,
        "statistics": costs.collectives.gather_s + also_reduced,
        "last gradient": costs.collectives.reduce_s,
        "embeddings": costs.collectives.input_reduce_s,
    }
    paths: list[_Path | None] = []
    for group in range(dependencies.num_values // width):
        route = dependencies.route(group * width + microbatch)
        parties = route.parties
        if len(parties) < 2 or not route.takers:
            paths.append(None)
        elif len(parties) > 2 or len(route.makers) > 1:
            latency = max(links.link(parties[0], other).latency_s for other in parties[1:])
            paths.append(_Path(~group, ~group, latency + collective_s[dependencies.sort(group * width)]))
        else:
            # A gradient is as large as the output of the stage before.
            sender = group if group < num_stages else group - num_stages - 1
            sent_bytes = costs.of(sender, microbatch).sent_bytes
            both = _ports_between(costs, num_ranks, *parties)
            paths.append(_Path(*both, links.link(*parties).message_s(sent_bytes)))
    return paths


def _ports_between(costs: Costs, num_ranks: int, sender: int, receiver: int) -> tuple[int, int]:
    """Return the sender's outgoing and the receiver's incoming port.

    From p = `num_ranks` on, both are ends of a rank's link to its node's memory: p + rank on the device, 2p + rank
    there.
    """
    if sender >= num_ranks:
        port = host_port(sender % num_ranks, num_ranks, sender < receiver)
        return port, port
    between = costs.links.crosses(sender, receiver)
    return ports(sender, between)[0], ports(receiver, between)[1]


class _Complete(NamedTuple):
    """A stage's gradients: when all replicas are complete, when they may be reduced, and when its buckets begin."""

    complete_s: Number
    stage: int
    ready_s: Number
    begun_s: Number


def _reductions(
    schedule: Schedule, costs: Costs, computations: Sequence[Sequence[Timed]], clocks: Sequence[Number], busy: Busy
) -> tuple[tuple[Reduced, ...], ...]:
    """Return, by rank, the reductions of gradients over replicas that it has a part in, in order.

    A stage's gradients are complete with the end of its last backward on every rank that has a replica of it. Lazily
    they are reduced after all computations of these ranks, eagerly as soon as they are complete (Megatron's
    `--overlap-grad-reduce`). Buckets are complete one after the other, evenly over the last backward, and each is then
    reduced; if replicas of a stage are on several ranks of the schedule, all are complete at its end. The replicas of a
    pair of ranks have one queue, because their reductions share a communicator: the first complete goes first.

    Only the update waits for a reduction, so it gives way: one that runs during computations pauses while a message or
    a transfer passes one of its ports. Replicas of data parallelism, which are not in the schedule, are part of the
    seconds that costs give.

    Args:
        clocks: When each rank has computed everything.
    """
    reduced: list[list[Reduced]] = [[] for _ in schedule.ranks]
    # Of each rank the last backward by stage.
    completed = [
        {timed.action.stage: timed for timed in row if timed.action.kind in OF_THE_WEIGHTS} for row in computations
    ]
    for ranks, queue in _queues(schedule, costs, completed, clocks).items():
        between = costs.replicas_apart or any(costs.links.crosses(ranks[0], other) for other in ranks)
        taken = _merged([times for rank in ranks for port in ports(rank, between) for times in busy.get(port, ())])
        free: Number = 0
        for _, stage, ready, begun in sorted(queue):
            start, free = _reduced(costs.of(stage), begun, ready, free, taken)
            for rank in ranks:
                reduced[rank].append(Reduced(stage, start, free))
    return tuple(map(tuple, reduced))


def _reduced(
    cost: StageCost, begun: Number, ready: Number, free: Number, taken: Sequence[tuple[Number, Number]]
) -> tuple[Number, Number]:
    """Return when the first bucket's reduction begins, and when the last one's is over."""
    start = None
    for number in range(1, cost.buckets + 1):
        complete = ready if number == cost.buckets else begun + Fraction(number, cost.buckets) * (ready - begun)
        begin = max(complete, free)
        start = begin if start is None else start
        seconds = cost.reduction_s if cost.buckets == 1 else Fraction(1, cost.buckets) * cost.reduction_s
        free = _over(begin, seconds, taken)
    assert start is not None, "there is a bucket"
    return start, free


def _queues(
    schedule: Schedule, costs: Costs, completed: Sequence[Mapping[int, Timed]], clocks: Sequence[Number]
) -> dict[tuple[int, ...], list[_Complete]]:
    """Return the stages whose gradients are reduced, by the ranks that take part."""
    queues: dict[tuple[int, ...], list[_Complete]] = {}
    for stage in range(costs.num_stages):
        cost = costs.of(stage)
        ranks = tuple(sorted(set(schedule.layout.replicas(stage))))
        # A pipe without a micro-batch completes nothing, and has its gradients, zeros, at once.
        last = [completed[rank][stage] for rank in ranks if stage in completed[rank]]
        complete = max((backward.end_s for backward in last), default=0)
        if cost.reduction_s:
            ready = complete if costs.eager else max(clocks[rank] for rank in ranks)
            begun = last[0].start_s if costs.eager and len(ranks) == len(last) == 1 else ready
            queues.setdefault(ranks, []).append(_Complete(complete, stage, ready, begun))
    return queues


def _merged(times: list[tuple[Number, Number]]) -> list[tuple[Number, Number]]:
    """Return the times in which any is busy, in order and apart from each other."""
    merged: list[tuple[Number, Number]] = []
    for start, end in sorted(times):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _over(now: Number, left: Number, taken: Sequence[tuple[Number, Number]]) -> Number:
    """Return the end of what begins now and takes `left` seconds, if it pauses in these times."""
    for start, end in taken:
        if end <= now:
            continue
        if now + left <= start:
            break
        left -= max(0, start - now)
        now = end
    return now + left
