"""Train under torch.distributed.pipelining with torch's own schedules and with `BalancedSchedule`, case by case.

Takes a folder, a number of ranks, a module with cases (this or another), and names of some. `<folder>/rank<r>.json`
says by case whether every bit equals that of torch's own class, the measured and predicted peaks, evictions, and
the share of a forward's activations that moved.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.multiprocessing import start_processes

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.meter import Meter
from bpipe.schedule.files.text import write_csv
from bpipe.schedule.memory import num_transfers, peak_counts
from bpipe.schedule.schedule import Schedule
from bpipe.torch import BalancedSchedule
from bpipe.transport.config import TransferConfig
from tests.gloo.pipelined_stages import (
    Pair,
    Part,
    Several,
    deferred_stages,
    loss_of,
    same,
    stages_of,
    steps_and_evaluation,
    steps_of,
)

MICROBATCHES, TIMEOUT_S = 8, 60.0
TRANSFERS = TransferConfig(minimum_bytes=256, timeout_s=TIMEOUT_S, poison=True)
OPTIONS: dict[str, Any] = {"transfers": TRANSFERS}

# By the placement's name: the stages of a rank of p, and the number of stages.
PLACES: dict[str, Callable[[int, int], tuple[list[int], int]]] = {
    "chain": lambda rank, p: ([rank], p),
    "loop": lambda rank, p: ([rank, p + rank], 2 * p),
    "v": lambda rank, p: ([rank, 2 * p - 1 - rank], 2 * p),
}


def lacks_before(major: int, minor: int) -> str:
    """Return why a case that needs this version of torch is skipped; empty if it is installed."""
    is_old = tuple(map(int, torch.__version__.split(".")[:2])) < (major, minor)
    return f"torch's own class trains it over gloo from {major}.{minor} on" if is_old else ""


@dataclass(frozen=True)
class Case:
    """One schedule, compared with torch's own class for the same stages.

    Attributes:
        moves: Whether anything is evicted on 4 ranks.
        torch_options: Options of both schedules.
        frees: Whether dgrad frees most of a micro-batch, so that the peak is below the counted whole micro-batches.
        is_reported: Whether it trains four steps, with the third and fourth recorded in `<folder>/<case>`.
        since: The first version of torch whose own class trains it.
    """

    places: str
    reference: Any
    schedule: Any
    options: dict[str, Any] = field(default_factory=dict)
    moves: bool = True
    make: Callable[..., Any] = Part
    steps: Callable[..., Any] = steps_of
    torch_options: dict[str, Any] = field(default_factory=dict)
    stages: Callable[..., Any] = stages_of
    frees: bool = False
    is_reported: bool = False
    since: tuple[int, int] = (2, 11)

    @property
    def lacks(self) -> str:
        """Return why this case is skipped with the installed torch; empty if it is not."""
        # On a V, 2.11's handshake makes the lowest rank send to itself, which gloo cannot.
        return lacks_before(*max(self.since, (2, 12) if self.places == "v" else self.since))


ONE, LOOP, ZBV = schedules.Schedule1F1B, schedules.ScheduleInterleaved1F1B, schedules.ScheduleZBVZeroBubble
# All ranks hold the same here, so activations go to the node's memory, even between the halves of a backward.
AWAY = {"balance": BalanceConfig(hosts="host")}


def _file(schedule: Schedule) -> str:
    """Write a schedule as a user would; every rank has its own copy."""
    path = Path(tempfile.mkdtemp()) / "schedule.csv"
    path.write_text(write_csv(schedule))
    return str(path)


CASES = {
    "1f1b": Case("chain", ONE, "1f1b"),
    "1f1b, not balanced": Case("chain", ONE, "1f1b", {"balance": None}, moves=False),
    "1f1b over peer": Case("chain", ONE, "1f1b", {"transfers": replace(TRANSFERS, transport="peer")}),
    "1f1b, verified": Case("chain", ONE, "1f1b", {"transfers": replace(TRANSFERS, verify=float("inf"))}),
    "interleaved": Case("loop", LOOP, "interleaved-1f1b"),
    # Torch's own schedules, by name or class, with the stages that they require.
    "GPipe": Case("chain", schedules.ScheduleGPipe, schedules.ScheduleGPipe, AWAY),
    "Interleaved1F1B": Case("loop", LOOP, "Interleaved1F1B"),
    "LoopedBFS": Case("loop", schedules.ScheduleLoopedBFS, schedules.ScheduleLoopedBFS, AWAY),
    "InterleavedZeroBubble": Case("loop", schedules.ScheduleInterleavedZeroBubble, "InterleavedZeroBubble", AWAY),
    "ZBVZeroBubble": Case("v", ZBV, "ZBVZeroBubble", AWAY),
    "DualPipeV": Case("v", schedules.ScheduleDualPipeV, "DualPipeV", AWAY),
    "DualPipeV, not balanced": Case("v", schedules.ScheduleDualPipeV, "DualPipeV", {"balance": None}, moves=False),
    # Ours, compared with torch's of the same stages.
    "zb-v": Case("v", ZBV, "zb-v", AWAY),
    "v-half": Case("v", ZBV, "v-half", AWAY),
    "v-half of pairs": Case("v", ZBV, "v-half", {"balance": None}, make=Pair, moves=False),
    "zb-h1": Case("chain", ONE, "zb-h1", AWAY, moves=False),
    "grouped": Case("loop", LOOP, "grouped-interleaved"),
    "pool": Case("loop", LOOP, "interleaved-1f1b", {"balance": BalanceConfig(hosts="pool")}),
    "a file, balanced here": Case(
        "loop", LOOP, lambda p: _file(build(ScheduleConfig("interleaved-1f1b", p, 8, num_chunks=2)))
    ),
    "a file, balanced": Case(
        "chain", ONE, lambda p: _file(build(ScheduleConfig("1f1b", p, 8, balance=BalanceConfig())))
    ),
    # Inputs and outputs of a step. Earlier versions require a gradient of every tensor that is passed.
    "several tensors, keywords, evaluation": Case(
        "chain", ONE, "1f1b", make=Several, steps=steps_and_evaluation, since=(2, 13)
    ),
    "pairs of tensors": Case("loop", LOOP, "interleaved-1f1b", make=Pair),
    "not scaled": Case("chain", ONE, "1f1b", torch_options={"scale_grads": False}),
    "deferred by the stages": Case("v", ZBV, "v-half", AWAY, stages=deferred_stages, frees=True),
    "of another": Case("loop", LOOP, None),
    "1f1b, reported": Case("chain", ONE, "1f1b", steps=partial(steps_of, num_steps=4), is_reported=True),
    "zb-v, reported": Case(
        "v", ZBV, "zb-v", AWAY, steps=partial(steps_of, num_steps=4, return_outputs=False), is_reported=True
    ),
}


def of_case(case: Case, rank: int, world: int, folder: Path) -> dict[str, Any]:
    indices, num_stages = PLACES[case.places](rank, world)

    def stages() -> Any:
        return case.stages(indices, num_stages, *(() if case.make is Part else (case.make,)))

    def theirs(of: Any) -> Any:
        return case.reference(of if len(of) > 1 else of[0], MICROBATCHES, loss_fn=loss_of, **case.torch_options)

    first = stages()
    expected = case.steps(theirs(first), first, MICROBATCHES)
    ours, meter = stages(), Meter()
    options = {**OPTIONS, **case.options, "meter": meter}
    if case.is_reported:
        options |= {"report": folder, "report_steps": (3, 4), "meter": None}
    if case.schedule is None:
        balanced = BalancedSchedule.of(theirs(ours), **options)
    else:
        source = (
            case.schedule(world) if callable(case.schedule) and not isinstance(case.schedule, type) else case.schedule
        )
        balanced = BalancedSchedule(ours, MICROBATCHES, loss_of, schedule=source, **case.torch_options, **options)
    is_same = same(expected, case.steps(balanced, ours, MICROBATCHES))
    return facts(balanced, balanced.meter or meter, is_same, rank)


def facts(balanced: BalancedSchedule, meter: Meter, is_same: bool, place: int) -> dict[str, Any]:
    engine = balanced.engine
    result = {
        "same": is_same,
        "peak": float(meter.peak_microbatches),
        "predicted": float(peak_counts(balanced.schedule)[place]),
        "evictions": num_transfers(balanced.schedule, place).evictions,
        "moved": sum(engine.moved_bytes.values()),
        "shares": [share.fraction for share in engine.shares.values()],
        "said": [share.sentence for share in engine.shares.values()],
    }
    if balanced.verifier is not None:
        result["verified"] = balanced.verifier.certificate.iterations
    balanced.close()
    return result


def runs(folder: Path) -> dict[str, Callable[[int, int], dict[str, Any]]]:
    """Return each case's function of a rank and the number of ranks."""
    return {
        name: lambda rank, world, name=name, case=case: of_case(case, rank, world, folder / name)  # type: ignore[misc]
        for name, case in CASES.items()
        if not case.lacks
    }


def one_rank(rank: int, folder: str, world: int, module: str, names: list[str]) -> None:
    """Run one process, with the cases of a module of this folder."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    results = {}
    for name, run in importlib.import_module(f"tests.gloo.{module}").runs(Path(folder)).items():
        if names and name not in names:
            continue
        try:
            results[name] = run(rank, world)
        except BaseException:
            # The other ranks may wait for this one; they are ended with it.
            print(f"rank {rank}, {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(1)
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main(folder: str, world: str, module: str, *names: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    arguments = folder, int(world), module, list(names)
    start_processes(one_rank, args=arguments, nprocs=int(world), start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
