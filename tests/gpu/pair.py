"""A pair of processes on one device: rank 0 evicts, rank 1 hosts, and there are no middle stages.

Returns the results of a function that each process runs once they are connected. Also runs the engines of a pair, each
compared with the same stage without one: each process makes its own stage's inputs. Nothing is timed, because two
processes on one GPU take turns.
"""

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from bpipe.schedule.memory import num_transfers
from bpipe.transport.connect import Connection, connect
from bpipe.transport.one_sided import Transport
from bpipe.transport.streams import CopyLane, Device
from megatron.scheduling.start.startup import make_node_of_its_own
from tests.gpu.accelerators import Accelerator
from tests.gpu.common import Result
from tests.gpu.one_stage import TIMEOUT_S, SmallStage, balanced, engine_of, loop_of
from tests.gpu.streams import MODES, late_lanes

EVICTOR, LENDER = 0, 1

Facts = dict[str, Any]


@dataclass
class Member:
    """One process of the pair. `connection` ends with the process; `connect` makes another."""

    rank: int
    on: Accelerator
    connection: Connection
    connect: Callable[[], Connection]


Part = Callable[[Member, Any, float], Facts]


def run_pair(part: Part, on: Accelerator, transport: str, sizes: Any, until: float) -> list[Facts]:
    """Run `part` in two processes; return both results, the evictor's first, with the transport that they agreed on."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        # A process that has used its device cannot be forked; one that has only imported torch can.
        multiprocessing.set_forkserver_preload(["torch"])
        start_processes(
            _process, args=(folder, on.of_process, transport, part, sizes, until), nprocs=2, start_method="forkserver"
        )
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (EVICTOR, LENDER)]


class LateCopies(Device):
    """A device whose copies may come late."""

    def __init__(self, on: Accelerator) -> None:
        super().__init__(on.device)
        self._on = on

    def lanes(self, timeout_s: float) -> tuple[CopyLane, CopyLane]:
        return late_lanes(self._on, timeout_s)


def _process(
    rank: int,
    folder: str,
    accelerator_of: Callable[[int], Accelerator],
    transport: str,
    part: Part,
    sizes: Any,
    until: float,
) -> None:
    make_node_of_its_own(rank)
    on = accelerator_of(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
    )
    here = LateCopies(on)

    def connected() -> Connection:
        connection, _ = connect([(EVICTOR, LENDER)], transport, TIMEOUT_S, here)
        assert connection is not None
        return connection

    member = Member(rank, on, connected(), connected)
    assert member.connection.link is not None
    facts = {"transport": member.connection.link.transport, **part(member, sizes, until)}
    Path(folder, f"{rank}.json").write_text(json.dumps(facts))
    member.connection.close()
    dist.barrier()
    dist.destroy_process_group()


# -- the engines
# ----------------------------------------------------------------------------------------------------------------------


class EngineSizes(Protocol):
    """Sizes for the two cases that run the engines of a pair."""

    @property
    def stages(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def width(self) -> int: ...


def run_engine(member: Member, transport: Transport, sizes: EngineSizes, rounds: Iterable[int]) -> Facts:
    """Run this process's stage of the pair, and compare each iteration with one without an engine."""
    on = member.on
    plan = balanced(sizes.stages, sizes.microbatches)
    place = 0 if member.rank == EVICTOR else sizes.stages - 1
    stage = SmallStage(on, sizes.rows, sizes.width, seed=place)
    loop = loop_of(plan, place, stage, stage.received)
    expected, again = (stage.gradient_of(loop, None) for _ in range(2))
    engine = engine_of(plan, place, on.device, transport, poison=True)
    wrong = count = 0
    for number in rounds:
        on.come_late(*MODES[number % len(MODES)], number)
        wrong += not torch.equal(stage.gradient_of(loop, engine), expected)
        count += 1
    reference = torch.equal(again, expected)
    facts = {"count": count, "wrong": wrong, "reference": reference, "host_buffer_bytes": engine.host_bytes}
    engine.release()
    return {**facts, "evictions": num_transfers(plan, place).evictions}


def judge_engines(evicting: Mapping[str, Any], hosting: Mapping[str, Any], sizes: EngineSizes, result: Result) -> None:
    """Check the results of both engines."""
    for name, facts in (("stage 0, evicts", evicting), (f"stage {sizes.stages - 1}, hosts", hosting)):
        text = f"{facts['wrong']} of {facts['count']} iterations differ from a run without an engine"
        result.check(
            f"engine, p={sizes.stages} m={sizes.microbatches}, {name}", facts["wrong"] == 0 and facts["reference"], text
        )
    result.check("transfers took place", evicting["evictions"] > 0, f"{evicting['evictions']} evictions per iteration")
    nbytes = hosting["host_buffer_bytes"]
    result.check("host buffers on the acceptor", nbytes > 0, f"{nbytes} B")
