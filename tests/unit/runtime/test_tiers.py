"""A rank's own node's memory through the real engine: alone, and behind other devices.

Nothing changes a bit, and devices hold less.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import allocated_bytes
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.errors import RuntimeFault, TransferError
from bpipe.schedule.host_buffers import num_host_buffers, num_host_memory_buffers
from bpipe.schedule.memory import memory_of
from bpipe.schedule.schedule import Schedule
from bpipe.transport.config import TransferConfig
from bpipe.transport.host_memory import Budget, Buffers, LocalRank, MemoryLimit
from bpipe.transport.one_sided import HostMemory, OneSidedCopies
from tests.unit.runtime.pipeline import in_one_piece
from tests.unit.runtime.threaded import CPU, KINDS, Pipeline
from tests.unit.transport.loopback import CPU as COPYING
from tests.unit.transport.loopback import AtOnce


def tiered(
    name: str, p: int, m: int, v: int = 1, hosts: str = "host", bounds: tuple[int, ...] | None = None
) -> Schedule:
    return build(ScheduleConfig(name, p, m, num_chunks=v, balance=BalanceConfig(bounds, hosts=hosts)))


TIERS: dict[str, Callable[[], Schedule]] = {
    "all of it": lambda: tiered("1f1b", 4, 8),
    "behind devices": lambda: tiered("1f1b", 4, 8, hosts="all"),
    "one rank": lambda: tiered("gpipe", 1, 6, bounds=(3,)),
    "chunks": lambda: tiered("interleaved-1f1b", 4, 8, 2),
    "chunks behind devices": lambda: tiered("interleaved-1f1b", 4, 8, 2, "all", (6,)),
    "halves, as a V": lambda: tiered("v-half", 4, 8, 2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TIERS)
def test_it_changes_no_bit_and_devices_hold_what_was_said(name: str, kind: str) -> None:
    schedule = TIERS[name]()
    pipeline = Pipeline(schedule, kind, timeout_s=20.0)
    found = pipeline.run(3, release=False)
    assert all(map(torch.equal, found, in_one_piece(schedule.num_stages, schedule.num_microbatches, 3)))
    for rank, engine in enumerate(pipeline.engines):
        count, num_bytes = engine.own_memory
        assert count == num_host_memory_buffers(schedule, rank)
        assert bool(num_bytes) == bool(count)
        # Nothing of it is on the device.
        assert engine.num_host_buffers in (0, num_host_buffers(schedule, rank))
    held = [
        sum(allocated_bytes(schedule, rank, memory_of([1] * schedule.num_stages))) for rank in range(schedule.num_ranks)
    ]
    if not schedule.split_stages:
        assert [meter.peak_microbatches for meter in pipeline.meters] == held
    pipeline.close()


def test_every_buffer_is_made_once() -> None:
    """From the second iteration on all of a rank's lie in one piece, which no further iteration makes anew."""
    schedule = tiered("1f1b", 4, 8)
    pipeline = Pipeline(schedule, "peer", timeout_s=20.0)
    pipeline.run(2, release=False)
    regions = _regions(pipeline, 0)
    pipeline.run(2, release=False)
    assert len(regions) == 1
    assert [one is other for one, other in zip(regions, _regions(pipeline, 0), strict=True)] == [True]
    pipeline.close()


def _regions(pipeline: Pipeline, rank: int) -> list[object]:
    transport = pipeline.engines[rank]._partners._transports[rank]
    return list(transport._access._regions)  # type: ignore[union-attr]


def test_a_node_without_room_for_all_its_ranks_is_refused_with_the_numbers() -> None:
    """Two ranks with 3 and 2 buffers share 100 bytes: the first buffers already say how much all take."""
    schedule = tiered("1f1b", 4, 8)
    room = MemoryLimit("machine", "the machine's memory (MemAvailable)", 100)
    neighbours = [LocalRank(Buffers(num_host_memory_buffers(schedule, rank)), (room,)) for rank in range(4)]
    host = HostMemory(COPYING, Budget(neighbours[0], neighbours), "--bpipe-hosts", "Evict less")
    pipeline = Pipeline(schedule, "peer", timeout_s=2.0)
    transports = {0: OneSidedCopies(host, AtOnce(), AtOnce())}
    pipeline.engines[0] = Engine(
        schedule,
        0,
        transports,
        EngineConfig("rank 0", CPU, TransferConfig(minimum_bytes=1, timeout_s=2.0, poison=True)),
    )
    pattern = (
        r"rank 0, stage 0: 0EVICT0 with its own node's memory did not start; .*--bpipe-hosts: the host buffers of 2 ranks need "
        r".* GiB, but the machine's memory \(MemAvailable\) has .* GiB available, of which a tenth must stay free\. "
        r"Evict less, save less"
    )
    with pytest.raises((TransferError, RuntimeFault, TimeoutError)) as error:
        pipeline.run(1)
    assert re.search(pattern, str(error.value)), str(error.value)


def test_a_failed_copy_names_the_nodes_memory() -> None:
    class Failing(AtOnce):
        def run(self, job: Callable[[], None], after: object = ()) -> object:
            raise OSError("no such luck")

    schedule = tiered("1f1b", 4, 8)
    pipeline = Pipeline(schedule, "peer", timeout_s=2.0)
    transports = {0: OneSidedCopies(HostMemory(COPYING), Failing(), Failing())}  # type: ignore[arg-type]
    pipeline.engines[0] = Engine(
        schedule, 0, transports, EngineConfig("rank 0", CPU, TransferConfig(minimum_bytes=1, timeout_s=2.0))
    )
    with pytest.raises(TransferError, match=r"0EVICT0 with its own node's memory did not start; .*no such luck"):
        pipeline.run(1)
