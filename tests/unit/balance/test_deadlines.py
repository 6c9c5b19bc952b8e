"""Transfers that end in time: never more waiting than without by simulation, every room kept, and nothing changed
where links are fast."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest

from bpipe.balance.budget import ActivationBudget, BudgetTooSmall
from bpipe.balance.config import BalanceConfig, balanced
from bpipe.plan import transfer_windows
from bpipe.plan.fit import Fit, plan_lines, plan_values
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.hosts import PAIR, POOL
from bpipe.schedule.memory import peak_bytes
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, Link, Links, StageCost


@dataclass(frozen=True)
class Drawn:
    """A schedule, what it costs, and a plan within rooms that are smaller than what ranks would hold."""

    plain: Schedule
    costs: Costs
    how: BalanceConfig
    planned: Schedule

    @property
    def activation_budget(self) -> ActivationBudget:
        assert self.how.activation_budget is not None
        return self.how.activation_budget

    @property
    def found(self) -> Fit:
        nothing = (0,) * self.plain.num_ranks
        return Fit(self.how, self.planned, self.costs.memory, self.activation_budget.room_bytes, nothing, nothing)


def drawn(seed: int, arrangements: tuple[str, ...] = (PAIR, POOL)) -> Drawn | None:
    """None where no plan keeps the rooms."""
    rng = random.Random(seed)
    name, chunks = rng.choice([("1f1b", 1), ("interleaved-1f1b", 2), ("v-half", 2), ("zb-h1", 1)])
    p = rng.choice([4, 6])
    plain = FAMILIES[name].generate(p, p * rng.choice([2, 3]), chunks)
    sizes = [rng.randint(60, 140) for _ in range(p * chunks)]
    stages = [
        StageCost(rng.randint(8, 12), rng.randint(16, 24), weight_s=8, moved_bytes=size, saved_bytes=size, sent_bytes=1)
        for size in sizes
    ]
    slow, alone = Links(Link(Fraction(rng.randint(2, 20)))), frozenset(range(p))
    slow = replace(slow, host=Link(Fraction(2 + seed % 19)))
    costs = Costs(tuple(stages), slow, FAMILIES[name].exchange, one_sided=rng.choice([alone, frozenset()]))
    most = max(peak_bytes(plain, costs.memory))
    activation_budget = ActivationBudget((int(most * rng.choice([0.7, 0.8, 0.9])),) * p, costs.memory)
    how = BalanceConfig(activation_budget=activation_budget, hosts=rng.choice(arrangements))
    try:
        return Drawn(plain, costs, how, balanced(plain, how))
    except BudgetTooSmall:
        return None


# In the last nobody waits any more afterwards.
CASES = {seed: case for seed in (*range(200), 437) if (case := drawn(seed)) is not None}


def test_an_iteration_too_long_to_look_at_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(
        case
        for case in CASES.values()
        if transfer_windows.in_time(case.found, case.plain, case.costs).how.windows is not None
    )
    count = sum(len(slot.computations) for row in case.plain.ranks for slot in row)
    monkeypatch.setattr(transfer_windows, "MOST_COMPUTATIONS", count - 1)
    found = transfer_windows.in_time(case.found, case.plain, case.costs)
    assert found.schedule is case.planned
    why = f"{count} computations of an iteration are more than {count - 1}"
    assert (
        plan_lines(found)[-1]
        == f"whether transfers end before they are needed was not looked at, and none is issued earlier: {why}"
    )
    assert plan_values(found)["unjudged"] == why


def test_windows_are_of_plans_within_rooms() -> None:
    case = next(iter(CASES.values()))
    with pytest.raises(ValueError, match="give activation_budget, too"):
        BalanceConfig(windows=transfer_windows.windows_of(case.costs, case.plain.num_ranks))
