"""Plans of what to evict so that every device keeps its budget, from predicted or measured bytes; lines and JSON of them.

A budget is all that a device may hold: weights, gradients, optimizer state, activations, temporaries, overhead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

from bpipe.balance.budget import (
    ActivationBudget,
    BudgetTooSmall,
    chosen_partners,
    fewest_moved,
    smallest_level,
    smallest_level_of_pair,
)
from bpipe.balance.config import BalanceConfig, balanced
from bpipe.balance.deadlines import Windows
from bpipe.balance.pairs import allocated_bytes, buffer_bytes, choose_partners, moved_bytes, pairs_of
from bpipe.balance.pool import balance_over_hosts, fewest_sent
from bpipe.build import build
from bpipe.config.flags.values import MINIMUM_BYTES, budget_text
from bpipe.plan.predict import costs_of
from bpipe.predict.activations import parts_of, sizes_of
from bpipe.predict.exchanges import rank_nodes
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.memory import DeviceBesides, besides_of, link_bytes
from bpipe.predict.profile import Profile
from bpipe.schedule.action import COMPUTE
from bpipe.schedule.host_buffers import (
    Residency,
    guests_of,
    host_memory_buffers,
    hosts_of,
    residencies_by_host,
)
from bpipe.schedule.hosts import ALL, IN_NODES, PAIR, POOL, Pair, device_ranks, uses_host_memory
from bpipe.schedule.memory import Memory, num_transfers
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, durations
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Simulation


@dataclass(frozen=True, slots=True)
class Fit:
    """A plan within budgets."""

    how: BalanceConfig
    """Configuration that balances the schedule."""
    schedule: Schedule
    """The balanced schedule."""
    memory: Memory
    """Memory of a micro-batch of every stage, with the part that moves."""
    budget_bytes: tuple[int, ...]
    alone_bytes: tuple[int, ...]
    """Bytes that each device would need without evictions."""
    need_bytes: tuple[int, ...]
    """Bytes that each device needs."""
    exposed_s: tuple[float, ...] | None = None
    """Seconds per iteration that each rank waits for transfers, if costs are known."""
    unjudged: str | None = None
    """Why waits were not simulated although costs are known."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that leave all ranks in an iteration."""
        return sum(self.sent_bytes(rank) for rank in range(self.schedule.num_ranks))

    def sent_bytes(self, rank: int) -> int:
        """Return bytes that leave one rank in an iteration."""
        return self.residency_bytes(hosts_of(self.schedule, rank))

    @property
    def own_bytes(self) -> tuple[int, ...]:
        """Bytes of each device's host buffers in its node's memory."""
        ranks = range(self.schedule.num_ranks)
        return tuple(buffer_bytes(host_memory_buffers(self.schedule, rank), self.memory) for rank in ranks)

    def residency_bytes(self, residencies: Iterable[Residency]) -> int:
        """Return bytes that leave with these residencies."""
        return moved_bytes(residencies, self.memory)


def plan_values(fit: Fit) -> dict[str, Any]:
    """Return the plan as JSON values."""
    schedule = fit.schedule
    return {
        "budget_bytes": list(fit.budget_bytes),
        "alone_bytes": list(fit.alone_bytes),
        "need_bytes": list(fit.need_bytes),
        "moved_bytes": fit.moved_bytes,
        **({} if fit.exposed_s is None else {"exposed_s": list(fit.exposed_s)}),
        **({} if fit.unjudged is None else {"unjudged": fit.unjudged}),
        **({"own_bytes": list(fit.own_bytes)} if uses_host_memory(schedule.hosts) else {}),
        "hosts": [
            {
                "rank": rank,
                "host": host.rank,
                "evictions": len(residencies),
                "moved_bytes": fit.residency_bytes(residencies),
            }
            for rank in range(schedule.num_ranks)
            for host, residencies in residencies_by_host(schedule, rank).items()
            if fit.residency_bytes(residencies)
        ],
    }


