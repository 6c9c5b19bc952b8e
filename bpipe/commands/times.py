"""Say how long a schedule's computations take at the costs that a command was given.

In: a Schedule, what `--costs` says. Out: numbers.

Knows no transfers and no links: `bpipe simulate` does.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from bpipe.schedule.families.family import ALIKE, UnitCosts
from bpipe.schedule.families.timing import iteration_time
from bpipe.schedule.memory import plain
from bpipe.schedule.schedule import Schedule

# Of a percentage.
_DECIMALS = 3

# A forward and a backward, or a forward and the halves of a backward; None where nothing was said.
TimeOptions = tuple[Fraction, ...] | None


def unit_costs(given: TimeOptions, hop: Fraction | None = None) -> UnitCosts:
    if given is None:
        return replace(ALIKE, hop=hop or 0)
    forward, *backward = given
    halves = backward if len(backward) == 2 else [backward[0] / 2] * 2
    return UnitCosts(forward, halves[0], halves[1], hop or 0)


def times_of(schedule: Schedule, given: TimeOptions, hop: Fraction | None = None) -> dict[str, object] | None:
    """Return `costs`, `hop` if nonzero, `makespan` and `bubble_percent`; None with vocabulary shards, which have no
    costs.

    Raises ValueError for costs that do not fit what the schedule computes.
    """
    halved = bool(schedule.split_stages)
    if given is not None and halved and len(given) == 2:
        raise ValueError("--costs: its backwards are computed in halves, I and W: give three costs, F,I,W")
    if schedule.layout.shard_kinds:
        if given is not None:
            raise ValueError("--costs: shards of the vocabulary take part in it, and have no cost here: leave it out")
        return None
    unit = unit_costs(given, hop)
    found = iteration_time(schedule, unit)
    halves = (unit.backward_input, unit.backward_weight)
    return {
        "costs": [plain(one) for one in (unit.forward, *(halves if halved else (sum(halves),)))],
        **({"hop": plain(Fraction(unit.hop))} if unit.hop else {}),
        "makespan": plain(found.makespan),
        "bubble_percent": plain(round(found.bubble_percent, _DECIMALS)),
    }
