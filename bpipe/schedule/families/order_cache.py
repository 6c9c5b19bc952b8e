"""Remember the orders that were found last. In: what they were made of, how to make them. Out: orders. Knows no family."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from bpipe.schedule.families.unit_grid import Order


class RememberedOrders:
    """Orders by what they were made of: the latest, so many as have `most` actions in all, and two at least.

    By number alone orders of hundreds of ranks would fill a machine's memory, and those of few be forgotten.
    """

    def __init__(self, most: int) -> None:
        self._most, self._num = most, 0
        self._found: OrderedDict[Hashable, tuple[int, Sequence[Order]]] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], Sequence[Order]]) -> Sequence[Order]:
        """Return the orders of a key, made now or before."""
        known = self._found.get(key)
        if known is None:
            orders = make()
            known = sum(map(len, orders)), orders
            self._found[key] = known
            self._num += known[0]
        self._found.move_to_end(key)
        while self._num > self._most and len(self._found) > 2:
            self._num -= self._found.popitem(last=False)[1][0]
        return known[1]
