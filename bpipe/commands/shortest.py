"""`bpipe schedule --optimal`: the shortest order of a schedule's computations within a memory.

In: flags, a Schedule. Out: another one.

What is known of it, a proof or how far one is, goes to standard error: the schedule is written as any other is.
"""

from __future__ import annotations

import sys

from bpipe.build import adopt
from bpipe.commands.times import times_of, unit_costs
from bpipe.flags.flag import Options
from bpipe.flags.schedules import TIME_LIMIT_S
from bpipe.generate.shortest import describe_result, shortest
from bpipe.ir.schedule import Schedule


def check(options: Options) -> None:
    """Raise ValueError for flags that do not go together."""
    if options.optimal is None:
        if options.time_limit is not None:
            raise ValueError("--time-limit is for --optimal: give it, too, or leave this out")
        return
    if options.balance != "none":
        raise ValueError(
            "--optimal orders what every rank holds itself: leave --balance out, or balance what it writes, with "
            "--input"
        )


def changed(schedule: Schedule, options: Options) -> Schedule:
    """Return the schedule, or the shortest one with its computations; checked."""
    if options.optimal is None:
        return schedule
    if times_of(schedule, options.costs, options.hop) is None:
        raise ValueError(
            "--optimal: shards of the vocabulary take part in it, and have no cost here: leave --vocabulary out"
        )
    found = shortest(
        schedule, unit_costs(options.costs, options.hop), options.optimal, options.time_limit or TIME_LIMIT_S
    )
    print(f"bpipe: {describe_result(found, options.optimal)}", file=sys.stderr)
    return adopt(found.schedule)
