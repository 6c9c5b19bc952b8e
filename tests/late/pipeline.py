"""All ranks of a schedule on late devices, each with a host and a device, and real code between them.

Takes a schedule, a transport (`two-sided`, `peer`, `host`) and a `Draw`; returns all gradients, to be compared with
those of the model in one piece. Executor, engine, streams, edges between stages, transports and their copies are real.
Threads replace processes, and a queue replaces the control group's messages.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from bpipe.runtime.checksums import Verifier
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.executor import ComputationHooks, Executor, neighbours
from bpipe.runtime.meter import Meter
from bpipe.runtime.stage import Messages, TorchStages
from bpipe.schedule.host_buffers import links_of
from bpipe.schedule.schedule import Schedule
from bpipe.transport.config import TransferConfig
from bpipe.transport.distributed import Distributed, Headed, Subject, pair_groups, try_out
from bpipe.transport.edges import Edges, connect_edges
from bpipe.transport.memory import DeviceMemory
from bpipe.transport.one_sided import HostMemory, OneSidedCopies, Peer, Transport
from bpipe.transport.streams import Device, current
from tests.late.devices import DIRECTED, DRAWN, TYPE, Draw, begin, device, extension
from tests.late.group import join
from tests.late.hosts import run_hosts
from tests.late.model import Extra, LateModel, Place, nothing
from tests.late.model import differing as differing_sizes
from tests.late.slices import SlicedModel


@dataclass
class Letter:
    """A message of a pair's control group; a host that waits for it lets another host run.

    Gloo promises no buffer between two ranks (gloo/transport/tcp/pair.cc: a send first asks for the other end's
    receive), so a message stays with its sender until it is taken: a wait ends only then, and a sender that drops it
    earlier loses it. Gloo's time-outs do not apply, because devices detect a deadlock.
    """

    value: Any
    is_taken: bool = False
    is_lost: bool = False


Mail = defaultdict[Subject, deque[Letter]]


class Sent:
    """The sender's handle of a message."""

    def __init__(self, letter: Letter, who: str) -> None:
        self._letter, self._who = letter, who

    def wait(self) -> None:
        letter = self._letter
        extension().wait_until(lambda: letter.is_taken, self._who)

    def __del__(self) -> None:
        self._letter.is_lost = not self._letter.is_taken


class LateControl:
    def __init__(self, rank: int, partner: int, outbox: Mail, inbox: Mail) -> None:
        self._who, self._other = f"host {rank}", f"host {partner}"
        self._outbox, self._inbox = outbox, inbox

    def send(self, about: Subject, value: Any) -> Sent:
        return self._put(about, json.dumps(value))

    def receive(self, about: Subject) -> Any:
        return json.loads(self._take(about))

    def send_tensors(self, about: Subject, tensors: Sequence[torch.Tensor]) -> Sent:
        # Copies on the host, which waits for its device.
        return self._put(about, [tensor.cpu() for tensor in tensors])

    def receive_tensors(self, about: Subject) -> tuple[torch.Tensor, ...]:
        return tuple(self._take(about))

    def exchange(self, about: Subject, value: Any) -> Any:
        request = self.send(about, value)
        answer = self.receive(about)
        request.wait()
        return answer

    def _put(self, about: Subject, value: Any) -> Sent:
        letter = Letter(value)
        self._outbox[about].append(letter)
        return Sent(letter, f"{self._who} waits for {self._other} to take its message about {about.name}")

    def _take(self, about: Subject) -> Any:
        inbox = self._inbox[about]
        extension().wait_until(lambda: bool(inbox), f"{self._who} waits to hear from {self._other} about {about.name}")
        letter = inbox.popleft()
        if letter.is_lost:
            raise RuntimeError(f"{self._other} let go of its message about {about.name} before {self._who} took it")
        letter.is_taken = True
        return letter.value


def controls(low: int, high: int) -> dict[int, LateControl]:
    """Return the two ends of one pair by rank."""
    up: Mail = defaultdict(deque)
    down: Mail = defaultdict(deque)
    return {low: LateControl(low, high, up, down), high: LateControl(high, low, down, up)}


KINDS = ("two-sided", "peer", "host")
TIMEOUT_S = 30.0


