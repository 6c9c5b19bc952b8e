"""Messages between pipeline stages by `torch.distributed` point-to-point operations, gloo and NCCL by the same calls.

Every directed edge between two ranks is a process group of its own, made by all ranks in one order and used once before
the first step. Within an edge both ends issue in the sender's order, so messages match by order alone; two directions
in one communicator would wait for each other. A sender never waits: the tensors are dropped when the program says so,
which is once they have arrived, or before that if a backend knows. What a stage makes has the same shape for every
micro-batch, or for that slice of each, and its first message carries that shape. If shapes may differ, every message
carries its own.

A message that carries its shape passes by way of the hosts. Its receiver does not know the shape, so it cannot post the
receive ahead. If streams share a hardware queue, the sender's next message would wait in it until that is posted, and
so would whatever comes after. Of two neighbours that send to each other at once neither would go on. What passes by way
of the hosts is in no queue. It is slow on a device: the host waits until the device has made the message.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from bpipe.schedule.action import Kind
from bpipe.schedule.hosts import Pair
from bpipe.schedule.program import Message
from bpipe.transport.distributed import (
    Control,
    PairGroups,
    Shapes,
    Subject,
    Works,
    batched,
    check_alike,
    empty,
    name_timeout,
    pair_control,
    pair_groups,
    part,
    shapes_of,
    try_out,
)

# Stage, kind of computation and slice: what these make has the same shape for every micro-batch.
Sort = tuple[int, Kind, int]


@dataclass(frozen=True)
class Edge:
    """This rank's groups with a neighbour: one for each direction, and the hosts' control group."""

    groups: PairGroups
    control: Control

    def close(self) -> None:
        """Destroy the groups after a run that ended well.

        Both ranks call it when their devices are idle, each for its edges in the order in which they were connected.
        """
        part(self.control, [self.groups])

    def abandon(self) -> None:
        """Do nothing: the groups stay."""


def connect_edges(
    pairs: Iterable[Pair],
    backend: str,
    timeout_s: float,
    device: torch.device,
    control_of: Callable[[int, int, float, str], Control | None] = pair_control,
) -> dict[int, Edge]:
    """Return this rank's edges by neighbour.

    Collective over the world: every rank names the same pairs in the same order.
    """
    edges = {}
    for low, high in pairs:
        groups = pair_groups(low, high, backend, timeout_s, "EDGE_", few_units=False)
        control = control_of(low, high, timeout_s, "EDGE_")
        if groups is not None and control is not None:
            try_out(groups, device)
            edges[groups.partner] = Edge(groups, control)
    return edges


@dataclass
class _Inbound:
    """Messages of one neighbour: those that were posted, and of these what is being received, or has come by way of
    the hosts."""

    posted: deque[Message] = field(default_factory=deque)
    shapes: dict[Sort, Shapes] = field(default_factory=dict)
    receiving: dict[int, tuple[tuple[torch.Tensor, ...], Works]] = field(default_factory=dict)
    arrived: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)


class Edges:
    """One rank's messages for one program; the edges may serve several.

    `edges` are by the neighbour's rank in the pipeline. `slices` is the number of slices of a micro-batch, which may
    differ in shape; with `differing` so may micro-batches.
    """

    def __init__(
        self, rank: int, edges: Mapping[int, Edge], device: torch.device, slices: int = 1, differing: bool = False
    ) -> None:
        self._rank = rank
        self._differing = differing
        self._slices = slices
        self._device = device
        self._edges = edges
        self._inbound = {neighbour: _Inbound() for neighbour in edges}
        self._shapes: dict[tuple[int, Sort], Shapes] = {}
        # By message, until it is waited for: what was sent over an edge, and by way of the hosts.
        self._sent: dict[int, Works] = {}
        self._firsts: dict[int, Works] = {}

    def post(self, message: Message) -> None:
        neighbour = self._neighbour(message)
        self._inbound[neighbour].posted.append(message)
        self._receive(neighbour)

    def send(self, message: Message, tensors: tuple[torch.Tensor, ...]) -> None:
        target, sort = self._neighbour(message), self._sort(message)
        groups = self._edges[target].groups
        # Some backends know that a send is over without being waited for: drop its tensors, oldest first.
        while self._sent and self._sent[oldest := next(iter(self._sent))].completed:
            del self._sent[oldest]
        carries_shape = self._differing or (target, sort) not in self._shapes
        if not self._differing:
            shapes = shapes_of(tensors)
            check_alike(self._rank, message, shapes, self._shapes.setdefault((target, sort), shapes))
        parts = [tensor.detach().contiguous() for tensor in tensors]
        with name_timeout(groups.timeout_s):
            if carries_shape:
                self._firsts[message.value] = self._edges[target].control.send_tensors(Subject.FIRST, parts)
            else:
                self._sent[message.value] = batched(dist.isend, parts, groups.partner, groups.sending)

    def wait(self, message: Message) -> tuple[torch.Tensor, ...]:
        neighbour = self._neighbour(message)
        inbound, timeout_s = self._inbound[neighbour], self._edges[neighbour].groups.timeout_s
        if message.parties[0] == self._rank:
            sent = self._firsts.pop(message.value, None) or self._sent.pop(message.value, None)
            if sent is not None:
                with name_timeout(timeout_s):
                    sent.wait()
            return ()
        while message.value not in inbound.receiving and message.value not in inbound.arrived:
            self._take_first(neighbour, message)
        if message.value in inbound.arrived:
            return inbound.arrived.pop(message.value)
        tensors, works = inbound.receiving.pop(message.value)
        with name_timeout(timeout_s):
            works.wait()
        return tensors

    def _neighbour(self, message: Message) -> int:
        if message.is_collective:
            raise ValueError(
                f"{message} involves {len(message.parties)} ranks, but an edge has two ends: use "
                "`transport.collectives` for it"
            )
        maker, taker = message.parties
        return taker if maker == self._rank else maker

    def _sort(self, message: Message) -> Sort:
        (maker,) = message.made_by
        return maker.stage, maker.kind, maker.microbatch % self._slices

    def _receive(self, neighbour: int) -> None:
        """Receive what was posted, up to the first message whose shape is not known."""
        inbound, groups = self._inbound[neighbour], self._edges[neighbour].groups
        while inbound.posted and self._sort(inbound.posted[0]) in inbound.shapes:
            message = inbound.posted.popleft()
            tensors = empty(inbound.shapes[self._sort(message)], self._device)
            with name_timeout(groups.timeout_s):
                inbound.receiving[message.value] = (
                    tensors,
                    batched(dist.irecv, tensors, groups.partner, groups.receiving),
                )

    def _take_first(self, neighbour: int, needed: Message) -> None:
        """Wait for the next posted message, which carries its shape, and receive what was posted after it.

        Raises ValueError if there is none, so that `needed` was never posted.
        """
        inbound, edge = self._inbound[neighbour], self._edges[neighbour]
        if not inbound.posted:
            raise ValueError(f"rank {self._rank} waits for {needed}, which it never posted")
        message = inbound.posted.popleft()
        with name_timeout(edge.groups.timeout_s):
            tensors = edge.control.receive_tensors(Subject.FIRST)
        if not self._differing:
            inbound.shapes[self._sort(message)] = shapes_of(tensors)
        inbound.arrived[message.value] = tuple(tensor.to(self._device) for tensor in tensors)
        self._receive(neighbour)
