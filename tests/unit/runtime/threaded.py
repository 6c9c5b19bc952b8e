"""All ranks of a schedule, each in a thread of its own with an engine around its computations, over real lanes and
shared memory.

In: a schedule, and how two ranks move activations to each other. Out: gradients of all stages' weights. Messages
between stages are queues. Whatever waits for ever ends with a time-out, which the first rank to notice raises.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.executor import Executor
from bpipe.runtime.meter import Meter
from bpipe.runtime.stage import Tensors
from bpipe.schedule.host_buffers import links_of
from bpipe.schedule.program import Message
from bpipe.schedule.schedule import Schedule
from bpipe.transport.base import Transport
from bpipe.transport.config import TransferConfig
from bpipe.transport.headed import Headed
from tests.unit.runtime.held import HeldLane, HeldMemory, HeldTwoSided
from tests.unit.runtime.pipeline import Model
from tests.unit.transport.loopback import alone, controls, peers

CPU = torch.device("cpu")
Edges = defaultdict[tuple[int, ...], "queue.SimpleQueue[tuple[Message, Tensors]]"]
KINDS = ("peer", "two-sided")


class Mail:
    """One rank's messages: a queue an edge. What is sent is on its way at once, and need not be waited for."""

    def __init__(self, rank: int, edges: Edges, timeout_s: float) -> None:
        self._rank, self._edges, self._timeout_s = rank, edges, timeout_s

    def post(self, message: Message) -> None:
        """A queue needs no receiver."""

    def send(self, message: Message, tensors: Tensors) -> None:
        self._edges[message.parties].put((message, tuple(tensor.clone() for tensor in tensors)))

    def wait(self, message: Message) -> Tensors:
        if message.parties[0] == self._rank:
            return ()
        try:
            sent, tensors = self._edges[message.parties].get(timeout=self._timeout_s)
        except queue.Empty:
            raise TimeoutError(f"rank {self._rank}: {message} did not come within {self._timeout_s:g} s") from None
        assert sent == message
        return tensors


class Pipeline:
    """Engines and executors of all ranks, iteration after iteration. `meters` are by rank."""

    def __init__(
        self, schedule: Schedule, kind: str, timeout_s: float, model: Model | None = None, differing: bool = False
    ) -> None:
        self.schedule, self.model = schedule, model or Model(schedule.num_stages)
        self.meters = [Meter() for _ in schedule.ranks]
        self._lanes: list[HeldLane] = []
        self._differing = differing
        transports = self._transports(kind, timeout_s)
        edges: Edges = defaultdict(queue.SimpleQueue)
        self.engines, self._executors = [], []
        for rank, meter in enumerate(self.meters):
            config = EngineConfig(
                f"rank {rank}",
                CPU,
                TransferConfig(minimum_bytes=1, timeout_s=timeout_s, poison=True, differing=differing),
            )
            self.engines.append(Engine(schedule, rank, transports.get(rank), config, meter))
            mail = Mail(rank, edges, timeout_s)
            self._executors.append(Executor(schedule, rank, self.model.parts(schedule, rank), mail))

    def _transports(self, kind: str, timeout_s: float) -> dict[int, dict[int, Transport]]:
        """By rank and other rank, for all that move anything to each other; by a rank itself into its own node's
        memory."""
        made: dict[int, dict[int, Transport]] = defaultdict(dict)
        for low, high in sorted({(min(link), max(link)) for link in links_of(self.schedule)}):
            if low == high:
                lanes = [HeldLane(name, "free") for name in ("outbound", "inbound")]
                self._lanes += lanes
                made[low][low] = alone(*lanes)[0]
            elif kind == "two-sided":
                alike = HeldTwoSided.pair(late_send=True, late_receive=True, timeout_s=timeout_s)
                made[low][high], made[high][low] = self._headed(alike, timeout_s) if self._differing else alike
            else:
                lanes = [HeldLane(name, "free") for name in ("outbound", "inbound", "outbound", "inbound")]
                self._lanes += lanes
                others = lanes[2], lanes[3]
                made[low][high], made[high][low] = peers(
                    *lanes[:2], lender=HeldMemory, timeout_s=timeout_s, others=others
                )
        return made

    def _headed(self, alike: tuple[HeldTwoSided, HeldTwoSided], timeout_s: float) -> tuple[Headed, Headed]:
        here, there = (Headed(*end) for end in zip(alike, controls(timeout_s), strict=True))  # type: ignore[arg-type]
        return here, there

    def run(self, iterations: int = 1, release: bool = True) -> list[torch.Tensor]:
        """All stages' gradients after so many iterations.

        Raises what the first rank to fail raised. `release`: and nothing comes after.
        """

        def one_rank(rank: int) -> None:
            for _ in range(iterations):
                self._executors[rank].run(self.engines[rank])

        try:
            together(range(len(self.engines)), one_rank)
            if release:
                together(range(len(self.engines)), lambda rank: self.engines[rank].release())
        finally:
            if release:
                self.close()
        return self.model.gradients()

    def close(self) -> None:
        """End the lanes."""
        for lane in self._lanes:
            lane.close()


def together(ranks: Sequence[int], does: Callable[[int], None]) -> None:
    """Each rank in a thread; raises the first error."""
    errors: list[Exception] = []

    def guarded(rank: int) -> None:
        try:
            does(rank)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), "a rank did not end"
    if errors:
        raise errors[0]
