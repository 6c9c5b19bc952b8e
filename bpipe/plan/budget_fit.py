"""Keep a setup within budgets. In: a Setup, budgets in bytes. Out: the setup as it is balanced, and a `Fit`.

An error says which budget would be kept; what else makes a setup fit is asked of `ways`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bpipe.build import build
from bpipe.config.flags.budgets import MINIMUM_BYTES
from bpipe.plan.budget import Devices, OverBudget, one_budget_a_rank, plan_in_time, within, within_or_none
from bpipe.plan.fit import Fit
from bpipe.predict.activations import parts_of, sizes_of
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.memory import besides_of, link_bytes
from bpipe.predict.nodes import rank_nodes
from bpipe.predict.profile import Profile
from bpipe.schedule.hosts import ALL, POOL

ELSEWHERE = "`bpipe fit` with the same launch lists other ways to make it fit, and what they cost"


def predicted_devices(setup: Setup, budget_bytes: Sequence[int], minimum_bytes: int = MINIMUM_BYTES) -> Devices:
    """Return the predicted inputs of a plan for a setup."""
    budgets = one_budget_a_rank(budget_bytes, setup.pipeline)
    plain, moving = (replace(setup, balance=balance) for balance in (None, EVENLY))
    nodes = setup.hosts in (POOL, ALL) and len(set(rank_nodes(moving))) > 1
    return Devices(
        build(plain.program()),
        sizes_of(setup, minimum_bytes),
        besides_of(plain),
        budgets,
        besides_of(moving),
        setup.hosts,
        rank_nodes(moving) if nodes else (),
        link_bytes(setup),
        parts_of(setup, minimum_bytes),
    )


def within_budget(
    setup: Setup, budget_bytes: Sequence[int], minimum_bytes: int = MINIMUM_BYTES, profile: Profile | None = None
) -> tuple[Setup, Fit]:
    """Return the setup balanced within budgets, and its plan.

    Raises ValueError where no plan keeps them.
    """
    devices = predicted_devices(setup, budget_bytes, minimum_bytes)
    return _in_time(setup, devices, within_prediction(devices), profile)


def within_budget_or_none(setup: Setup, budget_bytes: Sequence[int], profile: Profile | None = None) -> Setup | None:
    """Return the setup balanced within budgets, None where no plan keeps them: which budget would be enough takes ten
    times as long to say."""
    devices = predicted_devices(setup, budget_bytes)
    found = within_or_none(devices)
    return None if found is None else _in_time(setup, devices, found, profile)[0]


def _in_time(setup: Setup, devices: Devices, found: Fit, profile: Profile | None) -> tuple[Setup, Fit]:
    """The setup as the plan balances it, with transfers where they end in time."""
    if not found.moved_bytes:
        return replace(setup, balance=None, budget_bytes=devices.budget_bytes), found
    found = plan_in_time(setup, devices, found, profile)
    return replace(setup, balance=found.how, budget_bytes=devices.budget_bytes), found


def within_prediction(devices: Devices) -> Fit:
    """Return the plan within budgets. Raises ValueError where there is none, with where to look for other ways."""
    try:
        return within(devices)
    except OverBudget as error:
        raise ValueError(f"by prediction {error}. {ELSEWHERE}") from None
