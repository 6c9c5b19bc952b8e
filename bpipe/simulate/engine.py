"""Run a schedule on costs instead of devices. In: a checked Schedule and `Costs`. Out: a `Simulation` with the time of every action.

Every rank keeps its own order and waits as the runtime does; the numbers are those of the code:
  [1] a computation starts when the one before it is over and what it needs from its neighbouring stage has arrived; two that overlap
      start when what both need has arrived, take as long as one after the other, and pass on what they made when both are over
  [2] an eviction ends before the next computation on its rank, and before a load that comes earlier: they take its memory
  [3] a transfer is posted with the computation it stands beside, or at the end of the one before its bubble (behind a rank's last: once
      that one's message has passed), and starts when both of its ends are posted (of a one-sided one: the evictor's), what it sends is
      there, and the transfer before it in its direction is over
  [4] a backward waits for the load of its activations; where transfers are synchronous an evictor waits for each where it is posted
  [5] where exchanges block and nothing overlaps, a rank sends what it made and receives what it needs before it goes on, in one operation
      if one neighbour is both, and a message starts when both sides are there: Megatron's 1F1B. Otherwise it leaves when it is computed,
      beside computation
Messages that share a port take turns, first ready first, outputs before gradients. A transfer pauses while a message passes one of its
ports: it is hundreds of times as long, and the bandwidth it loses is the same as if both shared it.
Knows no tensors and no device; refuses nothing that `check` lets pass.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

from bpipe.ir.action import Action, Kind
from bpipe.ir.schedule import Schedule
from bpipe.ir.steps import steps
from bpipe.simulate.cost import Costs, Number, StageCost, check_fits
from bpipe.simulate.report import Simulation, Timed

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
_EVICT, _HOST, _RETURN, _LOAD = Kind.EVICT, Kind.HOST, Kind.RETURN, Kind.LOAD

_NOTHING = -1

# Yields the event it waits for, ends with the rank's iteration.
_Process = Generator[int, None, None]


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Raises ValueError where the costs do not cover the schedule, or its ranks wait for each other."""
    split = sorted({cell.compute.stage for row in schedule.ranks for cell in row if cell.compute and cell.compute.kind is _WEIGHT})
    check_fits(costs, schedule.num_stages, schedule.num_ranks, split)
    run = _Run(schedule, costs)
    run.execute()
    return run.report()


@dataclass(slots=True)
class _Transfer:
    """One move of a micro-batch's activations from `sender` to `receiver`. `behind` is what brought there what comes back now."""

    event: int
    sender: int
    receiver: int
    seconds: Number
    actions: dict[int, Action]
    behind: _Transfer | None = None
    num_posted: int = 0
    is_let: bool = False
    ready: Number = 0
    start: Number = 0
    end: Number = 0
    paused_until: Number = 0

    def pause(self, start: Number, end: Number) -> None:
        """A message takes the port from `start` to `end`. Two at once, on either port, pause it once."""
        if start < self.end and end > self.paused_until:
            self.end += end - max(start, self.paused_until)
            self.paused_until = end


class _Route(NamedTuple):
    """How messages from a stage to a neighbouring one pass."""

    sender: int
    receiver: int
    port_out: int
    port_in: int
    seconds: Number


class _Message(NamedTuple):
    """One output or gradient: the event that it has arrived."""

    event: int
    route: _Route


