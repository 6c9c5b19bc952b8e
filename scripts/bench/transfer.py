"""Measure what moving a micro-batch costs on this machine's CPU, with all transports in turn in one run.

Links: two processes. One micro-batch there and back, as one storage and as several, over each transport and by plain
copies within one process. Pipeline: four processes run 1F1B, an iteration without balancing and one with each transport,
asynchronously, synchronously, and with checks of all that moves. A computation is a wait of fixed length, and so leaves
the cores to the copies, as a device would leave them to its copy engines. Ratios are to the iteration without balancing
of the same round.

It cannot show anything of a GPU, its links or its copy engines, nor contention between copies and real computation,
which on a CPU share cores and memory.
"""

import argparse
import contextlib
import datetime
import math
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.turns import WARM_UP, in_turn, on_ranks, quotients, spread
from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.runtime import evictor
from bpipe.runtime.acceptor import Acceptor, LendingAcceptor, ReceivingAcceptor
from bpipe.runtime.checksums import Verifier
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.executor import Executor, neighbours
from bpipe.runtime.stage import Stage, Tensors, TorchStages
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.memory import num_transfers
from bpipe.schedule.schedule import Schedule
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import Connection, connect
from bpipe.transport.edges import Edges, connect_edges
from bpipe.transport.layout import BufferLayout
from bpipe.transport.one_sided import Transport
from bpipe.transport.streams import Device, Pending, Streams

