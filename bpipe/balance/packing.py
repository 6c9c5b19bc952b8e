"""Put host buffers of given sizes into the room that ranks have to spare.

In: items, room, what distances cost. Out: a rank for each item, or None for its owner's host memory.

Exact where the search ends within its limits, as it does at small sizes and wherever all items are of one size: then
there is a packing whenever there can be one, and none costs less. Beyond the limits what was found first stays, nearest
hosts first. Where items may stay with their owners, in its own memory, what passes through those is least. Knows no
schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

# So many steps are taken to find a packing, and to find a cheaper one when there is one.
MOST_STEPS = 50_000
STEPS_TO_IMPROVE = 5_000

# What is compared first stands first: bytes between nodes, then bytes times distance.
Cost = tuple[int, int]


class Item(NamedTuple):
    """A host buffer of `num_bytes` for rank `owner`, through which `moved_bytes` pass in an iteration."""

    owner: int
    num_bytes: int
    moved_bytes: int


def pack(
    items: Sequence[Item], spare_bytes: Sequence[int], cost: Callable[[int, int], Cost], own_memory: bool = False
) -> list[int | None] | None:
    """Return the rank with room that takes each item, or None where no packing was found.

    `cost(owner, host)` is that of one byte.

    `own_memory`: where no rank has room, an item goes to its owner's host memory, which stands as None. That holds
    any, and a byte there costs more than all others elsewhere.
    """
    order = sorted(
        range(len(items)), key=lambda one: (-items[one].num_bytes, items[one].owner, -items[one].moved_bytes)
    )
    spare = list(spare_bytes)
    if own_memory:
        # What passes most is placed first, and behind the ranks is room for all.
        order.sort(key=lambda one: -items[one].moved_bytes)
        spare.append(sum(item.num_bytes for item in items))
    search = _Search([items[one] for one in order], spare, _or_own_memory(items, spare_bytes, cost))
    search.place(0, (0, 0), 0)
    if search.best is None:
        return None
    hosts: list[int | None] = [None] * len(items)
    for one, host in zip(order, search.best, strict=True):
        hosts[one] = None if host == len(spare_bytes) else host
    return hosts


def _or_own_memory(
    items: Sequence[Item], spare_bytes: Sequence[int], cost: Callable[[int, int], Cost]
) -> Callable[[int, int], Cost]:
    """Behind all ranks comes own memory."""
    far = max((cost(item.owner, host)[0] for item in items for host in range(len(spare_bytes))), default=0)
    above_all = 1 + far * sum(item.moved_bytes for item in items)
    return lambda owner, host: (above_all, 0) if host == len(spare_bytes) else cost(owner, host)


@dataclass(slots=True)
class _Option:
    host: int
    cost: Cost


class _Search:
    """Depth first, largest items first and nearest hosts first; what cannot become cheaper than the best so far is
    left."""

    def __init__(self, items: Sequence[Item], free: list[int], cost: Callable[[int, int], Cost]) -> None:
        self.items, self.free = items, free
        self.chosen: list[int] = []
        self.best: list[int] | None = None
        self.best_cost: Cost | None = None
        self.steps = 0
        self.seen: dict[tuple[int, int, tuple[int, ...]], Cost] = {}
        self.options = [
            sorted(
                (_Option(host, cost(item.owner, host)) for host in range(len(free)) if host != item.owner),
                key=lambda option: (option.cost, option.host),
            )
            for item in items
        ]
        # What all items from one on cost at least.
        least = [
            _times(
                next((option.cost for option in options if free[option.host] >= item.num_bytes), (0, 0)),
                item.moved_bytes,
            )
            for item, options in zip(items, self.options, strict=True)
        ]
        self.least = list(accumulate(reversed(least), _plus, initial=(0, 0)))[::-1]
        # How many items from one on are of its size.
        self.alike = [
            sum(other.num_bytes == item.num_bytes for other in items[place:]) for place, item in enumerate(items)
        ]

    def place(self, index: int, spent: Cost, first: int) -> None:
        """Place the items from `index` on; that one no nearer than its owner's option `first`."""
        if self.best_cost is not None and (
            self.steps > STEPS_TO_IMPROVE or _plus(spent, self.least[index]) >= self.best_cost
        ):
            return
        if index == len(self.items):
            self.best, self.best_cost = list(self.chosen), spent
            return
        self.steps += 1
        item, options = self.items[index], self.options[index]
        if self._leads_nowhere(index, spent, first):
            return
        following = self.items[index + 1] if index + 1 < len(self.items) else None
        again = following is not None and following[:2] == item[:2]
        for number in range(first, len(options)):
            option = options[number]
            if self.free[option.host] < item.num_bytes:
                continue
            self.free[option.host] -= item.num_bytes
            self.chosen.append(option.host)
            # Of what is alike, through which more passes stands first, and nearer.
            self.place(index + 1, _plus(spent, _times(option.cost, item.moved_bytes)), number if again else 0)
            self.chosen.pop()
            self.free[option.host] += item.num_bytes

    def _leads_nowhere(self, index: int, spent: Cost, first: int) -> bool:
        """Return whether the search is over, was here at no higher cost, or has no room for all items of this size;
        else note the cost."""
        state = (index, first, tuple(self.free))
        known = self.seen.get(state)
        if self.steps > MOST_STEPS or (known is not None and known <= spent):
            return True
        self.seen[state] = spent
        size = self.items[index].num_bytes
        return bool(size) and sum(room // size for room in self.free if room > 0) < self.alike[index]


def _plus(one: Cost, other: Cost) -> Cost:
    return one[0] + other[0], one[1] + other[1]


def _times(cost: Cost, num_bytes: int) -> Cost:
    return cost[0] * num_bytes, cost[1] * num_bytes