class _Run:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.width = schedule.num_microbatches
        self.first_gradient = schedule.num_stages * self.width
        # When each event is over: outputs, then gradients, then transfers in the order in which they are first posted.
        self.over: list[Number | None] = [None] * (2 * self.first_gradient)
        self.transfers: list[_Transfer] = []
        self.open: dict[tuple[int, int], deque[_Transfer]] = {}
        # By sender: what is posted, in order, the first perhaps under way.
        self.queues: dict[int, deque[_Transfer]] = {}
        self.under_way: dict[int, _Transfer] = {}
        self.hosted: dict[tuple[int, int], _Transfer] = {}
        # What happens next: a message or transfer is ready, or (negative) a transfer may be over.
        self.ready: list[tuple[Number, int, int, int, Number]] = []
        self.port_free: list[Number] = [0] * (4 * schedule.num_ranks)
        self.waiting: dict[int, list[_Process]] = {}
        self.compute: list[list[Timed]] = [[] for _ in range(schedule.num_ranks)]
        self.exposed: list[Number] = [0] * schedule.num_ranks
        self.clocks: list[Number] = [0] * schedule.num_ranks
        self.routes = self._routes()
        # With several stages a rank Megatron overlaps its exchanges, and the ring of neighbours would block itself otherwise.
        overlaps = any(cell.overlapped is not None for row in schedule.ranks for cell in row)
        self.blocking = costs.blocking and schedule.num_chunks == 1 and not overlaps
        self.met_at: dict[int, Number] = {}

    def _routes(self) -> dict[tuple[int, int], _Route]:
        """For a stage and the next, both ways."""
        owner, links = self.schedule.stage_to_rank, self.costs.links
        routes = {}
        for stage in range(len(owner) - 1):
            for one, other in ((stage, stage + 1), (stage + 1, stage)):
                sender, receiver = owner[one], owner[other]
                seconds = links.link(sender, receiver).seconds(self.costs.stages[stage].sent_bytes) if sender != receiver else 0
                routes[one, other] = _Route(sender, receiver, *self._ports(sender, receiver), seconds)
        return routes

    def _ports(self, sender: int, receiver: int) -> tuple[int, int]:
        medium = int(self.costs.links.crosses(sender, receiver))
        return 4 * sender + 2 * medium, 4 * receiver + 2 * medium + 1

    def execute(self) -> None:
        runnable = [self._rank(rank) for rank in range(self.schedule.num_ranks)]
        waiting, ready, num_messages = self.waiting, self.ready, 2 * self.first_gradient
        while True:
            while runnable:
                process = runnable.pop()
                event = next(process, _NOTHING)
                if event != _NOTHING:
                    waiting.setdefault(event, []).append(process)
            if not ready:
                break
            # Nothing that becomes ready from here on is ready before this, so first ready is first served.
            at, event, port_out, port_in, seconds = heapq.heappop(ready)
            if 0 <= event < num_messages:
                self._pass(at, event, port_out, port_in, seconds)
            elif event >= num_messages:
                self._begin(at, self.transfers[event - num_messages], port_out, port_in)
                continue
            else:
                event = ~event
                if not self._finish(at, self.transfers[event - num_messages], port_out, port_in):
                    continue
            if event in waiting:
                runnable += waiting.pop(event)
        if waiting:
            stuck = ", ".join(sorted(self._where(event) for event in waiting))
            raise ValueError(f"schedule {self.schedule.name}: the ranks wait for each other: {stuck}. Does it pass bpipe.check.rules?")

    def _pass(self, at: Number, event: int, port_out: int, port_in: int, seconds: Number) -> None:
        """A message takes its ports for as long as it lasts."""
        port_free = self.port_free
        start = max(at, port_free[port_out], port_free[port_in])
        end = start + seconds
        self.over[event] = end
        if not seconds:
            return
        port_free[port_out] = port_free[port_in] = end
        for port in (port_out, port_in):
            if port in self.under_way:
                self.under_way[port].pause(start, end)

    def _begin(self, at: Number, transfer: _Transfer, port_out: int, port_in: int) -> None:
        transfer.start = transfer.paused_until = max(at, self.port_free[port_out], self.port_free[port_in])
        transfer.end = transfer.start + transfer.seconds
        self.under_way[port_out] = self.under_way[port_in] = transfer
        heapq.heappush(self.ready, (transfer.end, ~transfer.event, port_out, port_in, 0))

    def _finish(self, at: Number, transfer: _Transfer, port_out: int, port_in: int) -> bool:
        """Whether the transfer is over; where it was paused meanwhile, look again later."""
        if transfer.end > at:
            heapq.heappush(self.ready, (transfer.end, ~transfer.event, port_out, port_in, 0))
            return False
        self.over[transfer.event] = transfer.end
        del self.under_way[port_out], self.under_way[port_in]
        self.queues[transfer.sender].popleft()
        self._begin_next(transfer.sender, transfer.end)
        # What the receiver hosts since now it may give back.
        if self.queues.get(transfer.receiver):
            self._begin_next(transfer.receiver, transfer.end)
        return True

    def _where(self, event: int) -> str:
        if event >= 2 * self.first_gradient:
            transfer = self.transfers[event - 2 * self.first_gradient]
            return f"a rank for {' and '.join(str(action) for action in transfer.actions.values())}"
        is_gradient, key = divmod(event, self.first_gradient)
        stage, microbatch = divmod(key, self.width)
        return f"a rank for the {'gradient' if is_gradient else 'output'} of stage {stage}, micro-batch {microbatch}"

    def _rank(self, rank: int) -> _Process:
        """One rank's iteration."""
        timed, durations = self.compute[rank], _durations(self.costs.stages)
        clock: Number = 0
        leaving: list[int] = []
        loading: dict[tuple[int, int], int] = {}
        made: _Message | None = None
        for step in steps(self.schedule, rank):
            compute = step.compute
            if compute is None:
                # The loop's start, or its end: then what was computed last leaves first.
                clock = yield from self._arrive(made, None, clock)
                leaving, clock = yield from self._post(rank, step.after, clock, loading)
                continue
            kind, stage, microbatch = compute.kind, compute.stage, compute.microbatch
            needed = self._needed(kind, stage, microbatch)
            clock = yield from self._arrive(made, needed, clock)
            beside = step.overlapped
            if beside is not None:
                clock = yield from self._arrive(None, self._needed(beside.kind, beside.stage, beside.microbatch), clock)
            if leaving:
                clock = yield from self._await(rank, leaving, clock)  # [2]
            leaving = []
            if step.before:
                leaving, clock = yield from self._post(rank, step.before, clock, loading)
            for one in step.computations:
                if loading and one.kind is not _FORWARD and (one.stage, one.microbatch) in loading:
                    clock = yield from self._await(rank, [loading.pop((one.stage, one.microbatch))], clock)  # [4]
            for one in step.computations:
                end = clock + durations[one.kind][one.stage]
                timed.append(Timed(one, clock, end))
                clock = end
            made = self._made(kind, stage, microbatch)
            self._leave(made, clock)
            if beside is not None:
                self._leave(self._made(beside.kind, beside.stage, beside.microbatch), clock)
            if step.after:
                if leaving and any(action.kind is _LOAD for action in step.after):
                    clock = yield from self._await(rank, leaving, clock)  # [2]
                    leaving = []
                started, clock = yield from self._post(rank, step.after, clock, loading)
                leaving += started
        self.clocks[rank] = clock

    def _end(self, event: int) -> Number:
        end = self.over[event]
        assert end is not None
        return end

    def _needed(self, kind: Kind, stage: int, microbatch: int) -> _Message | None:
        """What a computation needs from its neighbouring stage. None: nothing."""
        if kind is _WEIGHT:
            return None
        if kind is _FORWARD:
            return self._message(stage - 1, stage, microbatch)
        return self._message(stage + 1, stage, self.first_gradient + microbatch)

    def _made(self, kind: Kind, stage: int, microbatch: int) -> _Message | None:
        """What leaves for the neighbouring stage."""
        if kind is _WEIGHT:
            return None
        if kind is _FORWARD:
            return self._message(stage, stage + 1, microbatch)
        return self._message(stage, stage - 1, self.first_gradient + microbatch)

    def _message(self, stage: int, to_stage: int, offset: int) -> _Message | None:
        route = self.routes.get((stage, to_stage))
        return None if route is None else _Message(stage * self.width + offset, route)

    def _ready(self, message: _Message, at: Number) -> None:
        heapq.heappush(self.ready, (at, message.event, message.route.port_out, message.route.port_in, message.route.seconds))

    def _leave(self, made: _Message | None, clock: Number) -> None:
        """Where exchanges do not block, what was computed is on its way at once."""
        if made is not None and not self.blocking:
            self._ready(made, clock)

    def _arrive(self, made: _Message | None, needed: _Message | None, clock: Number) -> Generator[int, None, Number]:
        """Wait for what the next computation needs [1], where exchanges block also for what the last one made [5]."""
        if self.blocking:
            return (yield from self._exchange(made, needed, clock))
        if needed is None:
            return clock
        if self.over[needed.event] is None:
            yield needed.event
        return max(clock, self._end(needed.event))

    def _exchange(self, made: _Message | None, needed: _Message | None, clock: Number) -> Generator[int, None, Number]:
        """Be there for both messages at once, or send first where they go to and come from different neighbours."""
        at_once = made is None or needed is None or made.route.receiver == needed.route.sender
        for messages in ((made, needed),) if at_once else ((made,), (needed,)):
            for message in messages:
                if message is not None:
                    self._meet_for(message, clock)
            for message in messages:
                if message is not None:
                    if self.over[message.event] is None:
                        yield message.event
                    clock = max(clock, self._end(message.event))
        return clock

    def _meet_for(self, message: _Message, clock: Number) -> None:
        route = message.route
        other = self.met_at.pop(message.event, None)
        if route.sender == route.receiver:
            self.over[message.event] = clock if other is None else other
        elif other is None:
            self.met_at[message.event] = clock
        else:
            self._ready(message, max(clock, other))

    def _await(self, rank: int, events: list[int], clock: Number) -> Generator[int, None, Number]:
        """The rank stands still for transfers and nothing else: that is exposed."""
        for event in events:
            if self.over[event] is None:
                yield event
            end = self._end(event)
            if end > clock:
                self.exposed[rank] += end - clock
                clock = end
        return clock

    def _post(
        self, rank: int, actions: tuple[Action, ...], clock: Number, loading: dict[tuple[int, int], int]
    ) -> Generator[int, None, tuple[list[int], Number]]:
        """[3] Post this rank's ends of transfers. Gives back the evictions among them, and when that was done; remembers the loads."""
        evictions: list[int] = []
        for action in actions:
            transfer = self._meet(rank, action)
            if action.kind is _EVICT:
                evictions.append(transfer.event)
            elif action.kind is _LOAD:
                loading[action.stage, action.microbatch] = transfer.event
            self._post_end(transfer, action, clock)
        if self.costs.synchronous:
            clock = yield from self._await(rank, [*evictions, *loading.values()], clock)  # [4]
        return evictions, clock

    def _post_end(self, transfer: _Transfer, action: Action, clock: Number) -> None:
        """One end of a transfer is posted. Of a one-sided one the evictor's end is all there is."""
        alone = self.schedule.stage_to_rank[action.stage] in self.costs.one_sided
        there, back = (_EVICT, _LOAD) if alone else (_HOST, _RETURN)
        if alone and action.kind not in (there, back):
            return
        if action.kind is there:
            self.hosted[action.stage, action.microbatch] = transfer
        elif action.kind is back:
            transfer.behind = self.hosted.pop((action.stage, action.microbatch))
        transfer.ready = max(transfer.ready, clock)
        transfer.num_posted += 1
        if alone or transfer.num_posted == 2:
            self.queues.setdefault(transfer.sender, deque()).append(transfer)
            self._begin_next(transfer.sender, transfer.ready)

    def _meet(self, rank: int, action: Action) -> _Transfer:
        """The transfer this end belongs to: the n-th one sent is the n-th received."""
        partner = (self.schedule.partners or ())[rank]
        sends = action.kind is _EVICT or action.kind is _RETURN
        sender, receiver = (rank, partner) if sends else (partner, rank)
        met = self.open.setdefault((rank, sender), deque())
        if met:
            transfer = met.popleft()
        else:
            cost = self.costs.stages[action.stage]
            seconds = self.costs.links.link(sender, receiver).seconds(cost.moved_bytes) if cost.transfer_s is None else cost.transfer_s
            transfer = _Transfer(len(self.over), sender, receiver, seconds, {})
            self.over.append(None)
            self.transfers.append(transfer)
            self.open.setdefault((partner, sender), deque()).append(transfer)
        transfer.actions[rank] = action
        return transfer

    def _begin_next(self, sender: int, now: Number) -> None:
        """Let the first of what a sender has posted begin, unless it has, or what it returns has not arrived."""
        queue = self.queues[sender]
        if not queue or queue[0].is_let:
            return
        transfer = queue[0]
        if transfer.behind is not None and self.over[transfer.behind.event] is None:
            return
        transfer.is_let = True
        heapq.heappush(self.ready, (max(transfer.ready, now), transfer.event, *self._ports(sender, transfer.receiver), 0))

    def report(self) -> Simulation:
        moves: list[list[Timed]] = [[] for _ in range(self.schedule.num_ranks)]
        for transfer in self.transfers:
            for rank, action in transfer.actions.items():
                moves[rank].append(Timed(action, transfer.start, self._end(transfer.event)))
        owner, stages = self.schedule.stage_to_rank, self.costs.stages
        reduced = [
            clock + sum(stages[stage].reduction_s for stage, of in enumerate(owner) if of == rank) for rank, clock in enumerate(self.clocks)
        ]
        # The norm of all gradients scales every update, so no rank updates before the last has reduced.
        updates = [sum(stages[stage].optimizer_s for stage, of in enumerate(owner) if of == rank) for rank in range(len(self.clocks))]
        return Simulation(
            schedule=self.schedule,
            costs=self.costs,
            computations=tuple(tuple(row) for row in self.compute),
            transfers=tuple(tuple(sorted(row, key=lambda one: (one.start_s, one.end_s))) for row in moves),
            exposed_s=tuple(self.exposed),
            pipeline_s=max(self.clocks),
            makespan_s=max(reduced) + max(updates),
        )


def _durations(stages: tuple[StageCost, ...]) -> dict[Kind, list[Number]]:
    """Seconds of every kind on every stage. The output layer's and the embedding's backward belong to the input's half."""
    return {
        _FORWARD: [cost.whole_forward_s for cost in stages],
        _BACKWARD: [cost.whole_backward_s for cost in stages],
        _INPUT: [cost.whole_backward_s - (cost.weight_s or 0) for cost in stages],
        _WEIGHT: [cost.weight_s or 0 for cost in stages],
    }
