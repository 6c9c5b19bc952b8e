"""Messages of all shards of the vocabulary by `torch.distributed` collectives, gloo and NCCL by the same calls.

    one rank makes, all need it     broadcast     the same tensors
    all make a part, all need it    all-gather    of each tensor all parts, in a new leading dimension
    all make a part, one needs it   reduction     of each tensor the sum, in the type in which it was sent
    and a stage needs it, too       both          what was gathered, and for that stage the sum of what each rank makes of it

If one rank makes a message for all, its first one carries the shapes and passes by way of the hosts (see `edges`).

Every sort of collectives has a process group of its own, made by all ranks in one order and used once before the first
step. Within a sort all ranks issue theirs in one order, that of their S and T, which is the same on all ranks. The
order among sorts may differ between ranks, so in one communicator they would wait for each other. Only a rank that
needs the result of a collective waits for it.

Of a collective in two steps (algorithm 2) the second begins when the first is over, on a lane next to the computation.
It cannot block: a lane waits only for first steps, and for the lanes of other ranks, all in one order, and no first
step waits for a lane. If streams share a queue, it delays what was issued after it, as if S waited for those of all
ranks: slow, and `schedule.check.deadlock` takes it into account. If T did the second step, the last stage would wait
until every rank has come to its T: in 1F1B with p = 8, m = 64 that is 11 % of an iteration with short shards, 3 % with
S and T of a quarter of a forward, nothing from half a forward on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from bpipe.schedule.action import SHARDS, Action, Kind
from bpipe.schedule.program import Message
from bpipe.transport.distributed import (
    Control,
    Shapes,
    Subject,
    Works,
    check_alike,
    empty,
    gather_into,
    in_one_call,
    name_timeout,
    new_group,
    shapes_of,
)
from bpipe.transport.edges import Edges
from bpipe.transport.streams import CopyLane, Pending

Tensors = tuple[torch.Tensor, ...]

# The computations whose results are sorts of collectives: for the output layer's shards, and for the embedding's.
SORTS = (Kind.FORWARD, Kind.SHARD_FORWARD, Kind.SHARD_BACKWARD)
INPUT_SORTS = (Kind.INPUT_FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)
# One rank makes these for all: the subject of the first message.
_FIRST = {
    Kind.FORWARD: Subject.FIRST_OUTPUT,
    Kind.BACKWARD: Subject.FIRST_GRADIENT,
    Kind.BACKWARD_INPUT: Subject.FIRST_SPLIT_GRADIENT,
}
# The rank that makes a message, or the first such rank, the kind of computation, and the slice of a micro-batch.
Sort = tuple[int, Kind, int]


@dataclass(frozen=True)
class SharedGroups:
    """This rank's groups."""

    pipeline: tuple[int, ...]
    """Global ranks of its pipeline, by their places in it."""

    of: Mapping[Kind, dist.ProcessGroup]
    """By the kind of computation whose results they carry."""

    hosts: Mapping[int, Control]
    """Control messages with each other rank, by its place in the pipeline."""

    timeout_s: float | None = None
    """Seconds after which what waits in them fails, if known."""

    control: dist.ProcessGroup | None = None
    """The group of `hosts`."""

    def close(self) -> None:
        """Destroy the groups after a run that ended well.

        Every rank that shares them calls it when its device is idle: destroying a communicator ends what is still
        running in it.
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

    `sharing`: the ranks that hold one vocabulary together. If tensor parallelism splits it, too, these are ranks of
    several pipelines: statistics are then gathered from all of them, and everything else is a pipeline's own.
    """
    rank, own = dist.get_rank(), {}
    for kind in sorts:
        for ranks in sharing if kind is Kind.SHARD_FORWARD else pipelines:
            group = new_group(ranks, backend, timeout_s, f"SHARDS_{kind.value}_{ranks[0]}_{ranks[-1]}", few_units=False)
            if rank in ranks:
                own[kind] = group
    hosts: dict[int, Control] = {}
    control = None
    for ranks in pipelines:
        group = new_group(ranks, "gloo", timeout_s, f"SHARDS_CONTROL_{ranks[0]}_{ranks[-1]}")
        if rank in ranks:
            control, hosts = group, {place: Control(other, group) for place, other in enumerate(ranks) if other != rank}
    groups = SharedGroups(next(ranks for ranks in pipelines if rank in ranks), own, hosts, timeout_s, control)
    # A network that does not connect fails here and not in the middle of a step.
    for group in own.values():
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return groups


@dataclass(frozen=True)
class SecondStep:
    """Step after an all-gather whose result a stage needs, too: `late(microbatch, gathered)` makes this rank's part of
    a sum, on `lane`."""

    late: Callable[[int, Tensors], Tensors]
    lane: CopyLane


class _UnderWay(NamedTuple):
    """A collective, its result on this rank, and of one in two steps the second step and its result."""

    works: Works
    result: Tensors
    later: Pending | None = None
    later_result: Sequence[torch.Tensor] = ()


