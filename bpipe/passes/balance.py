"""Decide which activations leave a rank and when they come back. In: a compute-only Schedule and a bound a rank. Out: one with transfers.

Walk a rank's slots. When what starts in the next slot would exceed the bound, send away, beside this slot, the finished micro-batch
needed furthest in the future; load it beside the slot before its backward. On 1F1B with `mu_opt` this is Algorithm 1 of the BPipe paper
(Kim et al. 2023), with its steady-phase eviction read as "the latest finished forward". An away micro-batch is used once more, so
furthest-first (Belady's rule) needs the fewest evictions there can be. The acceptor's halves stand in the same slots of its own row.
Knows no tensors, no clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bpipe.ir.action import OTHER_END, Action, Kind
from bpipe.ir.schedule import Schedule, Slot
from bpipe.simulate.memory import live_counts

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


class Infeasible(ValueError):
    """A bound no choice of transfers can keep: `rank`, the `slot` where it breaks, and `needed`, the smallest bound that slot allows."""

    def __init__(self, rank: int, slot: int, needed: int, reason: str) -> None:
        super().__init__(reason)
        self.rank, self.slot, self.needed = rank, slot, needed


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's transfers by slot, its own halves only."""

    transfers: dict[int, list[Action]]


def default_partners(num_ranks: int) -> tuple[int, ...]:
    """Rank s and rank p-1-s; the middle of an odd number is its own partner and never transfers."""
    return tuple(reversed(range(num_ranks)))


def balance(schedule: Schedule, bounds: Sequence[int], partners: Sequence[int] | None = None) -> Schedule:
    """The schedule with the fewest evictions that keep every rank within its bound.

    Raises ValueError where a bound cannot be kept, naming the smallest that can.
    """
    chosen = default_partners(schedule.num_ranks) if partners is None else tuple(partners)
    check_pairing(schedule.num_ranks, chosen)
    check_bounds(schedule.num_ranks, bounds)
    plans = {}
    for rank in range(schedule.num_ranks):
        counts = live_counts(schedule, rank)
        if max(counts) > bounds[rank]:
            plans[rank] = evictions(schedule, rank, bounds[rank])
    balanced = with_transfers(schedule, plans, chosen)
    for rank in range(schedule.num_ranks):
        peak = max(live_counts(balanced, rank))
        if peak > bounds[rank]:
            raise Infeasible(rank, live_counts(balanced, rank).index(peak), peak, f"rank {rank} holds {peak}, its bound is {bounds[rank]}")
    return replace(balanced, bounds=tuple(bounds))


def evictions(schedule: Schedule, rank: int, bound: int) -> Plan:
    """The fewest evictions that keep the rank's own micro-batches within `bound`, each as late as it may be, and their loads."""
    row = schedule.ranks[rank]
    needed_at = {}
    for slot, cell in enumerate(row):
        if cell.compute is not None and (cell.compute.kind is _BACKWARD or cell.compute.kind is _INPUT):
            needed_at[cell.compute.stage, cell.compute.microbatch] = slot
    transfers: dict[int, list[Action]] = {}
    away: dict[int, Action] = {}  # slot of the backward -> the forward whose activations are away
    finished: list[tuple[int, int, int]] = []  # (-slot of the backward, stage, micro-batch): a heap, furthest first
    held = 0
    for slot, cell in enumerate(row):
        compute = cell.compute
        following = row[slot + 1].compute if slot + 1 < len(row) else None
        if slot + 1 in away:
            gone = away.pop(slot + 1)
            transfers.setdefault(slot, []).append(Action(gone.stage, Kind.LOAD, gone.microbatch))
            held += 1
        if compute is not None and compute.kind is _FORWARD:
            held += 1
        elif compute is not None and compute.kind is not _INPUT:
            held -= 1
        starts = (following is not None and following.kind is _FORWARD) + (slot + 2 in away)
        for _ in range(held + starts - bound):
            if not finished or -finished[0][0] <= slot + 2:
                raise Infeasible(
                    rank,
                    slot + 1,
                    held + starts,
                    f"rank {rank} cannot keep to {bound}: slot {slot + 1} needs {held + starts}, and nothing it could send away is done",
                )
            needed, stage, microbatch = heapq.heappop(finished)
            transfers.setdefault(slot, []).append(Action(stage, Kind.EVICT, microbatch))
            away[-needed] = Action(stage, _FORWARD, microbatch)
            held -= 1
        if compute is not None and compute.kind is _FORWARD:
            heapq.heappush(finished, (-needed_at[compute.stage, compute.microbatch], compute.stage, compute.microbatch))
    return Plan(transfers)


def with_transfers(schedule: Schedule, plans: dict[int, Plan], partners: tuple[int, ...]) -> Schedule:
    """The schedule with every plan's transfers and, in the same slots, their other ends."""
    rows = [list(row) for row in schedule.ranks]
    for rank, plan in plans.items():
        for slot, actions in plan.transfers.items():
            others = tuple(Action(action.stage, OTHER_END[action.kind], action.microbatch) for action in actions)
            for row, added in ((rows[rank], tuple(actions)), (rows[partners[rank]], others)):
                row[slot] = Slot(row[slot].compute, row[slot].transfers + added)
    return replace(schedule, ranks=tuple(tuple(row) for row in rows), partners=partners)


def check_pairing(num_ranks: int, partners: Sequence[int]) -> None:
    """Every rank has one partner, and is its partner's."""
    if len(partners) != num_ranks:
        raise ValueError(f"{len(partners)} partners for {num_ranks} ranks: give one for each rank")
    for rank, partner in enumerate(partners):
        if not 0 <= partner < num_ranks:
            raise ValueError(f"rank {rank}: partner {partner} is not a rank, ranks are 0 to {num_ranks - 1}")
        if partners[partner] != rank:
            raise ValueError(f"rank {rank} has partner {partner}, but rank {partner} has partner {partners[partner]}: pair them both ways")


def check_bounds(num_ranks: int, bounds: Sequence[int]) -> None:
    """One positive bound a rank."""
    if len(bounds) != num_ranks:
        raise ValueError(f"{len(bounds)} bounds for {num_ranks} ranks: give one for all or one for each")
    for rank, bound in enumerate(bounds):
        if bound < 1:
            raise ValueError(f"rank {rank}: bound {bound} is below 1, and a micro-batch at work must be held")
