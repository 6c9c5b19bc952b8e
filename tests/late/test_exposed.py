"""Whole pipelines on late devices with given durations: balancing is free if transfers are shorter than computations.

Each rank has its own stream on one device, as in `tests.gpu.pipelines`. A late device knows exactly which waits are
exposed.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.record.format import Row
from bpipe.runtime.recorder import Recorder
from bpipe.schedule.schedule import Schedule
from bpipe.transport.streams import Clock, current
from tests.gpu import pipelines
from tests.gpu.accelerators import LATE, Accelerator, accelerator
from tests.gpu.common import seconds
from tests.gpu.one_stage import engine_of, to_host
from tests.support.hand_made import with_late_loads

# A transfer takes 2 us, and a forward at least 3 us.
SIZES = pipelines.Sizes(64, 32, 1)
# With transfers that take as long as four forwards.
LONGER = replace(SIZES, rows=1024)


@dataclass(frozen=True)
class Measurement:
    """Seconds of an iteration, and the transfers that were waited for."""

    elapsed_s: float
    waits: list[Row]


def config(name: str, p: int, m: int, chunks: int = 1, slices: int = 1, **how: object) -> ScheduleConfig:
    balance = BalanceConfig(**how)  # type: ignore[arg-type]
    return ScheduleConfig(name, p, m, num_chunks=chunks, slices=slices, balance=balance)


HIDDEN = {
    "1f1b": config("1f1b", 8, 14),
    "interleaved": config("interleaved-1f1b", 8, 16, 4),
    "combined": config("combined-1f1b", 4, 8, 2),
    "split": config("1f1b-split", 8, 16),
    "mixpipe": config("mixpipe", 8, 16),
    "grouped": config("grouped-interleaved", 8, 8, 2),
    "v-half": config("v-half", 4, 8, 2, hosts="host"),
    "slices": config("interleaved-1f1b", 4, 4, 2, slices=2),
    "pool behind devices": config("interleaved-1f1b", 4, 8, 2, bounds=(6,), hosts="all"),
}
# At the lowest bound, some evictions are in a bubble, and the load after it, which takes its memory, waits there.
IN_BUBBLES = {
    "pool": config("1f1b", 4, 8, bounds=(2, 3, 3, 3), hosts="pool"),
    "own memory": config("1f1b", 4, 8, hosts="host"),
}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """Yield the device, without poison, which takes device time, and with copies that nothing delays."""
    device = accelerator(LATE)
    monkeypatch.setattr(pipelines, "engine_of", lambda *arguments, poison: engine_of(*arguments))
    monkeypatch.setattr(pipelines, "late_to_host", lambda on: to_host(on.device))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield device
    torch.set_num_threads(threads)


def ran(schedule: Schedule, on: Accelerator, sizes: pipelines.Sizes = SIZES) -> Measurement:
    """Measure the second iteration's seconds, and the third's waits."""
    model = pipelines.Model(schedule.num_stages, sizes, on)
    box: pipelines.Box = {}
    ranks = [pipelines.Rank(schedule, rank, model, box, on) for rank in range(schedule.num_ranks)]
    # The first iteration makes the host buffers.
    _, elapsed_s = (seconds(on.device, functools.partial(iteration, ranks)) for _ in range(2))
    for rank in ranks:
        with current(rank.stream):
            rank.engine.recorder = Recorder(Clock(on.device))
    iteration(ranks)
    rows = [rank.engine.recorder.rows({}, rank.engine.moved_bytes)[0] for rank in ranks if rank.engine.recorder]
    for rank in ranks:
        rank.engine.release()
    return Measurement(elapsed_s, [row for of_rank in rows for row in of_rank if row.wait_s > 0])


def iteration(ranks: list[pipelines.Rank]) -> None:
    """Begin and end all ranks together on the stream that measures time."""
    begun = torch.accelerator.current_stream().record_event()
    for rank in ranks:
        rank.stream.wait_event(begun)
    pipelines.take_turns(ranks)
    for rank in ranks:
        torch.accelerator.current_stream().wait_event(rank.stream.record_event())


@pytest.mark.parametrize("name", [*HIDDEN, *IN_BUBBLES])
def test_what_fits_into_computations_costs_nothing(name: str, on: Accelerator) -> None:
    case_config = {**HIDDEN, **IN_BUBBLES}[name]
    balanced = ran(build(case_config), on)
    assert balanced.elapsed_s == ran(build(replace(case_config, balance=None)), on).elapsed_s
    assert bool(balanced.waits) is (name in IN_BUBBLES), balanced.waits


def test_where_loads_stand_right_before_their_backwards_an_iteration_takes_longer(on: Accelerator) -> None:
    schedule, plain = build(HIDDEN["1f1b"]), build(replace(HIDDEN["1f1b"], balance=None))
    early, late, without = (ran(plan, on, LONGER).elapsed_s for plan in (schedule, with_late_loads(schedule), plain))
    assert early == without < late