def plan_lines(fit: Fit, basis: str = "by prediction") -> list[str]:
    """Return lines that say who hosts for whom, how much, and why."""
    schedule, budgets = fit.schedule, fit.budget_bytes
    head = f"{basis} within {budget_text(budgets)} GiB per device"
    senders = [rank for rank in range(schedule.num_ranks) if num_transfers(schedule, rank).evictions]
    if not senders:
        fullest = max(range(schedule.num_ranks), key=lambda rank: fit.alone_bytes[rank] - budgets[rank])
        return [
            f"{head}: nothing has to leave, rank {fullest} is the fullest with "
            f"{budget_text([fit.alone_bytes[fullest]])} GiB"
        ]
    summary = [f"{head}: {budget_text([fit.moved_bytes])} GiB are evicted per iteration"]
    return [*summary, *(_hosting(fit, rank) for rank in senders), *_waiting(fit)]


def _part(fit: Fit, residencies: Sequence[Residency]) -> str:
    """Return the size of each part as text; empty if whole micro-batches move."""
    sizes = {fit.memory.size(residency.stage, residency.microbatch).moved_bytes for residency in residencies}
    if not {residency.stage for residency in residencies} & set(fit.how.parts):
        return ""
    return f"{'up to ' if len(sizes) > 1 else ''}{budget_text([max(sizes)])} GiB of each of "


def _waiting(fit: Fit) -> list[str]:
    if fit.unjudged is not None:
        return [
            f"whether transfers end before they are needed was not looked at, and none is issued earlier: "
            f"{fit.unjudged}"
        ]
    waits = ", ".join(
        f"rank {rank} {seconds:.3f} s" for rank, seconds in enumerate(fit.exposed_s or ()) if seconds >= 0.0005
    )
    earlier = ", issued earlier where there is room" if fit.how.windows is not None else ""
    return [f"not every transfer ends before it is needed{earlier}: waits in an iteration {waits}"] if waits else []


def _hosting(fit: Fit, rank: int) -> str:
    schedule, by_host = fit.schedule, residencies_by_host(fit.schedule, rank)
    total = schedule.num_microbatches * len(schedule.layout.stages_of(rank))
    counted = "micro-batches" if schedule.layout.slices == 1 else "slices of micro-batches"
    parts = [
        f"{f'rank {host.rank}' if host.on_device else 'its own node'} hosts {_part(fit, residencies)}{len(residencies)} "
        f"of its {total} {counted}"
        for host, residencies in by_host.items()
    ]
    needs = [budget_text([fit.need_bytes[holder]]) for holder in (rank, *device_ranks(by_host))]
    need = f"they need {', '.join(needs[:-1])} and {needs[-1]} GiB" if len(needs) > 1 else f"it needs {needs[0]} GiB"
    return f"rank {rank} would need {budget_text([fit.alone_bytes[rank]])} GiB; {', '.join(parts)}: {need}"


# Planning and simulating this many computations takes about 15 seconds on one core. Plans of longer iterations are not
# simulated, and the output says so.
MOST_COMPUTATIONS = 200_000


def windows_of(costs: Costs, num_ranks: int) -> Windows:
    """Return the durations that the simulator charges without waits for transfers or shared ports."""
    seconds = durations(costs, num_ranks)
    links, stages = costs.links, costs.stages
    inside, between, host = (
        tuple(link.seconds(cost.moved_bytes) if cost.transfer_s is None else cost.transfer_s for cost in stages)
        for link in (links.inside, links.between, links.host)
    )
    hop = max(links.inside.message_s(cost.sent_bytes) for cost in stages)
    return Windows(
        tuple((kind, tuple(seconds[kind])) for kind in seconds if kind in COMPUTE),
        hop,
        inside,
        between,
        links.nodes,
        host,
        costs.slices,
    )


