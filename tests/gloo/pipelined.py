"""Ranks that train under torch.distributed.pipelining by torch's own schedules and by `BalancedSchedule`, one case
after another in the same processes.

In: a number of ranks and a folder. Out: `<folder>/rank<r>.json`: by case, whether every bit is that of torch's own
class, the peak measured and the one predicted, evictions, and which share of what a forward keeps has moved.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.multiprocessing import start_processes

from bpipe.ir.memory import num_transfers, peak_counts
from bpipe.runtime.meter import Meter
from bpipe.torch import BalancedSchedule
from tests.gloo.pipelined_stages import Part, loss_of, same, stages_of, steps_of

MICROBATCHES, TIMEOUT_S = 8, 60.0
OPTIONS = {"minimum_bytes": 256, "timeout_s": TIMEOUT_S, "poison": True}

# By the placement's name, which stages a rank of p has, and how many there are.
PLACES: dict[str, Callable[[int, int], tuple[list[int], int]]] = {
    "chain": lambda rank, p: ([rank], p),
    "loop": lambda rank, p: ([rank, p + rank], 2 * p),
    "v": lambda rank, p: ([rank, 2 * p - 1 - rank], 2 * p),
}


@dataclass(frozen=True)
class Case:
    """One schedule beside torch's own class of the same stages."""

    places: str
    reference: type
    schedule: Any
    options: dict[str, Any] = field(default_factory=dict)
    moves: bool = True


CASES = {
    "1f1b": Case("chain", schedules.Schedule1F1B, "1f1b"),
    "1f1b, not balanced": Case("chain", schedules.Schedule1F1B, "1f1b", {"balance": "none"}, moves=False),
    "1f1b over peer": Case("chain", schedules.Schedule1F1B, "1f1b", {"transport": "peer"}),
    "interleaved": Case("loop", schedules.ScheduleInterleaved1F1B, "interleaved-1f1b"),
    "torch's interleaved": Case("loop", schedules.ScheduleInterleaved1F1B, "Interleaved1F1B"),
}


def of_case(case: Case, rank: int, world: int) -> dict[str, Any]:
    indices, num_stages = PLACES[case.places](rank, world)

    def stages() -> Any:
        return stages_of(indices, num_stages, Part)

    theirs = stages()
    reference = case.reference(theirs if len(theirs) > 1 else theirs[0], MICROBATCHES, loss_fn=loss_of)
    wanted = steps_of(reference, theirs, MICROBATCHES)
    ours, meter = stages(), Meter()
    balanced = BalancedSchedule(
        ours, MICROBATCHES, loss_of, schedule=case.schedule, meter=meter, **{**OPTIONS, **case.options}
    )
    found = steps_of(balanced, ours, MICROBATCHES)
    return facts(balanced, meter, same(wanted, found), rank)


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
    engine.release()
    return result


def run_cases(rank: int, world: int, folder: str, cases: dict[str, Callable[[int, int], dict[str, Any]]]) -> None:
    """One process."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    found = {}
    for name, run in cases.items():
        try:
            found[name] = run(rank, world)
        except BaseException:
            # The others may wait for this rank; they are ended with it.
            print(f"rank {rank}, {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(1)
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def one_rank(rank: int, world: int, folder: str, names: list[str]) -> None:
    cases = {name: case for name, case in CASES.items() if not names or name in names}
    run_cases(
        rank,
        world,
        folder,
        {name: lambda r, p, case=case: of_case(case, r, p) for name, case in cases.items()},  # type: ignore[misc]
    )


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    number, place, *chosen = sys.argv[1:]
    start_processes(one_rank, args=(int(number), place, chosen), nprocs=int(number), start_method="fork")