CPU = torch.device("cpu")
TRANSPORTS = ("gloo", "peer", "host")
MEMCPY = "memcpy"
MB = 10**6
TIMEOUT_S = 120.0
STAGES, MICROBATCHES = 4, 8
# A forward, and a backward of twice that.
FORWARD_S = 0.02
POISON = evictor._poison
SYNCHRONOUS, VERIFIED = ", synchronous", ", verified"
BUFFER, HOSTED = (frozenset({0}),), {kind: Action(0, kind, 0) for kind in (Kind.HOST, Kind.RETURN)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", type=float, nargs="+", default=[50], metavar="MB", help="of a micro-batch (default 50)")
    add("--storages", type=int, default=17, metavar="N", help="of a micro-batch (default 17, as of a GPT layer)")
    add("--rounds", type=int, default=15, metavar="N", help="rounds of each part (default 15)")
    add("--microbatch", type=float, default=16, metavar="MB", help="of the pipeline's micro-batches (default 16)")
    options = parser.parse_args()
    measured: dict[str, Any] = {"environment": environment()}
    measured |= {"links": on_ranks(links, 2, options)[0], "pipeline": on_ranks(pipeline, STAGES, options)[0]}
    report(measured)
    return 0


def environment() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


# -- links


def links(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every size, in one storage and in several, over every transport."""
    connections = connected([(0, 1)])
    entries = [
        one_size(rank, connections, int(size * MB), storages, options.rounds)
        for size, storages in product(options.sizes, (1, options.storages))
    ]
    for connection in connections.values():
        connection.close()
    return entries


def connected(pairs: Sequence[tuple[int, int]]) -> dict[str, Connection]:
    """Return this rank's connection over each transport, if it is in a pair."""
    connections = {name: connect(pairs, name, TIMEOUT_S, Device(CPU))[0] for name in TRANSPORTS}
    return {name: connection for name, connection in connections.items() if connection is not None}


def one_size(
    rank: int, connections: Mapping[str, Connection], nbytes: int, storages: int, rounds: int
) -> dict[str, Any]:
    """Measure one size over all transports, and by plain copies."""
    lengths = (nbytes // storages,) * storages
    ends: dict[str, Transport] = {name: connection.transport() for name, connection in connections.items()}
    sent = [torch.randint(0, 256, (length,), dtype=torch.uint8) for length in lengths]
    between, back = ([torch.zeros_like(buffer) for buffer in sent] for _ in range(2))
    acceptors = {name: acceptor_of(end) for name, end in ends.items()} if rank else {}
    announced = [] if rank else [announce(end, lengths) for end in ends.values()]
    seconds: dict[str, list[float]] = {name: [] for name in (MEMCPY, *TRANSPORTS)}
    for counts, name in in_turn(tuple(seconds), rounds):
        dist.barrier()
        begin = time.perf_counter()
        if rank and name in acceptors:
            accept(acceptors[name])
        elif not rank and name == MEMCPY:
            copy(sent, between)
            copy(between, back)
        elif not rank:
            ends[name].put(0, sent).wait()
            ends[name].get(0, back).wait()
        took_s = time.perf_counter() - begin
        dist.barrier()
        assert rank or all(map(torch.equal, sent, back)), f"{name}: received data differs from the data sent"
        for buffer in back:
            buffer.zero_()
        if counts:
            seconds[name].append(took_s)
    for message in announced:
        message.wait()
    for end in ends.values():
        end.release()
    return {"nbytes": sum(lengths), "storages": storages, "seconds": seconds}


def announce(end: Transport, lengths: tuple[int, ...]) -> Pending:
    """Announce the evictor's sizes."""
    if end.one_sided:
        end.reach(BufferLayout.of(BUFFER, {0: lengths}))
    return end.announce({0: lengths})


def acceptor_of(end: Transport) -> Acceptor:
    if end.one_sided:
        return LendingAcceptor(BUFFER, end)
    return ReceivingAcceptor(BUFFER, end, Streams(CPU), CPU, lambda pending, action, state: pending.wait())


def copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def accept(acceptor: Acceptor) -> None:
    """Run the acceptor's half, waited for at once."""
    acceptor.hear(1)
    acceptor.host(HOSTED[Kind.HOST], 0)
    acceptor.give_back(HOSTED[Kind.RETURN], 0)
    acceptor.end()


# -- pipeline


class Waiting(TorchStages):
    """One rank's stage. Computation is a wait; it saves real tensors, and passes on their sum."""

    def __init__(self, rank: int, values: int, storages: int) -> None:
        super().__init__({rank: self.compute})
        self.values, self.storages = values, storages

    def compute(self, microbatch: int, *received: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(self.values).requires_grad_()
        # Each saves its result, of `values` numbers.
        for _ in range(self.storages):
            hidden = torch.tanh(hidden)
        time.sleep(FORWARD_S)
        return hidden.sum() + sum(received)

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        time.sleep(2 * FORWARD_S)
        return super().backward(action, gradients)


class TimedVerifier(Verifier):
    """Adds up the processor time of checks, without that of other processes."""

    took_s = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self.took_s += time.thread_time() - begin

    def poison(self, storage: torch.UntypedStorage) -> None:
        with self.timed():
            POISON(storage)

    def _sums(self, tensors: Sequence[torch.Tensor], moment: str) -> torch.Tensor:
        with self.timed():
            return super()._sums(tensors, moment)

    def end(self) -> None:
        with self.timed():
            super().end()


class Loop:
    """One rank's 1F1B with an engine."""

    def __init__(
        self, schedule: Schedule, rank: int, transport: Transport | None, how: str, stage: Stage, edges: Edges
    ) -> None:
        self.executor = Executor(schedule, rank, stage, edges)
        self.held_s = 0.0
        name = f"rank {rank}"
        self.verifier = TimedVerifier(name, CPU, math.inf) if how == VERIFIED else None
        config = EngineConfig(
            name,
            CPU,
            TransferConfig(minimum_bytes=1024, timeout_s=TIMEOUT_S, synchronous=how == SYNCHRONOUS),
            timed=self.timed,
            verifier=self.verifier,
        )
        self.engine = Engine(schedule, rank, transport, config)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.held_s += time.perf_counter() - begin

    def iteration(self) -> float:
        """Return the seconds from the first operation to the last on this rank."""
        self.held_s = 0.0
        if self.verifier is not None:
            self.verifier.took_s = 0.0
            # Nothing else poisons here.
            evictor._poison = self.verifier.poison
        dist.barrier()
        begin = time.perf_counter()
        self.executor.run(self.engine)
        return time.perf_counter() - begin


def pipeline(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure iterations without and with balancing, over each transport, asynchronously and not."""
    plans = {
        balance: build(ScheduleConfig("1f1b", STAGES, MICROBATCHES, balance=named_balance(balance)))
        for balance in ("none", "bpipe")
    }
    partners = plans["bpipe"].partners
    assert partners is not None
    pairs = [(stage, partners[stage]) for stage in range(STAGES) if num_transfers(plans["bpipe"], stage).evictions]
    connections = connected(pairs)
    stage = Waiting(rank, int(options.microbatch * MB) // options.storages // 4, options.storages)
    edges = Edges(rank, connect_edges(neighbours(plans["none"]), "gloo", TIMEOUT_S, CPU), CPU)
    loops = {"none": Loop(plans["none"], rank, None, "", stage, edges)}
    for name, how in product(TRANSPORTS, ("", SYNCHRONOUS, VERIFIED)):
        transport = connections[name].transport() if connections else None
        loops[f"{name}{how}"] = Loop(plans["bpipe"], rank, transport, how, stage, edges)
    samples: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in loops}
    for counts, name in in_turn(tuple(loops), options.rounds):
        took = torch.tensor(loops[name].iteration(), dtype=torch.float64)
        verifier = loops[name].verifier
        dist.all_reduce(took, dist.ReduceOp.MAX)
        if counts:
            samples[name]["iteration_s"].append(took.item())
            samples[name]["held_s"].append(loops[name].held_s)
            samples[name]["checks_s"].append(0.0 if verifier is None else verifier.took_s)
    moved = loops["gloo"].engine.moved_bytes.get(rank, 0)
    checked = loops[f"gloo{VERIFIED}"].verifier
    assert checked is not None
    assert checked.certificate.iterations == WARM_UP + options.rounds
    for loop in loops.values():
        loop.engine.release()
    for connection in connections.values():
        connection.close()
    return {
        "moved_bytes": moved,
        "forward_s": FORWARD_S,
        "transfers": num_transfers(plans["bpipe"], 0).evictions,
        "samples": samples,
    }


# -- report


def report(measured: dict[str, Any]) -> None:
    host = measured["environment"]
    print(f"{host['date']}, {host['cores']} cores, {host['cpu']}, torch {host['torch']}")
    print("Medians of all rounds, with quartiles. Ratios are taken within a round.\n")
    print("There and back: bytes of both ways by the time of both.")
    print("| MB | storages | way | GB/s |")
    print("|---|---|---|---|")
    for entry in measured["links"]:
        for name, seconds in entry["seconds"].items():
            speed = spread([2 * entry["nbytes"] / took_s / 1e9 for took_s in seconds], ".2f")
            print(f"| {entry['nbytes'] / MB:.0f} | {entry['storages']} | {name} | {speed} |")
    pipelined = measured["pipeline"]
    forward = f"a forward of {1e3 * pipelined['forward_s']:.0f} ms"
    print(
        f"\n1F1B, {STAGES} stages, {MICROBATCHES} micro-batches, {forward}; {pipelined['transfers']} micro-batches leave "
        f"stage 0 and return, {pipelined['moved_bytes'] / MB:.1f} MB each."
    )
    print("| balancing | iteration ms | to none, % more | evictor held % |")
    print("|---|---|---|---|")
    for cells in pipeline_rows(pipelined["samples"]):
        print(f"| {' | '.join(cells)} |")
    print("\nAn iteration whose transfers are checked, to one of the same transport and round whose are not, % more:")
    for name in TRANSPORTS:
        checked, plain = (pipelined["samples"][f"{name}{how}"]["iteration_s"] for how in (VERIFIED, ""))
        own = spread(quotients(pipelined["samples"][f"{name}{VERIFIED}"]["checks_s"], checked, 100), ".2f")
        more = spread([100 * (ratio - 1) for ratio in quotients(checked, plain)], "+.2f")
        print(f"{name}: {more}; the evictor's processor is at it for {own} % of that")


def pipeline_rows(samples: dict[str, dict[str, list[float]]]) -> Iterator[list[str]]:
    """Yield each way's cells; without balancing those of comparisons are empty."""
    for name, of_way in samples.items():
        took = of_way["iteration_s"]
        cells = [name, spread([1e3 * seconds for seconds in took], ".1f")]
        if name == "none":
            yield [*cells, "", ""]
            continue
        more = [100 * (ratio - 1) for ratio in quotients(took, samples["none"]["iteration_s"])]
        yield [*cells, spread(more, "+.2f"), spread(quotients(of_way["held_s"], took, 100), ".3f")]


if __name__ == "__main__":
    sys.exit(main())