def in_time(fit: Fit, plain: Schedule, costs: Costs) -> Fit:
    """Return the plan with its waits, its transfers in time if that shortens them. `plain`: the unplanned schedule."""
    if not fit.moved_bytes:
        return fit
    count = sum(len(slot.computations) for row in plain.ranks for slot in row)
    if count > MOST_COMPUTATIONS:
        return replace(fit, unjudged=f"{count} computations of an iteration are more than {MOST_COMPUTATIONS}")
    simulation = simulate(fit.schedule, costs)
    if any(simulation.exposed_s):
        config = replace(fit.how, windows=windows_of(costs, plain.num_ranks))
        schedule = balanced(plain, config)
        retimed = simulate(schedule, costs)
        if _helps(simulation, retimed):
            fit, simulation = replace(fit, how=config, schedule=schedule), retimed
    return replace(fit, exposed_s=tuple(map(float, simulation.exposed_s)))


def _helps(before: Simulation, after: Simulation) -> bool:
    """Whether the second waits less for transfers in no longer an iteration."""
    waits = [
        (sum(simulation.exposed_s), simulation.exposed_transfer_s, simulation.makespan_s)
        for simulation in (before, after)
    ]
    return all(later <= earlier for earlier, later in zip(*waits, strict=True)) and waits[0] != waits[1]


# Part of the budget that a first plan into node memory keeps free for errors of prediction, which measurements differ
# from by up to 3 % (docs/validation.md). A plan that evicts all it can would take node memory that no later plan
# needs.
_CUSHION = Fraction(1, 8)


@dataclass(frozen=True, slots=True)
class Devices:
    """Inputs of a plan."""

    schedule: Schedule
    """Order of computations, before anything moves."""
    memory: Memory
    """Memory of a micro-batch of every stage."""
    besides: DeviceBesides
    """Other memory of devices."""
    budget_bytes: tuple[int, ...]
    """Bytes that a device of each rank may hold."""
    moving: DeviceBesides | None = None
    """Other memory once anything moves: process groups for transfers take some."""
    hosts: str = PAIR
    """Who may host (`schedule.hosts`)."""
    nodes: tuple[int, ...] = ()
    """Nodes of ranks, if there are several."""
    link_bytes: int = 0
    """Memory that a rank takes per link to a rank of another node, after the first link."""
    parts: tuple[tuple[int, ...], ...] = ()
    """By stage, choices of bytes of a micro-batch to evict, ascending to all; empty: whole micro-batches leave."""
    linked: frozenset[Pair] | None = None
    """Links that measured memory already includes."""

    def activation_budget(self, more_bytes: int = 0, moving: bool = True) -> ActivationBudget:
        """Return the memory to balance within, for budgets larger by `more_bytes`."""
        besides = self.moving or self.besides if moving else self.besides
        activation_budget = tuple(
            besides.activation_bytes(rank, budget + more_bytes) for rank, budget in enumerate(self.budget_bytes)
        )
        return ActivationBudget(activation_budget, self.memory)

    def need_bytes(self, schedule: Schedule, moving: bool = True) -> tuple[int, ...]:
        """Return the bytes that a device of each rank holds with this schedule."""
        besides = self.moving or self.besides if moving else self.besides
        held_bytes = (
            sum(allocated_bytes(schedule, rank, self.memory)) + self.links_bytes(schedule, rank)
            for rank in range(schedule.num_ranks)
        )
        return tuple(besides.need_bytes(rank, num_bytes) for rank, num_bytes in enumerate(held_bytes))

    def links_bytes(self, schedule: Schedule, rank: int) -> int:
        """Return bytes of a rank's further links to other nodes."""
        if not self.nodes or not self.link_bytes:
            return 0
        others = {*device_ranks(hosts_of(schedule, rank).values()), *guests_of(schedule, rank)}
        remote_ranks = [other for other in others if self.nodes[other] != self.nodes[rank]]
        if self.linked is None:
            return self.link_bytes * max(0, len(remote_ranks) - 1)
        return self.link_bytes * sum(not {(rank, other), (other, rank)} & self.linked for other in remote_ranks)


