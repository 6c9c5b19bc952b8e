"""Carry the messages between pipeline stages by `torch.distributed` point-to-point operations, gloo and NCCL by the
same calls.

In: the groups of this rank with its neighbours, and a Program's messages in its order. Out: the tensors that they
carry. Knows no schedule.

Every directed edge between two ranks is a process group of its own, made by all ranks in one order and used once before
the first step. Within an edge both ends issue in the sender's order, so messages match by order alone; two directions
in one communicator would wait for each other. A sender never waits: what it sent is let go when the program says so,
which is once it has arrived, or before that where a backend knows. What a stage makes has the same shape for every
micro-batch, so it is announced once: in front of the first message of its sort goes another that says how many tensors
there are, of which types and shapes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from bpipe.ir.action import Kind
from bpipe.ir.program import Message
from bpipe.transport.announcement import ANNOUNCEMENT, Shapes, announcement, check_alike, empty, read, shapes_of
from bpipe.transport.distributed import PairGroups, Works, batched, name_timeout, pair_groups, try_out

# What a stage makes in its forward, or in its backward: the same for every micro-batch.
Sort = tuple[int, Kind]


def connect_edges(
    pairs: Iterable[tuple[int, int]], backend: str, timeout_s: float, device: torch.device
) -> dict[int, PairGroups]:
    """Return this rank's groups by neighbour, one a direction.

    Collective over the world: every rank names the same pairs in the same order.
    """
    found = {}
    for low, high in pairs:
        groups = pair_groups(low, high, backend, timeout_s, "EDGE_", few_units=False)
        if groups is not None:
            try_out(groups, device)
            found[groups.partner] = groups
    return found


@dataclass
class _Inbound:
    """What comes from one neighbour: what was posted, and of that what is being received, into memory of its shape."""

    groups: PairGroups
    posted: deque[Message] = field(default_factory=deque)
    announcement: tuple[torch.Tensor, Works] | None = None
    shapes: dict[Sort, Shapes] = field(default_factory=dict)
    receiving: dict[int, tuple[tuple[torch.Tensor, ...], Works]] = field(default_factory=dict)


class Edges:
    """One rank's messages for one program; the groups may serve several."""

    def __init__(self, rank: int, groups: Mapping[int, PairGroups], device: torch.device) -> None:
        """`groups` are by the neighbour's rank in the pipeline."""
        self._rank = rank
        self._device = device
        self._inbound = {neighbour: _Inbound(both) for neighbour, both in groups.items()}
        self._announced: dict[tuple[int, Sort], Shapes] = {}
        # By message, what carries it and keeps its tensors, until it is waited for.
        self._sent: dict[int, list[Works]] = {}

    def post(self, message: Message) -> None:
        inbound = self._inbound[self._neighbour(message)]
        inbound.posted.append(message)
        self._receive(inbound, None)

    def send(self, message: Message, tensors: tuple[torch.Tensor, ...]) -> None:
        target, sort = self._neighbour(message), _sort(message)
        groups = self._inbound[target].groups
        self._let_go()
        shapes = shapes_of(tensors)
        parts = [[tensor.detach().contiguous() for tensor in tensors]]
        if (target, sort) not in self._announced:
            self._announced[target, sort] = shapes
            parts.insert(0, [announcement(message, shapes).to(self._device)])
        check_alike(self._rank, message, shapes, self._announced[target, sort])
        with name_timeout(groups.timeout_s):
            self._sent[message.value] = [batched(dist.isend, part, groups.partner, groups.sending) for part in parts]

    def wait(self, message: Message) -> tuple[torch.Tensor, ...]:
        inbound = self._inbound[self._neighbour(message)]
        if message.parties[0] == self._rank:
            with name_timeout(inbound.groups.timeout_s):
                for works in self._sent.pop(message.value, ()):
                    works.wait()
            return ()
        if message.value not in inbound.receiving:
            self._receive(inbound, message)
        tensors, works = inbound.receiving.pop(message.value)
        with name_timeout(inbound.groups.timeout_s):
            works.wait()
        return tensors

    def _let_go(self) -> None:
        """Some backends know that a send is over without being waited for; what it carried may go, oldest first."""
        while self._sent:
            oldest = next(iter(self._sent))
            if not all(works.completed for works in self._sent[oldest]):
                return
            del self._sent[oldest]

    def _neighbour(self, message: Message) -> int:
        if message.is_collective:
            raise ValueError(
                f"{message} is of {len(message.parties)} ranks together and an edge has two ends: carry it by "
                f"`transport.collectives`"
            )
        maker, taker = message.parties
        return taker if maker == self._rank else maker

    def _receive(self, inbound: _Inbound, needed: Message | None) -> None:
        """Receive what was posted, as far as its shapes are known; for what is `needed`, wait until they are."""
        groups = inbound.groups
        while inbound.posted:
            message, sort = inbound.posted[0], _sort(inbound.posted[0])
            if sort not in inbound.shapes:
                if inbound.announcement is None:
                    numbers = torch.empty(ANNOUNCEMENT, dtype=torch.int64, device=self._device)
                    with name_timeout(groups.timeout_s):
                        inbound.announcement = numbers, batched(dist.irecv, [numbers], groups.partner, groups.receiving)
                if needed is None:
                    return
                numbers, works = inbound.announcement
                with name_timeout(groups.timeout_s):
                    works.wait()
                inbound.shapes[sort], inbound.announcement = read(numbers), None
            inbound.posted.popleft()
            tensors = empty(inbound.shapes[sort], self._device)
            with name_timeout(groups.timeout_s):
                inbound.receiving[message.value] = (
                    tensors,
                    batched(dist.irecv, tensors, groups.partner, groups.receiving),
                )
            if message == needed:
                needed = None
        if needed is not None:
            raise ValueError(f"rank {self._rank}: waits for {needed}, which it never posted")


def _sort(message: Message) -> Sort:
    (maker,) = message.made_by
    return maker.stage, maker.kind