class Collectives:
    """One rank's messages for one program: those with two ends pass over `edges`, all others here. The groups may serve
    several programs.

    `rank_of(action)` is where a computation runs. `slices` is the number of slices of a micro-batch, which may differ in
    shape.
    """

    def __init__(
        self,
        rank: int,
        groups: SharedGroups,
        rank_of: Callable[[Action], int],
        device: torch.device,
        second: SecondStep | None = None,
        slices: int = 1,
        edges: Edges | None = None,
    ) -> None:
        self._slices, self._edges = slices, edges
        self._rank, self._groups, self._rank_of, self._device, self._second = rank, groups, rank_of, device, second
        # Errors on the lane, which otherwise only the rank that needs the sum would notice.
        self._errors: list[Exception] = []
        self._shapes: dict[Sort, Shapes] = {}
        # Messages that were posted before their shape was known; and by message, what passes by way of the hosts.
        self._posted: set[int] = set()
        self._firsts: dict[int, list[Works]] = {}
        self._passing: dict[int, _UnderWay] = {}

    def post(self, message: Message) -> None:
        """Be ready for a broadcast."""
        if self._edges is not None and not message.is_collective:
            self._edges.post(message)
        elif self._sort(message) in self._shapes:
            self._receive(message)
        else:
            self._posted.add(message.value)

    def send(self, message: Message, tensors: Tensors) -> None:
        """Send this rank's part, which must not be used again: a reduction may write over it."""
        if self._edges is not None and not message.is_collective:
            self._edges.send(message, tensors)
            return
        self._raise_errors()
        # Some backends know what is over without being waited for: drop it if nobody here needs the result.
        self._passing = {
            value: passing for value, passing in self._passing.items() if passing.result or not passing.works.completed
        }
        sort, parts = self._sort(message), tuple(tensor.detach().contiguous() for tensor in tensors)
        shapes = shapes_of(parts)
        first = sort not in self._shapes
        check_alike(self._rank, message, shapes, self._shapes.setdefault(sort, shapes))
        if len(message.made_by) == 1:
            if first:
                hosts = [self._groups.hosts[place] for place in message.parties if place != self._rank]
                with name_timeout(self._groups.timeout_s):
                    self._firsts[message.value] = [host.send_tensors(_FIRST[_kind(message)], parts) for host in hosts]
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
        """Wait for a message and return its result: nothing for a broadcast that this rank sent or a reduction for
        another rank."""
        if self._edges is not None and not message.is_collective:
            return self._edges.wait(message)
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
        # What a backend knows to be over may have been dropped.
        passing = self._passing.pop(message.value, None)
        if passing is None:
            return ()
        self._raise_errors()
        with name_timeout(self._groups.timeout_s):
            passing.works.wait()
            if passing.later is not None:
                passing.later.wait()
        return *passing.result, *passing.later_result

    def _raise_errors(self) -> None:
        if self._errors:
            raise self._errors[0]

    def _sort(self, message: Message) -> Sort:
        first = message.made_by[0]
        return self._rank_of(first), first.kind, first.microbatch % self._slices

    def _receives(self, message: Message) -> bool:
        return len(message.made_by) == 1 and self._rank_of(message.made_by[0]) != self._rank

    def _take_first(self, message: Message) -> Tensors:
        """Wait on the host for the first message of a sort."""
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
                in_one_call(group, tensors, lambda tensor: dist.broadcast(tensor, source, group=group, async_op=True)),
                tensors,
            )

    def _reduce(self, message: Message, parts: Tensors, taker: int, kind: Kind | None = None) -> Works:
        target, group = self._groups.pipeline[taker], self._groups.of[kind or _kind(message)]
        with name_timeout(self._groups.timeout_s):
            return Works([dist.reduce(part, target, group=group, async_op=True) for part in parts], parts)

    def _gather(self, message: Message, parts: Tensors) -> _UnderWay:
        group = self._groups.of[_kind(message)]
        gathered = tuple(part.new_empty((group.size(), *part.shape)) for part in parts)
        with name_timeout(self._groups.timeout_s):
            works = [
                gather_into(whole, part[None], group=group, async_op=True)
                for whole, part in zip(gathered, parts, strict=True)
            ]
        return _UnderWay(Works(works, [*parts, *gathered]), gathered)

    def _gather_and_reduce(self, message: Message, parts: Tensors, taker: int) -> _UnderWay:
        second, gathering = self._second, self._gather(message, parts)
        assert second is not None, f"{message} is in two steps, but there is no second step"
        (microbatch,) = {action.microbatch for action in message.made_by}
        total: list[torch.Tensor] = []

        def job() -> None:
            try:
                late = second.late(microbatch, gathering.result)
                # With algorithm 2 no other collective is in this group.
                self._reduce(message, late, taker, Kind.SHARD_BACKWARD).wait()
            except Exception as error:
                self._errors.append(error)
                raise
            if taker == self._rank:
                total.extend(late)

        # Waiting for works drops them, so the lane has its own.
        later = second.lane.run(job, [gathering.works.again()])
        return gathering._replace(later=later, later_result=total) if taker == self._rank else gathering


def _kind(message: Message) -> Kind:
    return message.made_by[0].kind
