"""Carry what all shards of the vocabulary have a part in by `torch.distributed` collectives, gloo and NCCL by the same
calls.

In: this rank's groups, and a Program's messages in its order. Out: what they carry, or what was made of it. Knows no
schedule.

    one rank makes, all need it     broadcast     the same tensors
    all make a part, all need it    all-gather    of each tensor all parts, in a dimension more in front
    all make a part, one needs it   reduction     of each tensor the sum, in the type in which it was sent
    and a stage needs it, too       both          what was gathered, and for that stage the sum of what each rank makes of it

What one rank makes for all has a shape that the others learn of its first, which passes by way of the hosts (see
`edges`).

Every sort of collectives has a process group of its own, made by all ranks in one order and used once before the first
step. Within a sort all ranks issue theirs in one order, that of their S and T, which are in one order on all ranks;
sorts may stand in another order to each other on every rank, and in one communicator would wait for each other. Nobody
waits for a collective but who needs what comes of it.

Of those in two steps (algorithm 2) the second begins when the first is over, on a lane beside the computation. It
cannot block: a lane waits for first steps alone, and for the lanes of other ranks, all in one order, and no first step
waits for a lane. Where streams share a queue it holds up what was issued behind it, as if S waited for those of all
ranks: slow, and `schedule.check.deadlock` sees whether it blocks. Were the second step left to T, which waits for the first
anyway, the last stage would wait until every rank has come to its T: in 1F1B with p = 8, m = 64 that is 11 % of an
iteration with short shards, 3 % with S and T of a quarter of a forward, nothing from half a forward on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from bpipe.schedule.action import SHARDS, Action, Kind
from bpipe.schedule.program import Message
from bpipe.transport.base import Pending
from bpipe.transport.control import Control, SentMessage, Subject
from bpipe.transport.distributed import Works, gather_into, in_one_call, name_timeout, new_group
from bpipe.transport.edges import Edges
from bpipe.transport.lanes import CopyLane
from bpipe.transport.shapes import Shapes, check_alike, empty, shapes_of

Tensors = tuple[torch.Tensor, ...]

# What makes what a sort of collectives carries: of the output layer's shards, and of the embedding's.
SORTS = (Kind.FORWARD, Kind.SHARD_FORWARD, Kind.SHARD_BACKWARD)
INPUT_SORTS = (Kind.INPUT_FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)
# Of these one rank makes what all need.
_FIRST = {
    Kind.FORWARD: Subject.FIRST_OUTPUT,
    Kind.BACKWARD: Subject.FIRST_GRADIENT,
    Kind.BACKWARD_INPUT: Subject.FIRST_SPLIT_GRADIENT,
}
# The rank that makes a message, or the first of them, what it computes for it, and of which slice of a micro-batch.
Sort = tuple[int, Kind, int]


@dataclass(frozen=True)
class SharedGroups:
    """This rank's groups by what makes what they carry.

    `pipeline` are the global ranks of its pipeline, by their places in it.

    `hosts` are the control groups with each of the others, by its place.
    """

    pipeline: tuple[int, ...]
    of: Mapping[Kind, dist.ProcessGroup]
    hosts: Mapping[int, Control]
    timeout_s: float | None = None
    # The group of `hosts`.
    control: dist.ProcessGroup | None = None

    def close(self) -> None:
        """Destroy the groups after a run that ended well. Every rank that shares them calls it.

        The device must have done what it was given: a destroyed communicator ends the rest.
        """
        dist.barrier(self.control)
        for group in (*self.of.values(), self.control):
            dist.destroy_process_group(group)

    def abandon(self) -> None:
        """Do nothing: the groups stay."""


def connect_shared(
    pipelines: Sequence[tuple[int, ...]],
    sharing: Sequence[tuple[int, ...]],
    backend: str,
    timeout_s: float,
    device: torch.device,
    sorts: Sequence[Kind] = SORTS,
) -> SharedGroups:
    """Create groups for the shared vocabulary.

    Collective over the world: every rank names the same groups in the same order.

    `sharing`: the ranks that hold one vocabulary together. Where tensor parallelism splits it, too, these are ranks of
    several pipelines: statistics are then gathered from all of them, and everything else is a pipeline's own.
    """
    rank, found = dist.get_rank(), {}
    for kind in sorts:
        for ranks in sharing if kind is Kind.SHARD_FORWARD else pipelines:
            group = new_group(ranks, backend, timeout_s, f"SHARDS_{kind.value}_{ranks[0]}_{ranks[-1]}", few_units=False)
            if rank in ranks:
                found[kind] = group
    hosts: dict[int, Control] = {}
    control = None
    for ranks in pipelines:
        group = new_group(ranks, "gloo", timeout_s, f"SHARDS_CONTROL_{ranks[0]}_{ranks[-1]}")
        if rank in ranks:
            control, hosts = group, {place: Control(other, group) for place, other in enumerate(ranks) if other != rank}
    groups = SharedGroups(next(ranks for ranks in pipelines if rank in ranks), found, hosts, timeout_s, control)
    # A network that does not connect fails here and not in the middle of a step.
    for group in found.values():
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return groups


@dataclass(frozen=True)
class SecondStep:
    """Step after a gathering that a stage needs, too: `late(microbatch, gathered)` is this rank's part of a sum,
    made on `lane`."""

    late: Callable[[int, Tensors], Tensors]
    lane: CopyLane


class _UnderWay(NamedTuple):
    """`more` comes behind `made`, once `later` is over; on a rank that does not need it neither is waited for."""

    works: Works
    made: Tensors
    later: Pending | None = None
    more: Sequence[torch.Tensor] = ()


class Collectives:
    """One rank's collectives for one program; the groups may serve several.

    `rank_of(action)` is where a computation runs. A micro-batch goes in so many `slices`, which may differ in shape.
    """

    def __init__(
        self,
        rank: int,
        groups: SharedGroups,
        rank_of: Callable[[Action], int],
        device: torch.device,
        second: SecondStep | None = None,
        slices: int = 1,
    ) -> None:
        self._slices = slices
        self._rank, self._groups, self._rank_of, self._device, self._second = rank, groups, rank_of, device, second
        # What broke on the lane, of which only the rank that needs the sum would hear.
        self._broken: list[Exception] = []
        self._shapes: dict[Sort, Shapes] = {}
        # What was posted of which the shape is not known; and by message, what passes by way of the hosts.
        self._posted: set[int] = set()
        self._firsts: dict[int, list[SentMessage]] = {}
        # By message: what carries it, and what will have come of it here.
        self._passing: dict[int, _UnderWay] = {}

    def post(self, message: Message) -> None:
        """Be ready for a broadcast."""
        if self._sort(message) in self._shapes:
            self._receive(message)
        else:
            self._posted.add(message.value)

    def send(self, message: Message, tensors: Tensors) -> None:
        """Let this rank's part go: it is not to be used again, and a reduction may write over it."""
        self._raise_broken()
        # Some backends know what is over without being waited for; what nobody here needs may go.
        self._passing = {value: one for value, one in self._passing.items() if one.made or not one.works.completed}
        sort, parts = self._sort(message), tuple(tensor.detach().contiguous() for tensor in tensors)
        shapes = shapes_of(parts)
        first = sort not in self._shapes
        check_alike(self._rank, message, shapes, self._shapes.setdefault(sort, shapes))
        if len(message.made_by) == 1:
            if first:
                self._firsts[message.value] = self._by_hosts(message, parts)
            else:
                self._passing[message.value] = _UnderWay(self._broadcast(message, parts), ())
            return
        takers = {self._rank_of(action) for action in message.needed_by}
        stages = {self._rank_of(action) for action in message.needed_by if action.kind not in SHARDS}
        if len(takers) > 1 and stages:
            (taker,) = stages
            self._passing[message.value] = self._gather_and_reduce(message, parts, taker)
        elif len(takers) == 1:
            (taker,) = takers
            self._passing[message.value] = _UnderWay(
                self._reduce(message, parts, taker), parts if taker == self._rank else ()
            )
        else:
            self._passing[message.value] = self._gather(message, parts)

    def wait(self, message: Message) -> Tensors:
        """Wait for a message and return what came of it: nothing for a broadcast that this rank sent or a reduction
        for another."""
        if message.value in self._firsts:
            with name_timeout(self._groups.timeout_s):
                for sent in self._firsts.pop(message.value):
                    sent.wait()
            return ()
        if message.value not in self._passing and self._receives(message):
            if message.value not in self._posted:
                raise ValueError(f"rank {self._rank} waits for {message}, which it never posted")
            self._posted.remove(message.value)
            if self._sort(message) not in self._shapes:
                return self._take_first(message)
            self._receive(message)
        # What a backend knows to be over may be gone already.
        passing = self._passing.pop(message.value, None)
        if passing is None:
            return ()
        self._raise_broken()
        with name_timeout(self._groups.timeout_s):
            passing.works.wait()
            if passing.later is not None:
                passing.later.wait()
        return *passing.made, *passing.more

    def _raise_broken(self) -> None:
        if self._broken:
            raise self._broken[0]

    def _sort(self, message: Message) -> Sort:
        first = message.made_by[0]
        return self._rank_of(first), first.kind, first.microbatch % self._slices

    def _receives(self, message: Message) -> bool:
        return len(message.made_by) == 1 and self._rank_of(message.made_by[0]) != self._rank

    def _by_hosts(self, message: Message, parts: Tensors) -> list[SentMessage]:
        others = [place for place in message.parties if place != self._rank]
        with name_timeout(self._groups.timeout_s):
            return [self._groups.hosts[place].send_tensors(_FIRST[_kind(message)], parts) for place in others]

    def _take_first(self, message: Message) -> Tensors:
        """Take the first message of a sort, for which the host waits."""
        with name_timeout(self._groups.timeout_s):
            tensors = self._groups.hosts[self._rank_of(message.made_by[0])].receive_tensors(_FIRST[_kind(message)])
        self._shapes[self._sort(message)] = shapes_of(tensors)
        return tuple(tensor.to(self._device) for tensor in tensors)

    def _receive(self, message: Message) -> None:
        tensors = empty(self._shapes[self._sort(message)], self._device)
        self._passing[message.value] = _UnderWay(self._broadcast(message, tensors), tensors)

    def _broadcast(self, message: Message, tensors: Sequence[torch.Tensor]) -> Works:
        (maker,) = message.made_by
        source, group = self._groups.pipeline[self._rank_of(maker)], self._groups.of[_kind(message)]
        with name_timeout(self._groups.timeout_s):
            return Works(
                in_one_call(group, tensors, lambda one: dist.broadcast(one, source, group=group, async_op=True)),
                tensors,
            )

    def _reduce(self, message: Message, parts: Tensors, taker: int, kind: Kind | None = None) -> Works:
        target, group = self._groups.pipeline[taker], self._groups.of[kind or _kind(message)]
        with name_timeout(self._groups.timeout_s):
            return Works([dist.reduce(part, target, group=group, async_op=True) for part in parts], parts)

    def _gather(self, message: Message, parts: Tensors) -> _UnderWay:
        group = self._groups.of[_kind(message)]
        everybody = tuple(part.new_empty((group.size(), *part.shape)) for part in parts)
        with name_timeout(self._groups.timeout_s):
            works = [
                gather_into(whole, part[None], group=group, async_op=True)
                for whole, part in zip(everybody, parts, strict=True)
            ]
        return _UnderWay(Works(works, [*parts, *everybody]), everybody)

    def _gather_and_reduce(self, message: Message, parts: Tensors, taker: int) -> _UnderWay:
        second, gathering = self._second, self._gather(message, parts)
        assert second is not None, f"{message} is in two steps, and nobody has said what the second is made of"
        (microbatch,) = {action.microbatch for action in message.made_by}
        total: list[torch.Tensor] = []

        def job() -> None:
            try:
                made = second.late(microbatch, gathering.made)
                # No other collective is in this group where these are.
                self._reduce(message, made, taker, Kind.SHARD_BACKWARD).wait()
            except Exception as error:
                self._broken.append(error)
                raise
            if taker == self._rank:
                total.extend(made)

        # Who waits for works lets go of them: the lane has its own.
        later = second.lane.run(job, [gathering.works.again()])
        return gathering._replace(later=later, more=total) if taker == self._rank else gathering


class EdgesAndCollectives:
    """One rank's messages of both sorts: those with two ends over edges, all others as collectives."""

    def __init__(self, edges: Edges, collectives: Collectives) -> None:
        self._edges, self._collectives = edges, collectives

    def post(self, message: Message) -> None:
        self._by(message).post(message)

    def send(self, message: Message, tensors: Tensors) -> None:
        self._by(message).send(message, tensors)

    def wait(self, message: Message) -> Tensors:
        return self._by(message).wait(message)

    def _by(self, message: Message) -> Edges | Collectives:
        return self._collectives if message.is_collective else self._edges


def _kind(message: Message) -> Kind:
    return message.made_by[0].kind
