"""Sample data for the page, from two simulations of one schedule.

Returns the JSON value that `bpipe report` gives the page. "Measured" is a simulation of slightly faster or slower
stages, so the numbers prove nothing.
"""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.record.report.output.page import simulated_track
from bpipe.schedule.action import COMPUTE, Action
from bpipe.schedule.memory import num_transfers, peak_counts
from bpipe.schedule.program import Exchange
from bpipe.simulate.cost import Costs, Link, Links, StageCost, uniform
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Simulation

SAVED = 11_000_000
COST = StageCost(0.010, 0.020, transfer_s=0.012, sent_bytes=131_072, moved_bytes=SAVED, saved_bytes=SAVED)
LINKS = Links(inside=Link(2e9, 50e-6))


def make_view(
    num_stages: int = 8, num_microbatches: int = 16, seed: int = 7, missing: tuple[int, ...] = (), iterations: int = 1
) -> dict[str, Any]:
    """Return the view of a balanced 1F1B. Ranks in `missing` have no record."""
    schedule = build(ScheduleConfig("1f1b", num_stages, num_microbatches, balance=BalanceConfig()))
    predicted = simulate(schedule, replace(uniform(num_stages, COST, LINKS), exchange=Exchange.MEGATRON_1F1B))
    simulated = [simulated_track(predicted, rank, predicted.levels(rank)) for rank in range(num_stages)]
    shown = []
    measured = predicted
    for number in range(iterations):
        measured = simulate(schedule, _uneven(num_stages, random.Random(seed + number)))
        ranks = [
            {
                "rank": None if rank in missing else rank,
                "label": f"stage {rank} ({'no record' if rank in missing else f'rank {rank}'})",
                "bound_bytes": (schedule.bounds or (0,) * num_stages)[rank] * SAVED,
                "measured": None if rank in missing else track(measured, rank),
                "simulated": simulated[rank],
            }
            for rank in range(num_stages)
        ]
        shown.append(
            {
                "iteration": 5 + number,
                "end_s": float(max(measured.makespan_s, predicted.makespan_s)),
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


def track(report: Simulation, rank: int) -> dict[str, Any]:
    """Return a rank's measured track: a transfer was waited for if a computation starts the moment it ends."""
    computations = report.computations[rank]
    ends = {later.start_s: before.end_s for before, later in pairwise(computations)}
    track = simulated_track(report, rank, report.levels(rank))
    for row, timed in zip(
        track["actions"],
        sorted((*computations, *report.transfers[rank]), key=lambda timed: (timed.start_s, timed.end_s)),
        strict=True,
    ):
        assert row[0] == str(timed.action)
        if timed.action.kind not in COMPUTE and timed.end_s in ends:
            row[3] = float(timed.end_s - max(timed.start_s, ends[timed.end_s]))
    return track


def _uneven(num_stages: int, chance: random.Random) -> Costs:
    stages = []
    for stage in range(num_stages):
        slow = chance.uniform(0.96, 1.08) * (1.1 if stage == 3 else 1)
        stages.append(
            replace(COST, forward_s=COST.forward_s * slow, backward_s=COST.backward_s * slow, transfer_s=0.016)
        )
    return Costs(tuple(stages), LINKS, exchange=Exchange.MEGATRON_1F1B)


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
    """Return an action's row in the last iteration, which the page shows first."""
    rows = view["iterations"][-1]["ranks"][rank][side]["actions"]
    row_of_action: list[Any] = next(row for row in rows if row[0] == str(action))
    return row_of_action
