"""Order computations in beats, for groups too small for turns.

In: turns, number of ranks, a `Period`. Out: every rank's order.

Where groups have fewer than p / 2 micro-batches, ranks that take I, W and F in turn wait for each other. Here time goes
in periods of six slots, of which two are of forwards. A forward enters rank 0 in an even slot and moves a rank per slot;
the first halves of backwards go the other way in slots of the other parity, so nobody ever waits for another's.
Weights' halves stand in the first free slots. Made for computations of equal length; with others the order is the same,
and takes longer. Knows no costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bpipe.schedule.action import Kind
from bpipe.schedule.families.turns import NONE, Turns

PERIOD = 6


class Period(NamedTuple):
    """A periodic pattern: the slots of a period in which forwards enter the first rank and backwards the last.

    `later`: slots by which backwards begin later than they could. `ahead`: micro-batches of a chunk that the first rank
    holds at most.
    """

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]
    later: int
    ahead: int


def periodic_orders(taken: Turns, num_ranks: int, beat: Period) -> list[list[Kind]] | None:
    """Return what every rank computes, in order, or None where the first rank may hold too little to go on."""
    entries = _entries(taken, num_ranks, beat)
    return None if entries is None else [_row(rank, num_ranks, *entries) for rank in range(num_ranks)]


def _entries(taken: Turns, num_ranks: int, beat: Period) -> tuple[list[int], list[int]] | None:
    """Return the slots in which forwards start on the first rank, and first halves on the last."""
    total, before, own = len(taken.forwards), taken.before, taken.own
    forwards: list[int] = []
    inputs: list[int] = []
    slot = given_back = idle = 0
    while len(inputs) < total:
        idle += 1
        # A forward's room is given back when the W right behind its I is over.
        while given_back < len(inputs) and inputs[given_back] + num_ranks + 1 <= slot:
            given_back += 1
        number = len(forwards)
        in_beat = number < total and slot % PERIOD in beat.forwards and number - given_back < beat.ahead
        if in_beat and _has_passed(forwards, before[number], slot - num_ranks):
            forwards.append(slot)
            idle = 0
        number = len(inputs)
        if (slot - num_ranks) % PERIOD in beat.backwards and own[number] < len(forwards):
            first = max(forwards[own[number]], forwards[own[0]] + beat.later) + num_ranks
            if first <= slot and _has_passed(inputs, before[number], slot - num_ranks):
                inputs.append(slot)
                idle = 0
        if idle > 2 * (num_ranks + PERIOD):
            return None
        slot += 1
    return forwards, inputs


def _has_passed(entered: Sequence[int], number: int, latest: int) -> bool:
    """Return whether the one that must be through all ranks entered in time for that, if there is one."""
    return number == NONE or entered[number] <= latest


def _row(rank: int, num_ranks: int, forwards: Sequence[int], inputs: Sequence[int]) -> list[Kind]:
    row = {slot + rank: Kind.FORWARD for slot in forwards}
    own_inputs = [slot + num_ranks - 1 - rank for slot in inputs]
    row.update(dict.fromkeys(own_inputs, Kind.BACKWARD_INPUT))
    free = 0
    for slot in own_inputs:
        free = max(free, slot + 1)
        while free in row:
            free += 1
        row[free] = Kind.BACKWARD_WEIGHT
    return [kind for _, kind in sorted(row.items(), key=lambda one: one[0])]
