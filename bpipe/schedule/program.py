"""Programs: what each rank does, instruction by instruction, messages included.

`schedule.lowering.lower` makes programs from a schedule; the deadlock check and the simulator interpret them, and the
executor runs them.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.dependencies import Dependencies
from bpipe.schedule.schedule import Schedule, Slot, computed_together


class Exchange(enum.Enum):
    """Exchange order: when a rank sends and receives what passes between stages, and what it waits for."""

    # Megatron's loop for one stage per rank: between two computations it sends what the first made and receives what
    # the second needs, in one operation where one neighbour is both, and goes on when that is over. A message passes
    # when both ends are there.
    MEGATRON_1F1B = "megatron-1f1b"
    # Megatron's loop for several: right after a computation it sends what that made, in one operation with all that its
    # neighbours send before its next. The ring of neighbours would block itself with the rule above.
    MEGATRON_INTERLEAVED = "megatron-interleaved"
    # The same loop with `--no-overlap-p2p-communication`: between two turns (`schedule.lowering.lower`) it sends
    # what the first made and receives what the second needs, in one operation, and goes on when that is over.
    MEGATRON_TURNS = "megatron-turns"
    # Our executor: a send starts at once and is never waited for; receives are posted one ahead, in the sender's order,
    # and only a computation that needs one waits for it.
    POSTED = "posted"
    # torch.distributed.pipelining's runtime: a send starts at once, a receive is posted where torch lists it
    # (`schedule.lowering.lower`), and only a computation that needs it waits. The messages of two ranks, in both
    # directions, share one queue.
    TORCH = "torch"

    __hash__ = object.__hash__

    @property
    def is_megatron(self) -> bool:
        """Whether messages pass as in one of Megatron's own loops."""
        return self not in (Exchange.POSTED, Exchange.TORCH)

    @property
    def is_batched(self) -> bool:
        """Whether messages pass in batches, in one communicator of all ranks, instead of one for each two ranks."""
        return self in (Exchange.MEGATRON_1F1B, Exchange.MEGATRON_TURNS)

    @property
    def predicted(self) -> Exchange:
        """The exchange order that a prediction assumes.

        By default Megatron's interleaved loop waits for a message only where it needs it, and so does torch's runtime.
        """
        return Exchange.POSTED if self in (Exchange.MEGATRON_INTERLEAVED, Exchange.TORCH) else self


class Message(NamedTuple):
    """A message between ranks; a collective if it has more than two parties or several makers.

    Attributes:
        value: Its number (`schedule.dependencies`).
        made_by: Computations that make it.
        needed_by: Computations that need it.
        parties: Ranks with a part in it, makers first.
    """

    value: int
    made_by: tuple[Action, ...]
    needed_by: tuple[Action, ...]
    parties: tuple[int, ...]

    @property
    def is_collective(self) -> bool:
        return len(self.parties) > 2 or len(self.made_by) > 1

    def __str__(self) -> str:
        makers, takers = ("+".join(map(str, actions)) for actions in (self.made_by, self.needed_by))
        return f"{makers}>{takers}"


class Transfer(NamedTuple):
    """One rank's half of a move of a micro-batch's activations.

    Sender and receiver are the same rank, and there is no other half, if it evicts to its own host memory.
    """

    action: Action
    sender: int
    receiver: int

    @property
    def is_outbound(self) -> bool:
        """Whether this half sends."""
        return self.action.kind is Kind.EVICT or self.action.kind is Kind.RETURN

    def __str__(self) -> str:
        return str(self.action)


class Op(enum.IntEnum):
    """Operation of an instruction. Each kind of transfer has its own: interpreters meet millions of instructions."""

    RUN = 0  # compute
    POST = 1  # be ready to receive a message
    SEND = 2  # let a message go, or this rank's part of one
    WAIT = 3  # go on when it has passed: what was posted has arrived, what was sent need not be kept
    START = 4  # post or send this rank's half of a transfer
    FINISH = 5  # wait for it


