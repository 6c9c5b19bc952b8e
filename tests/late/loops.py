"""Run a schedule on late devices with Megatron's own exchanges, groups and order of calls.

Computations, engines and transports are the real ones, and the program is the one that `schedule.check.deadlock`
checks; this module turns its exchanges into operations of torch.distributed.

Source: megatron-core 0.19.2, `p2p_communication.py`. With batches, `_batched_p2p_ops` gives a whole exchange to
`batch_isend_irecv`, in the communicator of all ranks. Otherwise `_p2p_ops` issues messages one by one in communicators
of two: an even rank begins with the next rank, an odd one with the previous. Here, all messages of an exchange between
two ranks are one operation, because a program does not say in which order Megatron issues them. `make_communicators` of
`megatron.scheduling.loop.megatron_loops` exchanges one number with both neighbours in advance.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from bpipe.runtime import executor
from bpipe.runtime.engine import Engine
from bpipe.runtime.executor import ComputationHooks
from bpipe.runtime.stage import Messages, Tensors
from bpipe.schedule.action import Action
from bpipe.schedule.lowering.lower import lower
from bpipe.schedule.program import Exchange, Message, Program
from bpipe.schedule.schedule import Schedule
from tests.late.devices import Draw
from tests.late.group import LateGroup
from tests.late.model import Place
from tests.late.pipeline import LatePipeline, Rank
from tests.unit.runtime.pipeline import ROWS, WIDTH

# Tensors by whether the other end is the next rank.
Sides = dict[bool, list[torch.Tensor]]


class Exchanges:
    """One rank's messages: all that were sent and posted are exchanged when the first of them is waited for."""

    def __init__(self, rank: int, size: int, is_batched: bool, synchronizes: bool, device: torch.device) -> None:
        self._rank, self._size, self._is_batched, self._synchronizes, self._device = (
            rank,
            size,
            is_batched,
            synchronizes,
            device,
        )
        # By whether the other end is the next rank. One neighbour may send several messages to an idle rank.
        self._sends: Sides = {False: [], True: []}
        self._receives: Sides = {False: [], True: []}
        self._posted: list[tuple[Message, torch.Tensor]] = []
        self._arrived: dict[int, torch.Tensor] = {}

    def begin(self, is_ring: bool) -> None:
        """Make the communicators, as `make_communicators` does."""
        has_before, has_after = is_ring or self._rank > 0, is_ring or self._rank + 1 < self._size
        sides = [side for side, is_used in ((True, has_after), (False, has_before)) if is_used]
        ones = ({side: [torch.zeros(1, device=self._device)] * (side in sides) for side in (False, True)} for _ in "io")
        self._exchange(*ones)

    def post(self, message: Message) -> None:
        tensor = torch.empty(ROWS, WIDTH, device=self._device)
        self._receives[self._is_next(message)].append(tensor)
        self._posted.append((message, tensor))

    def send(self, message: Message, tensors: Tensors) -> None:
        self._sends[self._is_next(message)] += (tensor.detach().contiguous() for tensor in tensors)

    def wait(self, message: Message) -> Tensors:
        if any((*self._sends.values(), *self._receives.values())):
            self._exchange(self._sends, self._receives)
            self._arrived |= {received.value: tensor for received, tensor in self._posted}
            for waiting in (*self._sends.values(), *self._receives.values(), self._posted):
                waiting.clear()
        return () if message.parties[0] == self._rank else (self._arrived.pop(message.value),)

    def _exchange(self, sends: Sides, receives: Sides) -> None:
        works = self._in_a_batch(sends, receives) if self._is_batched else self._by_pairs(sends, receives)
        for work in works:
            work.wait()
        if self._synchronizes:
            torch.accelerator.synchronize(self._device)

    def _in_a_batch(self, sends: Sides, receives: Sides) -> Sequence[Any]:
        operations = [
            dist.P2POp(operation, tensor, self._neighbour(side))
            for side in (False, True)
            for operation, tensors in ((dist.isend, sends), (dist.irecv, receives))
            for tensor in tensors[side]
        ]
        return list(dist.batch_isend_irecv(operations))

    def _by_pairs(self, sends: Sides, receives: Sides) -> Sequence[Any]:
        group = dist.distributed_c10d._get_default_group()
        assert isinstance(group, LateGroup)
        works = []
        for side in (True, False) if self._rank % 2 == 0 else (False, True):
            messages = [(tensor, tensors is sends) for tensors in (sends, receives) for tensor in tensors[side]]
            if messages:
                works.append(group.with_one(self._neighbour(side), messages))
        return works

    def _neighbour(self, is_next: bool) -> int:
        return (self._rank + (1 if is_next else -1)) % self._size

    def _is_next(self, message: Message) -> bool:
        (peer,) = set(message.parties) - {self._rank}
        assert peer in (self._neighbour(True), self._neighbour(False)), f"{message} is not between neighbours"
        return peer == self._neighbour(True)


