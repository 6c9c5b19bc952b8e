"""Run one rank's program: compute, send what other ranks need, keep what stays here.

A computation runs once its own input is there, and its outputs are sent at once: there is no other wait between two
computations. What stays on the rank, as between two stages that are both here, is no message. The engine starts
transfers around the computations by the same schedule; without one nothing moves.

Every rank that makes a part of a collective sends it right after its computation, so that all ranks issue the
collectives of one sort in one order: that of their S and T, which by the schedule's rules is the same on every rank.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from bpipe.runtime import RuntimeFault, TransferError
from bpipe.runtime.stage import Messages, Shards, Stage, Tensors
from bpipe.schedule.action import SHARDS, Action, Kind
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.hosts import Pair
from bpipe.schedule.lowering.lower import lower_as_run
from bpipe.schedule.program import Exchange, Instruction, Message, Op
from bpipe.schedule.schedule import Schedule


class ComputationHooks(Protocol):
    """Called around the computations of an iteration: an engine, or an observer."""

    def begin(self) -> None: ...

    def before(self, op: Action) -> None: ...

    def after(
        self, op: Action, outputs: Sequence[torch.Tensor | None] = (), inputs: Sequence[torch.Tensor | None] = ()
    ) -> None: ...

    def sent(self, op: Action) -> None: ...

    def communicated(self) -> None: ...

    def end(self) -> None: ...


def neighbours(schedule: Schedule) -> list[Pair]:
    """Return every two ranks between which messages pass, the lower one first; the same list on every rank."""
    dependencies = Dependencies(schedule.layout, schedule.num_microbatches)
    parties = {dependencies.route(value).parties for value in range(dependencies.num_values)}
    return sorted({(min(both), max(both)) for both in parties if len(both) == 2})


class Executor:
    """One rank's program over real tensors, iteration after iteration.

    Args:
        schedule: The schedule.
        rank: This rank in it.
        stage: Computes its stages.
        messages: Carry tensors to other ranks and back.
        shards: Computes its shard of the output layer, if it has one.
        inputs: Computes its shard of the embedding, if it has one.

    Raises:
        ValueError: For a computation that nothing here can run.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stage: Stage,
        messages: Messages,
        shards: Shards | None = None,
        inputs: Shards | None = None,
    ) -> None:
        self.schedule, self.rank = schedule, rank
        self._dependencies = Dependencies(schedule.layout, schedule.num_microbatches)
        self._stage, self._messages = stage, messages
        self.program = program = lower_as_run(schedule, Exchange.POSTED)[rank]
        self._instructions = [
            instruction
            for instruction in program.instructions
            if instruction.op is Op.RUN or isinstance(instruction.operand, Message)
        ]
        # The last instruction that computes or sends.
        self._last = max(
            (number for number, (op, _) in enumerate(self._instructions) if op in (Op.RUN, Op.SEND)), default=-1
        )
        self._sent = _sent_with(self._instructions)
        self._compute: dict[Kind, Callable[[Action, Tensors], Tensors]] = {
            Kind.FORWARD: stage.forward,
            Kind.BACKWARD: stage.backward,
            Kind.BACKWARD_INPUT: stage.backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
        }
        if shards is not None:
            self._compute |= {Kind.SHARD_FORWARD: shards.forward, Kind.SHARD_BACKWARD: shards.backward}
        if inputs is not None:
            self._compute |= {Kind.INPUT_FORWARD: inputs.forward, Kind.INPUT_BACKWARD: inputs.backward}
        computations = [operand for _, operand in self._instructions if isinstance(operand, Action)]
        for action in computations:
            if action.kind not in self._compute:
                raise ValueError(f"rank {rank}: {action} is not a computation of a stage, so nothing can run it")
        # By a value's number: its tensors until they are used; how often this rank computes with it, and how often
        # still in this iteration.
        self._values: dict[int, Tensors] = {}
        self._num_uses = Counter(map(self._dependencies.operand_of, computations))
        self._left: Counter[int] = Counter()
        # Collectives that have passed: each rank with a part in one waits for it where it is used, and at the end.
        self._passed: set[int] = set()

    def run(self, calls: ComputationHooks | None = None) -> None:
        """Run one iteration."""
        for _ in self.walk(calls):
            pass

    def walk(self, calls: ComputationHooks | None = None) -> Iterator[Instruction]:
        """Run one iteration, pausing before each instruction until the next is asked for, so that ranks can take
        turns in one thread."""
        self._values.clear()
        self._passed.clear()
        self._left = self._num_uses.copy()
        if calls:
            calls.begin()
        for number, instruction in enumerate(self._instructions):
            yield instruction
            self._carry_out(instruction, calls)
            if calls and number in self._sent:
                calls.sent(self._sent[number])
            if calls and number == self._last:
                calls.communicated()
        if calls:
            calls.end()
        if self._values:
            left = ", ".join(self._dependencies.describe(value) for value in self._values)
            raise RuntimeFault(f"rank {self.rank}: nothing used {left}")

    def _carry_out(self, instruction: Instruction, calls: ComputationHooks | None) -> None:
        op, operand = instruction
        if isinstance(operand, Action):
            self._run(operand, calls)
            return
        assert isinstance(operand, Message)
        if op is Op.SEND:
            passing = self._values[operand.value] if self._keeps(operand) else self._take(operand.value, operand)
            self._pass("could not be sent", operand, lambda: self._messages.send(operand, passing))
        elif op is Op.POST:
            self._pass("could not be posted", operand, lambda: self._messages.post(operand))
        elif operand.value not in self._passed:
            arrived = self._pass("did not pass", operand, lambda: self._messages.wait(operand))
            if operand.is_collective:
                self._passed.add(operand.value)
            if self._num_uses[operand.value] and not self._keeps(operand):
                self._values[operand.value] = arrived

    def _keeps(self, message: Message) -> bool:
        """Whether this rank alone makes the value for all, and needs it too."""
        return len(message.made_by) == 1 and message.parties[0] == self.rank and self._num_uses[message.value] > 0

    def _pass[T](self, outcome: str, message: Message, act: Callable[[], T]) -> T:
        """Name the message and the ranks at its other end in an error."""
        try:
            return act()
        except torch.OutOfMemoryError:
            # A device without memory for what comes is no neighbour's fault.
            raise
        except (OSError, RuntimeError) as error:
            others = " and ".join(f"rank {rank}" for rank in message.parties if rank != self.rank)
            raise TransferError(f"rank {self.rank}: {message} {outcome}; the other end is {others}: {error}") from error

    def _run(self, action: Action, calls: ComputationHooks | None) -> None:
        needed = self._dependencies.operand_of(action)
        received = () if needed == NOTHING else self._take(needed, action)
        if needed in self._dependencies.in_two_steps:
            # Shards receive what was gathered, and the stage the sum of what they made of it.
            received = received[:1] if action.kind in SHARDS else received[1:]
        if calls:
            calls.before(action)
        outputs = self._compute[action.kind](action, received)
        forward = action.kind is Kind.FORWARD
        if calls:
            calls.after(action, outputs, received) if forward else calls.after(action)
        value = self._dependencies.value_of(action)
        if value != NOTHING and self._dependencies.route(value).takers:
            # A tensor of its own: the stage may replace the data of the one that it has.
            self._values[value] = tuple(tensor.detach() for tensor in outputs)
            if forward:
                self._stage.let_go(outputs)

    def _backward_weight(self, action: Action, received: Tensors) -> Tensors:
        self._stage.backward_weight(action)
        return ()

    def _take(self, value: int, operand: object) -> Tensors:
        """Return a value for a computation, or to be sent. It stays if it is needed again."""
        if value not in self._values:
            raise RuntimeFault(f"rank {self.rank}: {self._dependencies.describe(value)} has not arrived for {operand}")
        if isinstance(operand, Action):
            self._left[value] -= 1
            if self._left[value]:
                return self._values[value]
        return self._values.pop(value)


def _sent_with(instructions: Sequence[Instruction]) -> dict[int, Action]:
    """Return, by instruction, the computation whose outputs are on their way after it: the last SEND of these, or the
    computation itself if nothing is sent."""
    sent: dict[int, Action] = {}
    ran = -1
    for number, (op, operand) in enumerate(instructions):
        if op is Op.SEND:
            sent[number] = sent.pop(ran)
            ran = number
        elif isinstance(operand, Action):
            sent[number] = operand
            ran = number
    return sent