class OverBudget(ValueError):
    """No plan keeps the budgets.

    `smallest_bytes`: by rank, budgets that a plan keeps, all larger by the same amount; `pair`: who lacks most.
    """

    def __init__(self, smallest_bytes: tuple[int, ...], pair: Pair, budget_bytes: tuple[int, ...]) -> None:
        ranks = f"rank {pair[0]}" if pair[0] == pair[1] else f"ranks {pair[0]} and {pair[1]}"
        super().__init__(
            f"no plan keeps {ranks} within {budget_text(budget_bytes)} GiB per device. The smallest budget that one "
            f"keeps is {budget_text(smallest_bytes)} GiB"
        )
        self.smallest_bytes, self.pair = smallest_bytes, pair


def within(devices: Devices, partners: Sequence[int] | None = None) -> Fit:
    """Return the plan of `within_or_none`. Raises OverBudget, which says what budget would be enough."""
    fit = within_or_none(devices, partners)
    if fit is not None:
        return fit
    _, choices = _possible(devices, partners)
    extra_bytes, pair = min(_more(devices, choice) for choice in choices)
    raise OverBudget(tuple(budget + extra_bytes for budget in devices.budget_bytes), pair, devices.budget_bytes)


def within_or_none(devices: Devices, partners: Sequence[int] | None = None) -> Fit | None:
    """Return the plan that evicts as little as possible, or None if none keeps the budgets.

    Hosts are the usual partners, or pairs that match who lacks most with who has most to spare; in a pool, all ranks.
    """
    activation_budget, choices = _possible(devices, partners)
    for choice in choices:
        with suppress(BudgetTooSmall):
            return _fit(devices, activation_budget, choice)
    return None


def _possible(devices: Devices, partners: Sequence[int] | None) -> tuple[ActivationBudget, list[Partners]]:
    """Return the room for activations, and the choices of partners in the order to try."""
    needs = devices.need_bytes(devices.schedule, moving=False)
    activation_budget = devices.activation_budget(
        moving=any(need > budget for need, budget in zip(needs, devices.budget_bytes, strict=True))
    )
    return activation_budget, [tuple(partners)] if partners else _choices(devices, activation_budget)


# The partner of each rank; None if hosts are not partners.
Partners = tuple[int, ...] | None


def _choices(devices: Devices, activation_budget: ActivationBudget) -> list[Partners]:
    pairs: list[Partners] = list(
        dict.fromkeys((choose_partners(devices.schedule, None), chosen_partners(devices.schedule, activation_budget)))
    )
    if devices.hosts == PAIR:
        return pairs
    # Further links take memory, so pairs may keep budgets that a larger pool does not.
    return [None, *pairs] if devices.hosts == POOL else [None]


def _more(devices: Devices, partners: Partners) -> tuple[int, Pair]:
    """Return the bytes by which all budgets would have to grow for all pairs, and the pair that needs most."""
    levels = _levels(devices, partners)
    worst = max(levels, key=lambda pair: levels[pair])
    return levels[worst], worst


def tightest_plan(devices: Devices) -> Fit:
    """Return the plan to measure: whole micro-batches leave, and fuller devices are as far below budgets as possible.

    If the host is node memory, an eighth below the budget is enough.
    """
    devices = replace(devices, parts=())
    choice = min(_choices(devices, devices.activation_budget()), key=lambda partners: _more(devices, partners))
    if choice is None:
        extra_bytes = _more(devices, None)[0]
        fit = _fit(devices, devices.activation_budget(extra_bytes), None)
        return _looser(devices, fit, extra_bytes) if devices.hosts in IN_NODES else fit
    activation_budget = list(devices.activation_budget().room_bytes)
    for pair, extra_bytes in _levels(devices, choice).items():
        for rank in pair:
            activation_budget[rank] = devices.activation_budget(extra_bytes).room_bytes[rank]
    return _fit(devices, ActivationBudget(tuple(activation_budget), devices.memory), choice)