class Rank:
    """One rank and its thread."""

    def __init__(self, pipeline: LatePipeline, rank: int) -> None:
        self._pipeline, self.rank = pipeline, rank
        self.meter = Meter()
        self.engine: Engine | None = None
        self.verifier: Verifier | None = None
        # After each iteration: bytes in segments, number of segments taken, and peak of allocated bytes.
        self.memory: list[tuple[int, int, int]] = []
        self.gradients: dict[Place, torch.Tensor] = {}
        self.moved_bytes: dict[int, int] = {}
        # The memory of a captured iteration.
        self.pool_bytes = 0

    def run(self, iterations: int) -> None:
        pipeline, schedule, here = self._pipeline, self._pipeline.schedule, device(self.rank)
        join(self.rank, schedule.num_ranks)
        stages = pipeline.model.on_device(schedule, self.rank)
        messages = self.messages(here)
        transports = self._transports()
        named = f"rank {self.rank}"
        self.verifier = Verifier(named, here, math.inf) if pipeline.verify else None
        config = EngineConfig(
            named,
            here,
            TransferConfig(
                minimum_bytes=1,
                timeout_s=TIMEOUT_S,
                poison=pipeline.poison,
                differing=pipeline.differing,
                synchronous=pipeline.synchronous,
            ),
            verifier=self.verifier,
            links=dict.fromkeys(range(schedule.num_ranks), pipeline.kind),
            beside=lambda: pipeline.beside(self.rank),
            at_once=pipeline.at_once,
        )
        if pipeline.engines:
            self.engine = Engine(schedule, self.rank, transports, config, self.meter if pipeline.measures else None)
        executor = self.executor(stages, messages)
        for _ in range(iterations):
            self.iterate(executor)
            stats = torch.accelerator.memory_stats(here)
            names = "reserved_bytes.all.current", "num_device_alloc", "allocated_bytes.all.peak"
            self.memory.append(tuple(stats[name] for name in names))
            torch.accelerator.reset_peak_memory_stats(here)
        if pipeline.replays:
            self.captures(lambda: self.iterate(executor), pipeline.replays)
        self.gradients = pipeline.model.gradients_on(self.rank)
        torch.accelerator.synchronize(here)
        if self.engine is not None:
            self.moved_bytes = self.engine.moved_bytes
            self.engine.release()

    def iterate(self, executor: Executor) -> None:
        """Run the rank's program once."""
        for _ in executor.walk(self.calls()):
            extension().perhaps_yield()

    def captures(self, iterate: Callable[[], None], replays: int) -> None:
        """Capture an iteration as `megatron.core.full_cuda_graph` does, on its own stream, and replay it."""
        late, compute, pipeline = extension(), torch.accelerator.current_stream(), self._pipeline
        stream = torch.Stream(device(self.rank))
        torch.accelerator.synchronize(device(self.rank))
        pipeline.meet("begin to capture", lambda: pipeline.entered.enter_context(pipeline.in_capture))
        with current(stream):
            late.begin_capture(self.rank, stream.stream_id)
            iterate()
            graph = late.end_capture(self.rank)
        pipeline.meet("have captured", pipeline.entered.close)
        self.pool_bytes = late.pool_bytes(graph)
        for _ in range(replays):
            late.replay(graph, compute.stream_id)
            late.perhaps_yield()

    def messages(self, here: torch.device) -> Messages:
        """Return the carrier of the rank's messages. Collective over all ranks."""
        pairs = neighbours(self._pipeline.schedule)
        return Edges(
            self.rank, connect_edges(pairs, TYPE, TIMEOUT_S, here, self._pipeline.edge_control(self.rank)), here
        )

    def calls(self) -> ComputationHooks | None:
        """Return the calls around the rank's computations."""
        return self.engine

    def executor(self, stages: TorchStages, messages: Messages) -> Executor:
        return Executor(self._pipeline.schedule, self.rank, stages, messages)

    def _transports(self) -> dict[int, Transport]:
        """Return transports by the other rank; the rank's own number means its node's memory."""
        transports: dict[int, Transport] = {}
        for low, high in self._pipeline.links:
            control = self._pipeline.controls.get((low, high), {}).get(self.rank)
            # Making groups is collective over all ranks.
            groups = pair_groups(low, high, TYPE, TIMEOUT_S) if self._two_sided(low, high) else None
            if self.rank not in (low, high):
                continue
            partner = high if self.rank == low else low
            if groups is None:
                transports[partner] = self._reaching(low == high, control)
                continue
            try_out(groups, device(self.rank))
            transport = Headed if self._pipeline.differing else Distributed
            transports[partner] = transport(control, groups)  # type: ignore[arg-type]
        return transports

    def _two_sided(self, low: int, high: int) -> bool:
        return self._pipeline.kind == "two-sided" and low != high

    def _reaching(self, own: bool, control: LateControl | None) -> OneSidedCopies:
        copying = Device(device(self.rank))
        lanes = copying.lanes(TIMEOUT_S)
        if own or self._pipeline.kind == "host":
            return HostMemory(copying, *lanes)
        assert control is not None
        return Peer(control, DeviceMemory(copying), *lanes)  # type: ignore[arg-type]


