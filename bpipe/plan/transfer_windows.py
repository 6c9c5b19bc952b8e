"""Plan transfers to end in time, where that helps by simulation. In: a plan within budgets, and costs. Out: the plan.

What is taken waits no longer for transfers than the plan before, and its iteration is no longer. Knows no command line.
"""

from __future__ import annotations

from dataclasses import replace

from bpipe.balance.config import balanced
from bpipe.balance.deadlines import Windows
from bpipe.plan.fit import Fit
from bpipe.schedule.action import COMPUTE
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, durations
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Simulation

# To plan and simulate so many takes about fifteen seconds of one core. Longer iterations are planned without, and that
# is said.
MOST_COMPUTATIONS = 200_000


def windows_of(costs: Costs, num_ranks: int) -> Windows:
    """Return the durations that the simulator charges where nobody waits for a transfer or shares a port."""
    lasts = durations(costs, num_ranks)
    links, stages = costs.links, costs.stages
    inside, between, own = (
        tuple(link.seconds(cost.moved_bytes) if cost.transfer_s is None else cost.transfer_s for cost in stages)
        for link in (links.inside, links.between, links.host)
    )
    hop = max(links.inside.message_s(cost.sent_bytes) for cost in stages)
    return Windows(
        tuple((kind, tuple(lasts[kind])) for kind in lasts if kind in COMPUTE),
        hop,
        inside,
        between,
        links.nodes,
        own,
        costs.slices,
    )


def in_time(found: Fit, plain: Schedule, costs: Costs) -> Fit:
    """Return the plan with its transfers where they end in time, if it waits less for them; and how long it waits.

    `plain`: before any plan.
    """
    if not found.moved_bytes:
        return found
    count = sum(len(slot.computations) for row in plain.ranks for slot in row)
    if count > MOST_COMPUTATIONS:
        return replace(found, unjudged=f"{count} computations of an iteration are more than {MOST_COMPUTATIONS}")
    now = simulate(found.schedule, costs)
    if any(now.exposed_s):
        how = replace(found.how, windows=windows_of(costs, plain.num_ranks))
        schedule = balanced(plain, how)
        tried = simulate(schedule, costs)
        if _helps(now, tried):
            return replace(found, how=how, schedule=schedule, exposed_s=_exposed(tried))
    return replace(found, exposed_s=_exposed(now))


def waits_less(found: Fit, now: Fit, costs: Costs) -> bool:
    """Return whether transfers are waited for less by the one plan than by the other, and an iteration is no longer.

    No where nobody looked.
    """
    if found.exposed_s is None:
        return False
    before, after = (simulate(plan.schedule, costs.holding(plan.memory)) for plan in (now, found))
    return _helps(before, after)


def _helps(before: Simulation, after: Simulation) -> bool:
    waits = [(sum(one.exposed_s), one.exposed_transfer_s, one.makespan_s) for one in (before, after)]
    return all(later <= earlier for earlier, later in zip(*waits, strict=True)) and waits[0] != waits[1]


def _exposed(simulation: Simulation) -> tuple[float, ...]:
    return tuple(float(seconds) for seconds in simulation.exposed_s)