class Instruction(NamedTuple):
    """An operation and its operand: a computation, a message, or half of a transfer."""

    op: Op
    operand: Action | Message | Transfer

    def __str__(self) -> str:
        if isinstance(self.operand, Transfer):
            words = {Op.START: "send" if self.operand.is_outbound else "post", Op.FINISH: "wait"}
            return f"{words[self.op]} {self.operand}"
        return f"{self.op.name.lower()} {self.operand}"


class MessageTable:
    """The messages of a schedule's values, made on demand: running millions of instructions needs only numbers."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.dependencies = schedule, Dependencies(schedule.layout, schedule.num_microbatches)
        self._ends: tuple[dict[int, list[Action]], dict[int, list[Action]]] | None = None

    def __getitem__(self, value: int) -> Message:
        if self._ends is None:
            makers, takers = self._ends = {}, {}
            for rank in range(self.schedule.num_ranks):
                for _, action in self.schedule.computations(rank):
                    makers.setdefault(self.dependencies.value_of(action), []).append(action)
                    takers.setdefault(self.dependencies.operand_of(action), []).append(action)
        made_by, needed_by = (tuple(ends.get(value, ())) for ends in self._ends)
        return Message(value, made_by, needed_by, self.dependencies.route(value).parties)


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's instructions in order, packed: the i-th is `ops[i]` with `operands[i]`, a message being its value.

    `starts[k]` is the first instruction of the k-th step, which belongs to column `slots[k]` of the grid. Computations
    directly after each other may overlap.
    """

    rank: int
    ops: bytes
    operands: Sequence[Action | int | Transfer]
    starts: Sequence[int]
    slots: Sequence[int]
    messages: MessageTable

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """Instructions with messages in place of their numbers."""
        pairs = zip(map(Op, self.ops), self.operands, strict=True)
        return tuple(
            Instruction(op, self.messages[operand] if isinstance(operand, int) else operand) for op, operand in pairs
        )

    def slot_of(self, index: int) -> int:
        """Return the column of the grid to which an instruction belongs."""
        return self.slots[bisect_right(self.starts, index) - 1]


class Step(NamedTuple):
    """One computation and the transfers that start around it.

    `compute` is None for the loop's start and its end, the first and last step; `overlapped` is the backward that runs
    together with it.
    """

    compute: Action | None
    before: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()
    overlapped: Action | None = None

    @property
    def computations(self) -> tuple[Action, ...]:
        return computed_together(self.compute, self.overlapped)


def one_by_one(program: Iterable[Step]) -> tuple[Step, ...]:
    """Put the two computations of an overlap one after the other.

    Transfers before both start before the forward, the others after the backward.
    """
    single: list[Step] = []
    for step in program:
        if step.overlapped is None:
            single.append(step)
        else:
            single += (Step(step.compute, step.before), Step(step.overlapped, (), step.after))
    return tuple(single)


def steps(schedule: Schedule, rank: int) -> Iterator[Step]:
    """Yield the rank's slots as steps of an engine. The first is the start of the loop and the last its end.

    A transfer next to a computation starts just before it. A transfer in a bubble slot goes to the *latest hook that is
    not later* than its slot: after the computation before it, or the start of the loop. Starting a half of a transfer
    too early costs nothing (it only posts a receive); starting it late could make its partner wait.

    Transfers after the rank's last computation go to the end of the loop, after its last message to a neighbour. The
    partner reaches its end of these transfers only because of that message. If anything waited for a transfer before
    the message is sent (a queue that all streams share, a synchronising timer), both would wait for ever.
    """
    current = Slot()
    after: tuple[Action, ...] = ()
    for slot in schedule.ranks[rank]:
        if slot.compute is None:
            after += slot.transfers
            continue
        yield Step(current.compute, current.transfers, after, current.overlapped)
        current, after = slot, ()
    yield Step(current.compute, current.transfers, (), current.overlapped)
    yield Step(None, (), after)