class LatePipeline:
    """All ranks of a pipeline. `run` returns the gradients, or raises the first error of a rank.

    `replays`: after the iterations, one more is captured without running, and replayed this often. `in_capture` is entered
    while all ranks capture.
    """

    def __init__(
        self,
        schedule: Schedule,
        kind: str,
        engines: bool = True,
        poison: bool = False,
        measures: bool = False,
        differing: bool = False,
        extra: Extra = nothing,
        verify: bool = False,
        model: LateModel | None = None,
        beside: Callable[[int], Sequence[torch.Stream]] = lambda rank: (),
        synchronous: bool = False,
        at_once: bool = False,
        replays: int = 0,
        in_capture: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.replays, self.in_capture, self.entered = replays, in_capture or nullcontext(), ExitStack()
        self._met: Counter[str] = Counter()
        self.schedule, self.kind = schedule, kind
        self.engines, self.poison, self.measures, self.differing = engines, poison, measures, differing
        self.verify, self.beside, self.synchronous, self.at_once = verify, beside, synchronous, at_once
        self.links = sorted({(min(link), max(link)) for link in links_of(schedule)}) if engines else []
        self.controls = {(low, high): controls(low, high) for low, high in self.links if low != high}
        self._edge_controls = {pair: controls(*pair) for pair in neighbours(schedule)}
        self.model = model or (
            LateModel(schedule.num_stages, differing_sizes if differing else extra)
            if schedule.layout.slices == 1
            else SlicedModel(schedule, differing)
        )
        self.ranks = [self.rank_of(rank) for rank in range(schedule.num_ranks)]

    def run(self, draw: Draw, iterations: int = 2) -> dict[Place, torch.Tensor]:
        begin(draw)
        with self.entered:
            run_hosts(len(self.ranks), lambda rank: self.ranks[rank].run(iterations))
        return {key: gradient for rank in self.ranks for key, gradient in rank.gradients.items()}

    def rank_of(self, rank: int) -> Rank:
        return Rank(self, rank)

    def meet(self, event: str, last: Callable[[], object]) -> None:
        """Wait for all ranks; the last one to arrive calls `last`."""
        self._met[event] += 1
        if self._met[event] == len(self.ranks):
            last()
        extension().wait_until(lambda: self._met[event] == len(self.ranks), f"all ranks {event}")

    def edge_control(self, rank: int) -> Callable[[int, int, float, str], Any]:
        """Return the factory of a rank's end of the control group of two neighbours."""
        return lambda low, high, timeout_s, purpose: self._edge_controls[low, high].get(rank)


def wrong_bits(pipeline: LatePipeline, draw: Draw, iterations: int = 2) -> list[Place]:
    """Return rank and stage of every wrong gradient, or raise a rank's error."""
    gradients = pipeline.run(draw, iterations)
    expected = pipeline.model.expected(pipeline.schedule, iterations + pipeline.replays)
    assert gradients.keys() == expected.keys()
    return [place for place in gradients if not torch.equal(gradients[place], expected[place])]


# With one hardware queue per stream, because a single queue itself orders much.
ORDERS = (*reversed(DIRECTED[:5]), *(Draw(seed, DRAWN) for seed in range(10)))


def noticed(pipeline: Callable[[], LatePipeline]) -> str:
    """Return how one of a few draws reveals that something is missing: wrong bits or an error; empty if none does."""
    for draw in ORDERS:
        try:
            if wrong_bits(pipeline(), draw):
                return f"wrong bits: {draw}"
        except RuntimeError as error:
            return f"{error}: {draw}"
    return ""
