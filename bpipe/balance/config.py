"""How to balance a schedule: `BalanceConfig`, and the function that balances by it."""

from collections.abc import Sequence
from dataclasses import dataclass

from bpipe.balance.budget import ActivationBudget, balance_within
from bpipe.balance.deadlines import Windows, balance_in_time
from bpipe.balance.pairs import balance
from bpipe.balance.pool import balance_over_hosts, balance_over_hosts_within
from bpipe.names import unknown
from bpipe.schedule.hosts import ARRANGEMENTS, PAIR
from bpipe.schedule.schedule import Schedule

# The names in commands and files of no `BalanceConfig`, and of one.
BALANCES = ("none", "bpipe")


@dataclass(frozen=True, slots=True)
class BalanceConfig:
    """How to balance a schedule."""

    bounds: tuple[int, ...] | None = None
    """Most micro-batches of a chunk that a rank holds: one number per rank, or one for all. By default the smallest
    that every pair can keep."""

    partners: tuple[int, ...] | None = None
    """By rank, the rank that hosts for it; by default the heaviest is paired with the lightest, and so on."""

    buffers_stay: bool = False
    """Whether host buffers count all the time, as in a run, and not only while they are full, if an order is chosen for
    a bound. With any hosts but pairs they always do."""

    activation_budget: ActivationBudget | None = None
    """Bytes of each rank, instead of bounds."""

    hosts: str = PAIR
    """Hosts (`schedule.hosts`): "pair"; "pool", any rank with room for any other; "host", the memory of the rank's own
    node; "all", the pool first, then that memory."""

    nodes: tuple[int, ...] | None = None
    """By rank, its node; None if all share one. Not for pairs."""

    windows: Windows | None = None
    """Durations of computations and transfers; with a budget, transfers are moved to end in time."""

    parts: tuple[int, ...] = ()
    """Stages that evict only the bytes that the budget requires instead of all that can move."""

    def __post_init__(self) -> None:
        if self.activation_budget is not None and self.bounds is not None:
            raise ValueError("bounds and activation_budget exclude each other: give one of them")
        if self.windows is not None and self.activation_budget is None:
            raise ValueError(
                "windows move the transfers of a plan made for activation_budget: give activation_budget, too"
            )
        if self.parts and self.activation_budget is None:
            raise ValueError("parts of micro-batches are evicted only within activation_budget: give it, too")
        if self.hosts not in ARRANGEMENTS:
            raise ValueError(unknown("hosts", self.hosts, ARRANGEMENTS))
        if self.hosts != PAIR and self.partners is not None:
            raise ValueError(f"partners define pairs, but hosts is {self.hosts!r}: give one of the two")

    @property
    def part_bytes(self) -> dict[int, int]:
        """Bytes of each micro-batch that leave, by stage that evicts only a part."""
        if self.activation_budget is None:
            return {}
        return {stage: self.activation_budget.memory.size(stage, 0).moved_bytes for stage in self.parts}


def name_of(balance: BalanceConfig | None) -> str:
    """Return the name of a balance in commands and files, as `named_balance` takes it."""
    return BALANCES[balance is not None]


def named_balance(
    name: str,
    bounds: Sequence[int] | None = None,
    partners: Sequence[int] | None = None,
    buffers_stay: bool = False,
    hosts: str | None = None,
) -> BalanceConfig | None:
    """Return the balance that a command or a file names."""
    if name not in BALANCES:
        raise ValueError(unknown("balance", name, BALANCES))
    if name != BALANCES[0]:
        both = (None if bounds is None else tuple(bounds), None if partners is None else tuple(partners))
        return BalanceConfig(*both, buffers_stay, hosts=hosts or PAIR)
    remedy = 'but balance is "none": choose balance "bpipe" or leave'
    if hosts is not None:
        raise ValueError(f"hosts {hosts} says how to balance, {remedy} hosts out")
    if bounds is not None or partners is not None:
        raise ValueError(f"bounds and partners say how to balance, {remedy} them out")
    return None


def balanced(schedule: Schedule, how: BalanceConfig) -> Schedule:
    """Return the schedule with transfers: one bound for each rank, one for all, or the smallest for all."""
    num_ranks, budget = schedule.num_ranks, how.activation_budget
    if budget is not None:
        if how.hosts == PAIR:
            fitted = balance_within(schedule, budget, how.partners)
        else:
            fitted = balance_over_hosts(schedule, how.hosts, budget, how.nodes or ())
        return fitted if how.windows is None else balance_in_time(fitted, budget, how.windows)
    if how.bounds is not None and len(how.bounds) not in (1, num_ranks):
        raise ValueError(f"{len(how.bounds)} bounds for {num_ranks} stages: give one for all or one for each")
    bounds = None if how.bounds is None else how.bounds * (num_ranks if len(how.bounds) == 1 else 1)
    if how.hosts == PAIR:
        return balance(schedule, bounds, how.partners)
    return balance_over_hosts_within(schedule, how.hosts, bounds, how.nodes or ())
