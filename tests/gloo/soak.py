"""Ranks without Megatron that move activations for a long time.

Takes a file of scenarios and a folder; writes the exit codes of each scenario's ranks and what each measured. A rank
runs its program over small real graphs, computes every gradient a second time without an engine, and sometimes pauses.
Several programs take turns, so host buffers are released and lent again. One process forks all ranks, because a rank
would spend most of its time importing torch.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.executor import Executor, neighbours
from bpipe.runtime.stage import Messages, TorchStages
from bpipe.schedule.action import Action
from bpipe.schedule.host_buffers import links_of
from bpipe.schedule.memory import num_transfers
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import connect_all
from bpipe.transport.edges import Edges, connect_edges
from bpipe.transport.streams import Device
from tests.support.alone import Alone

CPU = torch.device("cpu")
WIDTH = 256
# Programs that take turns: micro-batches, and rows of each. Both change the size of a host buffer.
PROGRAMS = ((8, 64), (4, 96), (6, 32))
ITERATIONS_A_TURN = 2
TIMEOUT_S = 60.0
# The first iterations connect and fill pools, so fewer turns prove nothing.
TURNS = 3


@dataclass(frozen=True)
class Scenario:
    """A run of at least this many seconds and micro-batches, whose sizes differ if `differing`.

    With `bounds`, any rank with room hosts for any other.
    """

    name: str
    transport: str
    ranks: int = 4
    seconds: float = 4.0
    microbatches: int = 0
    limit_s: float = 120.0
    differing: bool = False
    bounds: tuple[int, ...] | None = None


@dataclass
class Record:
    """One rank's measurements. The lists have an entry for every turn of a program."""

    transport: str | None = None
    groups: int = 0
    microbatches: int = 0
    transfers: int = 0
    different: list[str] = field(default_factory=list)
    outlived: int = 0
    stayed: int = 0
    grown: int = 0
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)


def how_of(scenario: Scenario) -> BalanceConfig:
    return BalanceConfig() if scenario.bounds is None else BalanceConfig(tuple(scenario.bounds), hosts="pool")


