"""Room for micro-batches of differing sizes: at first with a reserve, then for the largest that was seen."""

from __future__ import annotations

from bpipe.runtime.evictor import Sizing, Unmoved
from bpipe.schedule.memory import RESERVE
from bpipe.transport.memory import aligned, allocated_bytes


def test_a_room_has_a_reserve_and_grows_to_the_most_that_was_seen() -> None:
    sizing = Sizing(differing=True)
    (room,) = sizing.first(0, (5000, 600))
    assert room == aligned(int(allocated_bytes((5000, 600)) * (1 + RESERVE)))
    assert sizing.leaves(0, 1, (room,))
    assert not sizing.leaves(0, 2, (room, 1))
    sizing.computes()
    assert sizing.stayed == Unmoved(1, room + 1), "during its eviction it may be here"
    sizing.away(0, 2)
    sizing.computes()
    assert not sizing.leaves(0, 3, (2 * room,))
    sizing.away(0, 3)
    sizing.back(0, 2)
    sizing.computes()
    assert sizing.stayed == Unmoved(2, 3 * room + 1, 1, 2 * room)
    (grown,) = sizing.grow()[0]
    assert grown >= 2 * room * (1 + RESERVE)
    assert sizing.grow() == {}
    sizing.begin()
    assert sizing.leaves(0, 3, (2 * room,))
    assert (sizing.stayed, sizing.num_grown, sizing.moved_bytes[0]) == (Unmoved(), 1, 2 * room)
