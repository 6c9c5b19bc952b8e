"""A view to draw, made from two simulations of one schedule.

In: sizes and a seed. Out: the JSON value that `bpipe report` hands the page.

"Measured" is a simulation of stages that are a little faster or slower, on a clock that does not run evenly; it is data
to draw, not a claim. No torch.
"""

import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import COMPUTE, Action
from bpipe.schedule.memory import num_transfers, peak_counts
from bpipe.schedule.program import Exchange
from bpipe.simulate.cost import Costs, Link, Links, StageCost, uniform
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Simulation, Timed

SAVED = 11_000_000
COST = StageCost(0.010, 0.020, transfer_s=0.012, sent_bytes=131_072, moved_bytes=SAVED, saved_bytes=SAVED)
LINKS = Links(inside=Link(2e9, 50e-6))
Clock = Callable[[float], float]


def make_view(
    num_stages: int = 8, num_microbatches: int = 16, seed: int = 7, missing: tuple[int, ...] = (), iterations: int = 1
) -> dict[str, Any]:
    """Balanced 1F1B. Ranks in `missing` have no record."""
    schedule = build(ScheduleConfig("1f1b", num_stages, num_microbatches, balance=BalanceConfig()))
    predicted = simulate(schedule, replace(uniform(num_stages, COST, LINKS), exchange=Exchange.MEGATRON_1F1B))
    simulated = [track(predicted, rank, float) for rank in range(num_stages)]
    shown = []
    measured = predicted
    for number in range(iterations):
        chance = random.Random(seed + number)
        measured = simulate(schedule, _uneven(num_stages, chance))
        clock = _clock(float(measured.makespan_s), chance)
        ranks = [
            {
                "rank": None if rank in missing else rank,
                "label": f"stage {rank} ({'no record' if rank in missing else f'rank {rank}'})",
                "bound_bytes": (schedule.bounds or (0,) * num_stages)[rank] * SAVED,
                "measured": None if rank in missing else track(measured, rank, clock),
                "simulated": simulated[rank],
            }
            for rank in range(num_stages)
        ]
        shown.append(
            {
                "iteration": 5 + number,
                "end_s": max(clock(float(measured.makespan_s)), float(predicted.makespan_s)),
                "ranks": ranks,
            }
        )
    return {
        "title": "bpipe report of a sample </script><b>run</b>",
        "figures": [
            ["peak of activations", f"{5 * SAVED / 2**20:.1f} MiB", "stage 0"],
            ["exposed transfers", "1 ms", "stage 0, 0 ms predicted"],
            ["iteration", "0.7 s", "0.6 s predicted"],
            ["bubble", "30 %", "28 % predicted"],
        ],
        "facts": [
            ["device", "cpu"],
            ["schedule", f"1f1b, {num_stages} stages, {num_microbatches} micro-batches"],
            ["balance", "bpipe"],
        ],
        "bottleneck": num_stages - 1,
        "answers": [
            f"Stage 0 is the memory bottleneck: {5 * SAVED / 2**20:.1f} MiB of saved activations, as much as its "
            f"bound; without balancing "
            f"it would hold {num_stages * SAVED / 2**20:.1f} MiB.",
            f"Balancing cost {100 * float(max(measured.exposed_s) / measured.makespan_s):.1f} % of the iteration.",
        ],
        "stages": [_stage(measured, rank, rank in missing) for rank in range(num_stages)],
        "differences": [
            {
                "what": "stage 3, backward",
                "measured": "22.1 ms",
                "predicted": "20.0 ms",
                "beside": "the slowest of 8, 3B5 in iteration 2, took 24 ms",
                "iteration": None,
            },
        ],
        "iterations": shown,
    }


def track(report: Simulation, rank: int, clock: Clock) -> dict[str, Any]:
    """One side of one rank, on its clock."""
    computations = report.computations[rank]
    starts = [timed.start_s for timed in computations]
    rows = []
    for timed in sorted((*computations, *report.transfers[rank]), key=lambda one: one.start_s):
        moves = timed.action.kind not in COMPUTE
        start, end = clock(float(timed.start_s)), clock(float(timed.end_s))
        waited = end - clock(float(_stands_still_from(timed, computations, starts))) if moves else 0.0
        saved = SAVED if moves or timed.action.kind.value == "F" else None
        rows.append([str(timed.action), start, end, waited, saved, timed.action.microbatch % 3 if moves else None])
    return {
        "actions": rows,
        "memory": [[clock(float(level.start_s)), level.held_bytes] for level in report.levels(rank)],
    }


def _stands_still_from(timed: Timed, computations: tuple[Timed, ...], starts: list[Any]) -> Any:
    """From when the rank waits for this transfer, if a computation starts the moment it ends; else the transfer's
    end."""
    after = bisect_right(starts, timed.end_s) - 1
    if after < 0 or starts[after] != timed.end_s:
        return timed.end_s
    return max(timed.start_s, computations[after - 1].end_s) if after else timed.start_s


def _uneven(num_stages: int, chance: random.Random) -> Costs:
    stages = []
    for stage in range(num_stages):
        slow = chance.uniform(0.96, 1.08) * (1.1 if stage == 3 else 1)
        stages.append(
            replace(COST, forward_s=COST.forward_s * slow, backward_s=COST.backward_s * slow, transfer_s=0.016)
        )
    return Costs(tuple(stages), LINKS, exchange=Exchange.MEGATRON_1F1B)


def _clock(end: float, chance: random.Random) -> Clock:
    """Time that runs up to a tenth faster or slower, and never backwards."""
    num_pieces = 200
    edges = [end * piece / num_pieces for piece in range(num_pieces + 1)]
    shown = [0.0]
    for before, after in pairwise(edges):
        shown.append(shown[-1] + (after - before) * chance.uniform(0.93, 1.07))

    def read(time: float) -> float:
        piece = min(num_pieces - 1, bisect_right(edges, time) - 1)
        share = (time - edges[piece]) / (edges[piece + 1] - edges[piece])
        return shown[piece] + share * (shown[piece + 1] - shown[piece])

    return read


def _stage(report: Simulation, rank: int, missing: bool) -> dict[str, Any]:
    schedule = report.schedule
    peak = peak_counts(schedule)[rank] * SAVED
    transfers = num_transfers(schedule, rank)
    return {
        "stage": rank,
        "rank": None if missing else rank,
        "measured_bytes": None if missing else report.peak_bytes(rank),
        "predicted_bytes": peak,
        "bound_bytes": (schedule.bounds or (0,) * schedule.num_ranks)[rank] * SAVED,
        "unbalanced_bytes": min(schedule.num_ranks - rank, schedule.num_microbatches) * SAVED,
        "baseline_bytes": None,
        "weights_bytes": 25_000_000 if rank in (0, schedule.num_ranks - 1) else 9_000_000,
        "measured_microbatches": None if missing else peak // SAVED,
        "predicted_microbatches": peak // SAVED,
        "evictions": transfers.evictions,
        "loads": transfers.loads,
        "bubble": float(1 - report.busy_s(rank) / report.makespan_s),
        "exposed_s": float(report.exposed_s[rank]),
        "bytes_per_s": SAVED / 0.016 if transfers.evictions else None,
    }


def action_row(view: dict[str, Any], rank: int, side: str, action: Action) -> list[Any]:
    """The row of an action in the iteration that the page shows first, the last."""
    rows = view["iterations"][-1]["ranks"][rank][side]["actions"]
    found: list[Any] = next(row for row in rows if row[0] == str(action))
    return found