class Rank:
    """One rank of a scenario."""

    def __init__(self, scenario: Scenario, rank: int) -> None:
        self.scenario, self.rank = scenario, rank
        self.record = Record()
        self.chance = random.Random(rank)
        torch.manual_seed(rank)
        balance = how_of(scenario)
        self.plans = [build(ScheduleConfig("1f1b", scenario.ranks, m, balance=balance)) for m, _ in PROGRAMS]
        # Stages differ, so an evicted micro-batch differs in size from the host's own.
        stages = self.plans[0].layout.stages_of(rank)
        self.weights = {stage: torch.nn.Parameter(torch.randn(WIDTH, WIDTH + 32 * stage) / 16) for stage in stages}
        pairs = {(min(link), max(link)) for plan in self.plans for link in links_of(plan)}
        self.connections, links = connect_all(sorted(pairs), scenario.transport, TIMEOUT_S, Device(CPU))
        self.record.transport = next((link.transport for link in links if rank in link.ranks), None)
        self.record.groups = len(distributed_c10d._world.pg_map)
        self.edges = connect_edges(neighbours(self.plans[0]), "gloo", TIMEOUT_S, CPU)
        differing = scenario.differing
        config = EngineConfig(
            f"rank {rank}",
            CPU,
            TransferConfig(minimum_bytes=1024, timeout_s=TIMEOUT_S, poison=True, differing=differing),
        )
        self.engines = []
        for plan in self.plans:
            transports = {
                partner: connection.transport(differing=differing) for partner, connection in self.connections.items()
            }
            self.engines.append(Engine(plan, rank, transports, config))
        self.running = self.engines[0]
        self.iterations = 0

    def run(self) -> None:
        """Take turns until rank 0 decides that the time is over."""
        end = time.monotonic() + self.scenario.seconds
        going, turns = torch.ones(1), 0
        while going.item() or turns < TURNS or self.record.microbatches < self.scenario.microbatches:
            for number, engine in enumerate(self.engines):
                self.running = engine
                for _ in range(ITERATIONS_A_TURN):
                    self.iteration(number)
                engine.release()
            turns += 1
            self.look()
            going.fill_(time.monotonic() < end)
            dist.broadcast(going, 0)
        for connection in self.connections.values():
            connection.close()

    def iteration(self, number: int) -> None:
        plan = self.plans[number]
        alive: list[StorageWeakRef] = []
        gradients = self.gradients(number, self.running, alive)
        self.record.outlived += sum(not reference.expired() for reference in alive)
        if not all(map(torch.equal, gradients, self.gradients(number, None, []))):
            self.record.different.append(f"iteration {self.iterations}, {plan.num_microbatches} micro-batches")
        self.record.microbatches += plan.num_microbatches
        self.record.transfers += 2 * num_transfers(plan, self.rank).evictions
        self.iterations += 1
        if self.running.sizing is not None:
            self.record.stayed += self.running.sizing.stayed.microbatches
            self.record.grown = max(self.record.grown, self.running.sizing.num_grown)

    def rows(self, number: int, microbatch: int) -> int:
        """Return a micro-batch's rows; if sizes differ, times 1/4 to a factor that grows with iterations to 3."""
        rows = PROGRAMS[number][1]
        if not self.scenario.differing:
            return rows
        largest = min(3.0, 1.0 + self.iterations / 30)
        return max(1, int(rows * random.Random(f"{self.iterations} {microbatch}").uniform(0.25, largest)))

    def gradients(self, number: int, engine: Engine | None, alive: list[StorageWeakRef]) -> list[torch.Tensor]:
        """Return one iteration's gradients; without an engine, nothing moves and no messages are sent."""
        for weight in self.weights.values():
            weight.grad = None
        plan = self.plans[number]

        def part(stage: int, microbatch: int, *tokens: torch.Tensor) -> torch.Tensor:
            generator = torch.Generator().manual_seed(1000 * self.iterations + microbatch)
            received = torch.randn(self.rows(number, microbatch), WIDTH, generator=generator).requires_grad_()
            hidden = torch.nn.functional.gelu(received @ self.weights[stage])
            alive.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (received, hidden))
            output = torch.softmax(hidden @ self.weights[stage].t(), dim=-1) * hidden.sum(dim=-1, keepdim=True)
            # The previous stage's message only has to arrive: the gradient does not depend on it.
            return (output * (0.5 + microbatch)).sum() + sum(token.sum() for token in tokens)

        messages: Messages = Edges(self.rank, self.edges, CPU) if engine else Alone(lambda message: (torch.ones(()),))
        stages = TorchStages({stage: functools.partial(part, stage) for stage in self.weights})
        Executor(plan, self.rank, stages, messages).run(Watched(self, engine) if engine else None)
        gradients = [weight.grad for weight in self.weights.values()]
        assert all(gradient is not None for gradient in gradients)
        return gradients  # type: ignore[return-value]

    def rest(self) -> None:
        if self.chance.random() < 0.2:
            time.sleep(self.chance.random() / 300)

    def look(self) -> None:
        """Record what this process holds after garbage collection, without the allocator's free memory."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.record.descriptors.append(len(os.listdir("/proc/self/fd")))
        self.record.threads.append(threading.active_count())
        self.record.resident_bytes.append(
            int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        )


class Watched:
    """The engine's calls, with pauses before some computations."""

    def __init__(self, rank: Rank, engine: Engine) -> None:
        self.rank, self.engine = rank, engine
        self.begin, self.after, self.end = engine.begin, engine.after, engine.end
        self.sent, self.communicated = engine.sent, engine.communicated

    def before(self, op: Action) -> None:
        self.engine.before(op)
        self.rank.rest()


def one_rank(scenario: Scenario, rank: int, folder: Path) -> int:
    """Run one process and return its exit code; errors are printed to its log with the engine's state."""
    torch.set_num_threads(1)
    try:
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=scenario.ranks, timeout=timeout
        )
        trainer = Rank(scenario, rank)
        try:
            trainer.run()
        except Exception as error:
            print(f"{trainer.running.where()}: {error}", file=sys.stderr)
            trainer.running.abandon()
            raise
        (folder / f"rank{rank}.json").write_text(json.dumps(asdict(trainer.record)))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def run(scenario: Scenario, folder: Path) -> list[int | None]:
    """Fork the ranks, wait for them, and kill the rest; return exit codes, None for killed ranks."""
    folder.mkdir()
    begin = time.monotonic()
    children = {}
    for rank in range(scenario.ranks):
        child = os.fork()
        if child == 0:
            log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = one_rank(scenario, rank, folder)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children[child] = rank
    codes: list[int | None] = [None] * scenario.ranks
    while children and time.monotonic() < begin + scenario.limit_s:
        for child, rank in list(children.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del children[child]
        time.sleep(0.02)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return codes


def main() -> None:
    folder = Path(sys.argv[2])
    # Only the loopback interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for fields in json.loads(Path(sys.argv[1]).read_text()):
        scenario = Scenario(**fields)
        codes = run(scenario, folder / scenario.name)
        (folder / scenario.name / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
