"""Measure what a schedule costs to build: time and memory an action, growth, and torch.distributed.pipelining beside it
in the same run.

In: nothing (--quick for sizes a quarter as large). Out: a table on stdout. Every figure is processor time of a fresh
process, the median of --repeat of them with the fastest and the slowest behind it, Python's collector running as for
any user. The growth is given without the collector too, whose share grows with what is alive. What it cannot show:
torch's tools also prepare sharded parameters and gradient reductions, which is left out here; ours also balance, and
check memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

SIZES = (("1f1b", 64, 1, 2048), ("interleaved-1f1b", 16, 4, 1024))
# Each doubling of m, up to the full size, gives the exponent of the growth.
DOUBLINGS = 3
# torch's dry run grows faster than its input: above this many computations it takes minutes.
TORCH_LIMIT = 40_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="sizes a quarter as large")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="processes a figure (default 3)")
    parser.add_argument("--one", nargs=5, metavar="WHAT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, name, *numbers = options.one
        p, v, m = map(int, numbers)
        print(
            json.dumps(
                {"ours": ours, "uncollected": uncollected_ours, "memory": memory, "torch": theirs}[what](name, p, v, m)
            )
        )
        return 0
    for name, p, v, m in SIZES:
        report(name, p, v, m // 4 if options.quick else m, options.repeat)
    return 0


def report(name: str, p: int, v: int, m: int, repeat: int) -> None:
    """Print one schedule's figures, from the smallest size to the full one."""
    print(f"{name}, p={p}, v={v}: generate + balance + check, us an action")
    points, uncollected = [], []
    for size in [m >> halvings for halvings in range(DOUBLINGS, -1, -1)]:
        runs = [one("ours", name, p, v, size) for _ in range(repeat)]
        actions = runs[0]["actions"]
        parts = {part: statistics.median(run[part] for run in runs) for part in ("generate", "balance", "check")}
        totals = sorted(run["generate"] + run["balance"] + run["check"] for run in runs)
        points.append((actions, statistics.median(totals)))
        bare = statistics.median(
            sum(one("uncollected", name, p, v, size)[part] for part in parts) for _ in range(repeat)
        )
        uncollected.append((actions, bare))
        split = ", ".join(f"{part} {seconds / actions * 1e6:.2f}" for part, seconds in parts.items())
        spread = f"{totals[0] / actions * 1e6:.2f} to {totals[-1] / actions * 1e6:.2f}"
        print(f"  m={size:<5} {actions:>7} actions  {points[-1][1] / actions * 1e6:6.2f} ({spread}): {split}")
        beside_torch(name, p, v, size, points[-1][1], repeat)
    print(
        f"  time grows as actions to the power {exponent(points):.2f}, without the collector "
        f"{exponent(uncollected):.2f}"
    )
    print(f"  {one('memory', name, p, v, m)['bytes']:.0f} bytes an action")


def beside_torch(name: str, p: int, v: int, m: int, our_seconds: float, repeat: int) -> None:
    """Print torch's figures for the same schedule, where its tools end in reasonable time."""
    if 2 * p * v * m > TORCH_LIMIT:
        return
    runs = [one("torch", name, p, v, m) for _ in range(repeat)]
    if "missing" in runs[0]:
        print(f"    torch: {runs[0]['missing']}")
        return
    totals = [run["generate"] + run["lower"] + run["validate"] for run in runs]
    split = ", ".join(
        f"{part} {statistics.median(run[part] for run in runs) / runs[0]['actions'] * 1e6:.2f}"
        for part in ("generate", "lower", "validate")
    )
    ratios = sorted(total / our_seconds for total in totals)
    print(
        f"    torch: {split}; takes {statistics.median(ratios):.1f} times as long as ours ({ratios[0]:.1f} to "
        f"{ratios[-1]:.1f})"
    )


def one(what: str, name: str, p: int, v: int, m: int) -> dict[str, float]:
    """One measurement in a fresh process, so that no measurement pays for another's memory."""
    command = [sys.executable, __file__, "--one", what, name, str(p), str(v), str(m)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(ended.stdout)
    return measured


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Slope of the line through the points on logarithmic axes."""
    return statistics.linear_regression(
        [math.log(actions) for actions, _ in points], [math.log(seconds) for _, seconds in points]
    ).slope


def ours(name: str, p: int, v: int, m: int) -> dict[str, float]:
    from bpipe.balance.pairs import balance
    from bpipe.check.rules import check
    from bpipe.generate.families import FAMILIES

    family = FAMILIES[name]
    start = time.process_time()
    plain = family.generate(p, m, v)
    generated = time.process_time()
    balanced = balance(plain)
    done = time.process_time()
    check(balanced)
    checked = time.process_time()
    actions = sum((slot.compute is not None) + len(slot.transfers) for row in balanced.ranks for slot in row)
    return {"actions": actions, "generate": generated - start, "balance": done - generated, "check": checked - done}


def uncollected_ours(name: str, p: int, v: int, m: int) -> dict[str, float]:
    gc.disable()
    return ours(name, p, v, m)


def memory(name: str, p: int, v: int, m: int) -> dict[str, float]:
    from bpipe.balance.config import BalanceConfig
    from bpipe.build import ScheduleConfig, build

    tracemalloc.start()
    schedule = build(ScheduleConfig(name, p, m, num_chunks=v, balance=BalanceConfig()))
    held, _ = tracemalloc.get_traced_memory()
    actions = sum((slot.compute is not None) + len(slot.transfers) for row in schedule.ranks for slot in row)
    return {"bytes": held / actions}


def theirs(name: str, p: int, v: int, m: int) -> dict[str, float | str]:
    """The same order of computations by torch's own functions: generated, given its sends and receives, validated,
    run dry."""
    try:
        from torch.distributed.pipelining import schedules

        order_of = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations
        validate, lower, dry_run = (
            schedules._validate_schedule,
            schedules._add_send_recv,
            schedules._simulate_comms_compute,
        )
    except (ImportError, AttributeError) as error:
        return {"missing": f"not measured, its functions are not where they were: {error}"}
    # Of the schedule it belongs to, torch asks no more than these.
    asked: Any = SimpleNamespace(n_local_stages=v, pp_group_size=p, _n_microbatches=m, microbatches_per_round=p)

    def rank_of(stage: int) -> int:
        return stage % p

    start = time.process_time()
    orders = {rank: order_of(asked, rank) for rank in range(p)}
    generated = time.process_time()
    lowered = lower(
        {rank: [action for action in order if action is not None] for rank, order in orders.items()}, rank_of, p * v
    )
    done = time.process_time()
    validate(orders, p, p * v, m)
    dry_run(lowered, rank_of, p * v)
    validated = time.process_time()
    return {
        "actions": 2 * p * v * m,
        "generate": generated - start,
        "lower": done - generated,
        "validate": validated - done,
    }


if __name__ == "__main__":
    sys.exit(main())
