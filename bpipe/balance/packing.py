"""Pack host buffers of given sizes into the room that ranks have to spare.

The search is exact if it ends within its limits, as it does at small sizes and whenever all items have one size: it
then
finds a packing if there is one, and the cheapest. Beyond the limits it keeps the first one found, nearest hosts first.
If items may stay with their owners, it minimises the bytes that pass through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

# Most steps to find a packing, and to find a cheaper one.
_MOST_STEPS = 50_000
_STEPS_TO_IMPROVE = 5_000

# In order of comparison: bytes between nodes, then bytes times distance.
Cost = tuple[int, int]


class Item(NamedTuple):
    """A host buffer of `num_bytes` for rank `owner`, through which `moved_bytes` pass in an iteration."""

    owner: int
    num_bytes: int
    moved_bytes: int


def pack(
    items: Sequence[Item], spare_bytes: Sequence[int], cost: Callable[[int, int], Cost], own_memory: bool = False
) -> list[int | None] | None:
    """Return the rank with room that takes each item, or None if no packing was found.

    Args:
        cost: Cost of one byte, by owner and host.
        own_memory: Whether an item for which no rank has room goes to its owner's host memory, given as None. That
            holds any, and a byte there costs more than all others elsewhere.
    """
    order = sorted(
        range(len(items)), key=lambda index: (-items[index].num_bytes, items[index].owner, -items[index].moved_bytes)
    )
    spare, num_ranks = list(spare_bytes), len(spare_bytes)
    if own_memory:
        # The item through which most passes is placed first, and the host after all ranks has room for all.
        order.sort(key=lambda index: -items[index].moved_bytes)
        spare.append(sum(item.num_bytes for item in items))
    far = max((cost(item.owner, host)[0] for item in items for host in range(num_ranks)), default=0)
    above_all = 1 + far * sum(item.moved_bytes for item in items)

    def cost_or_own(owner: int, host: int) -> Cost:
        return (above_all, 0) if host == num_ranks else cost(owner, host)

    search = _Search([items[index] for index in order], spare, cost_or_own)
    search.place(0, (0, 0), 0)
    if search.best is None:
        return None
    hosts: list[int | None] = [None] * len(items)
    for index, host in zip(order, search.best, strict=True):
        hosts[index] = None if host == num_ranks else host
    return hosts


class _Option(NamedTuple):
    cost: Cost
    host: int


class _Search:
    """Depth-first search, largest items and nearest hosts first, without branches that cannot become cheaper."""

    def __init__(self, items: Sequence[Item], free: list[int], cost: Callable[[int, int], Cost]) -> None:
        self.items, self.free = items, free
        self.chosen: list[int] = []
        self.best: list[int] | None = None
        self.best_cost: Cost | None = None
        self.steps = 0
        self.seen: dict[tuple[int, int, tuple[int, ...]], Cost] = {}
        self.options = [
            sorted(_Option(cost(item.owner, host), host) for host in range(len(free)) if host != item.owner)
            for item in items
        ]
        # Least cost of all items from each on.
        nearest = [
            next((option.cost for option in options if free[option.host] >= item.num_bytes), (0, 0))
            for item, options in zip(items, self.options, strict=True)
        ]
        least = [_times(price, item.moved_bytes) for price, item in zip(nearest, items, strict=True)]
        self.least = list(accumulate(reversed(least), _plus, initial=(0, 0)))[::-1]
        # Number of items from each on that have its size.
        self.alike = [
            sum(other.num_bytes == item.num_bytes for other in items[place:]) for place, item in enumerate(items)
        ]

    def place(self, index: int, spent: Cost, first: int) -> None:
        """Place the items from `index` on, the first no nearer than its owner's option `first`."""
        if self.best_cost is not None and (
            self.steps > _STEPS_TO_IMPROVE or _plus(spent, self.least[index]) >= self.best_cost
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
            # Of equal items, the one through which more passes comes first, and is nearer.
            self.place(index + 1, _plus(spent, _times(option.cost, item.moved_bytes)), number if again else 0)
            self.chosen.pop()
            self.free[option.host] += item.num_bytes

    def _leads_nowhere(self, index: int, spent: Cost, first: int) -> bool:
        """Note the cost, and tell whether the search is over, was here at no higher cost, or has no room for all of
        this size."""
        state = (index, first, tuple(self.free))
        before = self.seen.get(state)
        if self.steps > _MOST_STEPS or (before is not None and before <= spent):
            return True
        self.seen[state] = spent
        size = self.items[index].num_bytes
        return bool(size) and sum(room // size for room in self.free if room > 0) < self.alike[index]


def _plus(one: Cost, other: Cost) -> Cost:
    return one[0] + other[0], one[1] + other[1]


def _times(cost: Cost, num_bytes: int) -> Cost:
    return cost[0] * num_bytes, cost[1] * num_bytes