class LoopCalls:
    """The calls of `megatron.scheduling.loop.megatron_loops`.

    Transfers after a computation start before its exchange, the last ones at the end.
    """

    def __init__(self, engine: Engine, device: torch.device, synchronizes: bool) -> None:
        self._engine, self._device, self._synchronizes = engine, device, synchronizes
        self.begin, self.end = engine.begin, engine.end

    def before(self, op: Action) -> None:
        self._engine.before(op)
        if self._synchronizes:
            torch.accelerator.synchronize(self._device)

    def after(
        self, op: Action, outputs: Sequence[torch.Tensor | None] = (), inputs: Sequence[torch.Tensor | None] = ()
    ) -> None:
        self._engine.after(op, outputs, inputs)
        self._engine.sent(op)

    def sent(self, op: Action) -> None:
        """Do nothing: `after` makes this call."""

    def communicated(self) -> None:
        """Do nothing: the end of the loop makes this call."""


class LoopRank(Rank):
    def messages(self, here: torch.device) -> Messages:
        loop = self._pipeline
        assert isinstance(loop, LateLoop)
        exchanges = Exchanges(self.rank, loop.schedule.num_ranks, loop.exchange.is_batched, loop.after_exchanges, here)
        if not loop.births:
            exchanges.begin(is_ring=loop.schedule.num_chunks > 1)
        return exchanges

    def calls(self) -> ComputationHooks | None:
        loop, engine = self._pipeline, self.engine
        assert isinstance(loop, LateLoop)
        return None if engine is None else LoopCalls(engine, engine._config.device, loop.in_operations)


class LateLoop(LatePipeline):
    """All ranks of one of Megatron's loops.

    `births`: communicators are not made in advance. `after_exchanges`: the device is synchronized after each exchange
    (`batch_p2p_sync`). `in_operations`: it is also synchronized inside each computation.
    """

    def __init__(
        self,
        schedule: Schedule,
        kind: str,
        exchange: Exchange,
        births: bool = False,
        after_exchanges: bool = False,
        in_operations: bool = False,
        differing: bool = False,
        replays: int = 0,
    ) -> None:
        self.exchange, self.births = exchange, births
        self.after_exchanges, self.in_operations = after_exchanges, in_operations
        super().__init__(schedule, kind, differing=differing, replays=replays)

    def rank_of(self, rank: int) -> Rank:
        return LoopRank(self, rank)

    def run(self, draw: Draw, iterations: int = 2) -> dict[Place, torch.Tensor]:
        with _programs_of(self.exchange):
            return super().run(draw, iterations)


@contextmanager
def _programs_of(exchange: Exchange) -> Iterator[None]:
    """Make executors run the loop's program with this exchange."""

    def programs(schedule: Schedule, posted: Exchange) -> tuple[Program, ...]:
        return lower(schedule, exchange)

    with patch.object(executor, "lower_as_run", programs):
        yield
