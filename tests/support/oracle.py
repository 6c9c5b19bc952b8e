"""Check a schedule in a slow and obvious way: walk through its grid and execute each slot.

`is_sound` shares no code with `bpipe.schedule.check.rules`, and checks all of its rules except deadlocks. It uses only
the grid.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bpipe.schedule.action import OTHER_END, TRANSFER, Action, Kind
from bpipe.schedule.schedule import Schedule, Slot

Key = tuple[int, int]
BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass
class State:
    """The stages and micro-batches in each state.

    Attributes:
        forwarded: Those whose forward has run.
        backwarded: Those whose gradient has been passed on.
        over: Those whose activations have been released.
        present: Those whose activations are on their rank.
        away: Those whose activations are on their host.
    """

    forwarded: set[Key] = field(default_factory=set)
    backwarded: set[Key] = field(default_factory=set)
    over: set[Key] = field(default_factory=set)
    present: set[Key] = field(default_factory=set)
    away: set[Key] = field(default_factory=set)

    def copy(self) -> State:
        return State(*(set(keys) for keys in (self.forwarded, self.backwarded, self.over, self.present, self.away)))


def is_sound(schedule: Schedule) -> bool:
    """Run all ranks slot by slot; anything impossible or left undone makes the schedule unsound."""
    assert schedule.layout.num_pipes == 1, "only schedules of one pipe can be checked"
    state = State()
    # Too few slots for all computations.
    if schedule.num_stages * schedule.num_microbatches > sum(map(len, schedule.ranks)):
        return False
    all_keys = {
        (stage, microbatch) for stage in range(schedule.num_stages) for microbatch in range(schedule.num_microbatches)
    }
    for column in zip(*schedule.ranks, strict=True):
        before = state.copy()
        counts = [
            sum(schedule.layout.placements[0][stage] == rank for stage, _ in state.present)
            for rank in range(schedule.num_ranks)
        ]
        for stage, _ in state.away:
            counts[schedule.partners[schedule.layout.placements[0][stage]] if schedule.partners else 0] += 1
        for rank, cell in enumerate(column):
            if cell.overlapped is not None and (cell.compute is None or not overlaps(cell.compute, cell.overlapped)):
                return False
            for action in (cell.compute, cell.overlapped):
                if action is not None and not computes(schedule, rank, action, all_keys, before, state, counts):
                    return False
            for moved in cell.transfers:
                if not moves(schedule, rank, moved, column, before, state, counts):
                    return False
        # What is evicted, returned or computed backward is still held during this slot.
        if schedule.bounds is not None and any(
            count > bound for count, bound in zip(counts, schedule.bounds, strict=True)
        ):
            return False
    return state.forwarded == state.backwarded == state.over == all_keys


def overlaps(first: Action, second: Action) -> bool:
    return first.kind is Kind.FORWARD and second.kind in BACKWARDS


def computes(
    schedule: Schedule, rank: int, action: Action, every: set[Key], began: State, now: State, holding: list[int]
) -> bool:
    """Run a computation if its operands existed when the slot began; return whether they did."""
    key = (action.stage, action.microbatch)
    if key not in every or schedule.layout.placements[0][action.stage] != rank:
        return False
    if action.kind is Kind.FORWARD:
        if key in now.forwarded or (action.stage and (action.stage - 1, action.microbatch) not in began.forwarded):
            return False
        now.forwarded.add(key)
        now.present.add(key)
        holding[rank] += 1
        return True
    if action.kind in BACKWARDS:
        after = (action.stage + 1, action.microbatch)
        if key in now.backwarded or key not in began.present or (after in every and after not in began.backwarded):
            return False
        now.backwarded.add(key)
    elif action.kind is not Kind.BACKWARD_WEIGHT or key not in began.backwarded or key in now.over:
        return False
    if action.kind is not Kind.BACKWARD_INPUT:
        now.over.add(key)
        now.present.discard(key)
    return True


def moves(
    schedule: Schedule, rank: int, moved: Action, column: tuple[Slot, ...], began: State, now: State, holding: list[int]
) -> bool:
    """Move one micro-batch if it can be moved in this slot and the other end is in it, too; return whether it was."""
    if schedule.partners is None or schedule.partners[rank] == rank or moved.kind not in TRANSFER:
        return False
    partner, key = schedule.partners[rank], (moved.stage, moved.microbatch)
    if Action(moved.stage, OTHER_END[moved.kind], moved.microbatch) not in column[partner].transfers:
        return False
    evictor = rank if moved.kind in (Kind.EVICT, Kind.LOAD) else partner
    if moved.stage not in range(schedule.num_stages) or schedule.layout.placements[0][moved.stage] != evictor:
        return False
    if key in [
        (action.stage, action.microbatch)
        for action in (column[evictor].compute, column[evictor].overlapped)
        if action is not None
    ]:
        return False
    if moved.kind is Kind.EVICT:
        if key not in began.present or key not in now.present or key in began.backwarded:
            return False
        now.present.discard(key)
        now.away.add(key)
        holding[partner] += 1
    elif moved.kind is Kind.LOAD:
        if key not in began.away or key not in now.away:
            return False
        now.away.discard(key)
        now.present.add(key)
        holding[rank] += 1
    return True
