"""Say what passes between the ranks of a schedule: values, whence and where to.

In: a Schedule. Out: `Passing`. Knows no exchange: when something is sent, `lower` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from bpipe.schedule.action import COMPUTE, SHARDS, Action, Kind
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.program import MessageTable
from bpipe.schedule.schedule import Schedule, Slot

# In place of the rank at a message's other end: it is a collective.
ALL = -2
NOBODY = -1
# The value of a pipe's first micro-batch and the rank at its other end, by kind and stage.
_Table = dict[Kind, list[tuple[int, int]]]


class Passing:
    """Values that pass between ranks.

    By rank, with an entry per computation, in order: what it needs and from whom, what it makes and for whom.

    From and for NOBODY where that stays on the rank.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.messages = schedule, MessageTable(schedule)
        dependencies = self.messages.dependencies
        # A pipe that no micro-batch takes passes nothing.
        pipes = range(min(schedule.layout.num_pipes, schedule.num_microbatches))
        tables = [
            (_ends(dependencies, dependencies.operand_of, pipe), _ends(dependencies, dependencies.value_of, pipe))
            for pipe in pipes
        ]
        found = [_values(row, tables) for row in schedule.ranks]
        self.needed, self.needed_from, self.made, self.made_for = (
            [of_rank[part] for of_rank in found] for part in range(4)
        )

    def received_behind(self) -> list[list[list[int]]]:
        """Return by rank, for the loop's start and each computation, or two that overlap, what neighbours make, by the
        grid, from then until its next."""
        # By rank and slot: how many of these it has begun by then.
        begun = [list(accumulate(cell.compute is not None for cell in row)) for row in self.schedule.ranks]
        received: list[list[list[int]]] = [[[] for _ in range(of_rank[-1] + 1)] for of_rank in begun]
        for row, made, made_for in zip(self.schedule.ranks, self.made, self.made_for, strict=True):
            slots = (slot for slot, cell in enumerate(row) for _ in cell.computations)
            for slot, value, to in zip(slots, made, made_for, strict=True):
                if to != NOBODY:
                    received[to][begun[to][slot]].append(value)
        return received

    def inbound(self) -> list[dict[int, list[int]]]:
        """Return by rank and channel what a rank receives without having a part in making it, in the order in which it is
        sent.

        A channel is a directed edge, named by its sender, or, as a negative number, collectives of one sort and sender.
        """
        inbound: list[dict[int, list[int]]] = [{} for _ in self.made]
        dependencies = self.messages.dependencies
        for sender, (made, made_for) in enumerate(zip(self.made, self.made_for, strict=True)):
            for value, to in zip(made, made_for, strict=True):
                if to >= 0:
                    inbound[to].setdefault(sender, []).append(value)
                elif to == ALL:
                    makers, takers = dependencies.route(value)
                    for rank in set(takers) - set(makers):
                        inbound[rank].setdefault(self.channel(value, to), []).append(value)
        return inbound

    def channel(self, value: int, source: int) -> int:
        """Return what a value comes through.

        With several pipes, a sort of collectives has several senders, each with an order of its own.
        """
        if source != ALL:
            return source
        dependencies = self.messages.dependencies
        return ~(value // dependencies.num_microbatches * dependencies.num_ranks + dependencies.route(value).makers[0])


def _ends(dependencies: Dependencies, ask: Callable[[Action], int], pipe: int) -> _Table:
    """What every computation makes, or needs (`ask`), of micro-batch 0 by the routes of a pipe, and who is at its
    other end."""
    making = ask == dependencies.value_of
    stages = {kind: range(dependencies.num_ranks if kind in SHARDS else dependencies.num_stages) for kind in COMPUTE}
    return {
        kind: [
            _end(dependencies, action, ask(action), making)
            for action in (Action(stage, kind, pipe) for stage in of_kind)
        ]
        for kind, of_kind in stages.items()
    }


def _end(dependencies: Dependencies, action: Action, value: int, making: bool) -> tuple[int, int]:
    """What passes of the micro-batch 0, and who is at the other end of the computation that makes it, or needs it."""
    nothing = (NOTHING, NOBODY)
    if value == NOTHING or not dependencies.route(value).takers:
        return nothing
    route, first = dependencies.route(value), value - action.microbatch
    # The one that makes a value for all shards has it for its own.
    if action.kind in SHARDS and route.makers == (action.stage,) and not making:
        return nothing
    if len(route.parties) > 2 or len(route.makers) > 1:
        return first, ALL
    if len(route.parties) == 2:
        return first, route.parties[1] if making else route.makers[0]
    return nothing


def _values(
    row: Sequence[Slot], tables: Sequence[tuple[_Table, _Table]]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """What the row's computations need, from whom, what they make, for whom."""
    found: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
    add_needed, add_source, add_made, add_to = (values.append for values in found)
    num_pipes = len(tables)
    needed, made = tables[0]
    for cell in row:
        one = cell.compute
        while one is not None:
            kind, stage, microbatch = one.kind, one.stage, one.microbatch
            if num_pipes > 1:
                needed, made = tables[microbatch % num_pipes]
            first, other = needed[kind][stage]
            add_needed(first + microbatch)
            add_source(other)
            first, other = made[kind][stage]
            add_made(first + microbatch)
            add_to(other)
            one = None if one is cell.overlapped else cell.overlapped
    return found
