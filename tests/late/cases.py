"""Schedules that run on late devices, by name: every way in which activations are evicted and loaded."""

from collections.abc import Callable

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import balance
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.schedule import Schedule


def balanced(
    name: str,
    p: int,
    m: int,
    v: int = 1,
    bounds: tuple[int, ...] | None = None,
    hosts: str = "pair",
    slices: int = 1,
) -> Schedule:
    group_size = 2 if name.startswith("grouped") else None
    how = BalanceConfig(bounds, hosts=hosts)
    return build(ScheduleConfig(name, p, m, num_chunks=v, balance=how, group_size=group_size, slices=slices))


SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "1f1b": lambda: balanced("1f1b", 4, 8),
    # A host buffer is refilled before the backward of its previous content.
    "1f1b of 6": lambda: balanced("1f1b", 6, 10),
    "1f1b of 8": lambda: balanced("1f1b", 8, 16),
    "interleaved": lambda: balanced("interleaved-1f1b", 4, 8, 2),
    "split": lambda: balanced("1f1b-split", 4, 8),
    "grouped": lambda: balanced("grouped-interleaved", 4, 6, 2),
    "v-half": lambda: balance(build(ScheduleConfig("v-half", 4, 6, num_chunks=2)), (4, 3, 12, 12), (2, 3, 0, 1)),
    "bidirectional": lambda: balance(build(ScheduleConfig("chimera", 4, 8)), (3, 6, 6, 3), (1, 0, 3, 2)),
    "pool": lambda: balanced("1f1b", 4, 8, bounds=(2, 3, 3, 3), hosts="pool"),
    "own memory": lambda: balanced("1f1b", 4, 8, hosts="host"),
    # Keys and values stay; the rest of what a slice saves is evicted.
    "slices": lambda: balanced("1f1b", 4, 4, slices=4),
    "slices of 2 chunks": lambda: balanced("interleaved-1f1b", 4, 4, 2, slices=2),
    "slices in own memory": lambda: balanced("1f1b", 4, 4, bounds=(2,), hosts="host", slices=4),
    "behind devices": lambda: balanced("interleaved-1f1b", 4, 8, 2, (6,), "all"),
}
