"""Orders are made once while they are remembered, and the oldest are forgotten by their size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bpipe.generate.place import Order
from bpipe.generate.remembered import RememberedOrders
from bpipe.ir.action import Action, Kind


def orders(length: int) -> Sequence[Order]:
    return [[Action(0, Kind.FORWARD, number) for number in range(length)]]


def test_the_latest_are_remembered_by_their_size() -> None:
    made: list[int] = []

    def making(length: int) -> Callable[[], Sequence[Order]]:
        def make() -> Sequence[Order]:
            made.append(length)
            return orders(length)

        return make

    remembered = RememberedOrders(10)
    first = remembered.of("a", making(4))
    assert remembered.of("a", making(4)) is first
    remembered.of("b", making(5))
    remembered.of("a", making(4))
    assert made == [4, 5]
    # Six more are too many: the one that was asked for longest ago goes.
    remembered.of("c", making(6))
    assert remembered.of("a", making(4)) is first
    remembered.of("b", making(5))
    assert made == [4, 5, 6, 5]
