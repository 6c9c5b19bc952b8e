"""`bpipe schedule --optimal`: the shortest order of a schedule's computations within a memory.

In: flags, a Schedule. Out: another one.

What is known of it, a proof or how far one is, goes to standard error: the schedule is written as any other is.
"""

from __future__ import annotations

import argparse
import sys

from bpipe.build import adopt
from bpipe.commands.parser import Parser
from bpipe.commands.times import times_of, unit_costs
from bpipe.flag_types import positive, seconds
from bpipe.generate.shortest import describe_result, shortest
from bpipe.ir.schedule import Schedule

_LIMIT_S = 60.0


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--optimal",
        action="store_true",
        help="of all orders of its computations the shortest within --memory, with the proof (needs OR-tools)",
    )
    add("--memory", type=positive, metavar="M", help="with --optimal: most chunk micro-batches that any rank may hold")
    add(
        "--time-limit", type=seconds, metavar="S", help=f"with --optimal: seconds to look for it (default {_LIMIT_S:g})"
    )


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for flags that do not go together."""
    if not options.optimal:
        for name in ("memory", "time_limit"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is for --optimal: give it, too, or leave this out")
        return
    if options.memory is None:
        raise ValueError(
            "--optimal is the shortest order within a memory: give --memory M, the chunk micro-batches that a rank "
            "may hold"
        )
    if options.balance != "none":
        raise ValueError(
            "--optimal orders what every rank holds itself: leave --balance out, or balance what it writes, with "
            "--input"
        )


def changed(schedule: Schedule, options: argparse.Namespace) -> Schedule:
    """Return the schedule, or the shortest one with its computations; checked."""
    if not options.optimal:
        return schedule
    if times_of(schedule, options.costs, options.hop) is None:
        raise ValueError(
            "--optimal: shards of the vocabulary take part in it, and have no cost here: leave --vocabulary out"
        )
    found = shortest(schedule, unit_costs(options.costs, options.hop), options.memory, options.time_limit or _LIMIT_S)
    print(f"bpipe: {describe_result(found, options.memory)}", file=sys.stderr)
    return adopt(found.schedule)