def _looser(devices: Devices, tight: Fit, more: int) -> Fit:
    """Return the plan for the budgets less an eighth, if the tightest one (budgets larger by `more`) is below that.

    Every sender of the tightest plan still sends something, so the moved part of its micro-batches can be measured.
    """
    activation_budget = devices.activation_budget(max(more, -int(_CUSHION * min(devices.budget_bytes))))
    ranks = range(devices.schedule.num_ranks)
    alone_bytes = (sum(allocated_bytes(devices.schedule, rank, devices.memory)) for rank in ranks)
    sends = (num_transfers(tight.schedule, rank).evictions > 0 for rank in ranks)
    rooms = (
        min(room, held_bytes - 1) if send else room
        for room, held_bytes, send in zip(activation_budget.room_bytes, alone_bytes, sends, strict=True)
    )
    return _fit(devices, ActivationBudget(tuple(rooms), activation_budget.memory), None)


def _fit(devices: Devices, activation_budget: ActivationBudget, partners: Partners) -> Fit:
    activation_budget = (
        _pooled(devices, activation_budget)
        if partners is None
        else fewest_moved(devices.schedule, activation_budget, devices.parts, partners)
    )
    sizes = enumerate(zip(activation_budget.memory.stages, devices.memory.stages, strict=True))
    slices = devices.memory.slices
    parts = tuple(
        dict.fromkeys(index // slices for index, (part, whole) in sizes if part.moved_bytes < whole.moved_bytes)
    )
    hosts, nodes = (devices.hosts, devices.nodes or None) if partners is None else (PAIR, None)
    config = BalanceConfig(
        partners=partners, activation_budget=activation_budget, hosts=hosts, nodes=nodes, parts=parts
    )
    schedule = balanced(devices.schedule, config)
    moves = any(num_transfers(schedule, rank).evictions for rank in range(schedule.num_ranks))
    alone_bytes = devices.need_bytes(devices.schedule, moving=False)
    needs = replace(devices, memory=activation_budget.memory).need_bytes(schedule, moves)
    return Fit(config, schedule, activation_budget.memory, devices.budget_bytes, alone_bytes, needs)


def _pooled(devices: Devices, activation_budget: ActivationBudget) -> ActivationBudget:
    """Return the room with the parts that move the fewest bytes, for hosts other than pairs. Raises BudgetTooSmall."""
    if devices.parts:
        with suppress(BudgetTooSmall):
            return _with_links(
                devices, fewest_sent(devices.schedule, activation_budget, devices.parts, partial(_arranged, devices))
            )
    return _with_links(devices, activation_budget)


def _arranged(devices: Devices, activation_budget: ActivationBudget) -> Schedule:
    return balance_over_hosts(devices.schedule, devices.hosts, activation_budget, devices.nodes)


def _with_links(devices: Devices, activation_budget: ActivationBudget) -> ActivationBudget:
    """Reduce the room by a pool's further links. Raises BudgetTooSmall."""
    links_bytes = [0] * len(activation_budget.room_bytes)
    while True:
        remainder = ActivationBudget(
            tuple(room - more for room, more in zip(activation_budget.room_bytes, links_bytes, strict=True)),
            activation_budget.memory,
        )
        schedule = _arranged(devices, remainder)
        needed_bytes = [max(before, devices.links_bytes(schedule, rank)) for rank, before in enumerate(links_bytes)]
        if needed_bytes == links_bytes:
            return remainder
        links_bytes = needed_bytes


def _levels(devices: Devices, partners: Partners) -> dict[Pair, int]:
    """Return by pair the least growth of its budgets in bytes, negative if they may shrink. A pool has one number."""
    highest = max(devices.budget_bytes)
    alone_bytes = devices.need_bytes(devices.schedule)
    upper = highest + max(0, *(need - budget for need, budget in zip(alone_bytes, devices.budget_bytes, strict=True)))
    if partners is None:
        level, worst = smallest_level(lambda level: _pooled(devices, devices.activation_budget(level - highest)), upper)
        return {worst: level - highest}
    levels = {}
    for pair in pairs_of(partners):
        level = smallest_level_of_pair(
            devices.schedule,
            partners,
            pair,
            lambda level: devices.activation_budget(level - highest),
            upper,
            devices.parts,
        )
        levels[pair] = level - highest
    return levels


def better_plan(devices: Devices, now: Schedule, costs: Costs | None = None) -> tuple[Fit | None, list[str]]:
    """Return a plan to replace the running one, `now`, or None, and lines that say why. `costs`: seconds, if known."""
    needs = devices.need_bytes(now)
    fits = all(need <= budget for need, budget in zip(needs, devices.budget_bytes, strict=True))
    holds = f"as measured, devices need {budget_text(needs)} GiB now"
    try:
        fit = within(devices, now.partners if devices.hosts == PAIR else None)
    except OverBudget as error:
        return None, [f"{holds}; {error}: the plan stays; recompute more, or put fewer layers on the fullest rank"]
    unmeasured_stages = sorted(_sent_stages(fit.schedule) - _sent_stages(now))
    if unmeasured_stages:
        stages = " and ".join(map(str, unmeasured_stages))
        return None, [
            f"{holds}; a plan that keeps the budget would send from stage {stages}, whose sizes are not measured "
            "yet: the plan stays"
        ]
    running = replace(fit, schedule=now, memory=devices.memory)
    sent_bytes = running.moved_bytes
    if costs is not None:
        fit = in_time(fit, devices.schedule, costs.holding(fit.memory))
    holds = f"{holds}, and {budget_text([sent_bytes])} GiB are evicted per iteration"
    if fits and fit.moved_bytes >= sent_bytes:
        waits_less = (
            costs is not None
            and fit.exposed_s is not None
            and fit.moved_bytes == sent_bytes
            and _helps(*(simulate(plan.schedule, costs.holding(plan.memory)) for plan in (running, fit)))
        )
        if not waits_less:
            return None, [f"{holds}: no plan needs less, so this one stays"]
        holds += ", and a plan that sends as much waits less for it"
    return fit, [f"{holds}; changing the plan:", *plan_lines(fit, "as measured")]


def _sent_stages(schedule: Schedule) -> set[int]:
    return {stay.stage for rank in range(schedule.num_ranks) for stay in hosts_of(schedule, rank)}


def one_budget_a_rank(budget_bytes: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Return one budget for each rank."""
    if len(budget_bytes) not in (1, num_ranks):
        raise ValueError(f"{len(budget_bytes)} budgets for {num_ranks} ranks: give one for all or one for each")
    return tuple(budget_bytes) * (num_ranks if len(budget_bytes) == 1 else 1)


def plan_in_time(setup: Setup, devices: Devices, fit: Fit, profile: Profile | None = None) -> Fit:
    """Return the plan with its waits on the setup's cluster, its transfers in time if that shortens them."""
    return in_time(fit, devices.schedule, balanced_costs(setup, devices, fit, profile)) if fit.moved_bytes else fit


def balanced_costs(setup: Setup, devices: Devices, fit: Fit, profile: Profile | None = None) -> Costs:
    """Return the costs of a setup that is balanced by this plan."""
    return costs_of(replace(setup, balance=fit.how, budget_bytes=devices.budget_bytes), profile)


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
    """Return the setup balanced within budgets, and its plan. Raises ValueError if no plan keeps them."""
    devices = predicted_devices(setup, budget_bytes, minimum_bytes)
    return _in_time(setup, devices, within_prediction(devices), profile)


def within_budget_or_none(setup: Setup, budget_bytes: Sequence[int], profile: Profile | None = None) -> Setup | None:
    """Return the setup balanced within budgets, or None. To find a budget that is enough takes ten times as long."""
    devices = predicted_devices(setup, budget_bytes)
    fit = within_or_none(devices)
    return None if fit is None else _in_time(setup, devices, fit, profile)[0]


def _in_time(setup: Setup, devices: Devices, fit: Fit, profile: Profile | None) -> tuple[Setup, Fit]:
    fit = plan_in_time(setup, devices, fit, profile)
    return replace(setup, balance=fit.how if fit.moved_bytes else None, budget_bytes=devices.budget_bytes), fit


def within_prediction(devices: Devices) -> Fit:
    """Return the plan within budgets. Raises ValueError if there is none, naming the command that lists other ways."""
    try:
        return within(devices)
    except OverBudget as error:
        raise ValueError(f"by prediction {error}. {ELSEWHERE}") from None
