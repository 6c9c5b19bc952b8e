"""What passes between the ranks of a schedule, and where each exchange order receives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from bpipe.schedule.action import COMPUTE, SHARDS, Action, Kind
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.program import MessageTable
from bpipe.schedule.schedule import Schedule, Slot

# In place of the rank at a message's other end: it is a collective, or the value stays on its rank.
ALL = -2
NOBODY = -1
# The value of a pipe's first micro-batch and the rank at its other end, by kind and stage.
_Table = dict[Kind, list[tuple[int, int]]]


class Passing:
    """Values that pass between ranks.

    Each list has, by rank, one entry per computation in order: what it needs and from whom, what it makes and for whom.
    NOBODY means that the value stays on its rank.
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
        values = [_values(row, tables) for row in schedule.ranks]
        self.needed, self.needed_from, self.made, self.made_for = (
            [of_rank[part] for of_rank in values] for part in range(4)
        )

    def received_behind(self) -> list[list[list[int]]]:
        """Return what a rank of Megatron's interleaved loop receives at its start and after each computation.

        That is what neighbours make, by the grid, until the rank's next computation; two that overlap count as one.
        """
        # By rank and slot: the number of computations begun by then.
        begun = [list(accumulate(cell.compute is not None for cell in row)) for row in self.schedule.ranks]
        received: list[list[list[int]]] = [[[] for _ in range(of_rank[-1] + 1)] for of_rank in begun]
        for rank, (made, made_for) in enumerate(zip(self.made, self.made_for, strict=True)):
            slots = (slot for slot, _ in self.schedule.computations(rank))
            for slot, value, receiver in zip(slots, made, made_for, strict=True):
                if receiver != NOBODY:
                    received[receiver][begun[receiver][slot]].append(value)
        return received

    def received_before(self, turns: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """Return, by rank and turn (`turns_of`) and for the loop's end, the values received before it.

        That is what the next turn needs. A message that closes the ring of ranks is received as soon as the last rank
        sends it: with larger groups that is earlier.
        """
        received: list[list[list[int]]] = [[[] for _ in range(of_rank[-1] + 2)] for of_rank in turns]
        made_at = [{value: place for place, value in enumerate(of_rank)} for of_rank in self.made]
        kinds, last = kinds_of(self.schedule), len(turns) - 1
        for rank, senders in enumerate(self.needed_from):
            for place, sender in enumerate(senders):
                if sender < 0:
                    continue
                value, turn = self.needed[rank][place], turns[rank][place]
                if last > 1 and {rank, sender} == {0, last}:
                    made = kinds[sender][: made_at[sender][value] + 1]
                    nth = made.count(made[-1]) - 1 + last
                    after = [turns[rank][own] + 1 for own, kind in enumerate(kinds[rank]) if kind is made[-1]]
                    turn = min([turn, *after[nth : nth + 1]])
                received[rank][turn].append(value)
        return received

    def listed_by_torch(self) -> list[list[list[int]]]:
        """Return, by rank, the values whose receives torch's runtime posts before its first cell and after each cell.

        A cell is one computation or two that overlap. Ranks come in turn, each with its next cell if all operands from
        other ranks have been posted to it. The sends of a cell follow it, and their receives are at once listed on the
        other rank, so each two ranks have their messages in one order. A value that is never posted, as ranks wait for
        each other, is not listed. Source: `_add_send_recv` in torch.distributed.pipelining.schedules, 2.11 to 2.15,
        which a test compares.
        """
        cells = [_cells(row) for row in self.schedule.ranks]
        received: list[list[list[int]]] = [[[]] for _ in cells]
        posted: list[set[int]] = [set() for _ in cells]
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(cells):
                cell = row[len(received[rank]) - 1] if len(received[rank]) <= len(row) else None
                if cell is None or not posted[rank].issuperset(
                    self.needed[rank][number] for number in cell if self.needed_from[rank][number] != NOBODY
                ):
                    continue
                moved = True
                received[rank].append([])
                for number in cell:
                    value, receiver = self.made[rank][number], self.made_for[rank][number]
                    if receiver != NOBODY:
                        received[receiver][-1].append(value)
                        posted[receiver].add(value)
        for of_rank, row in zip(received, cells, strict=True):
            of_rank += [[] for _ in range(1 + len(row) - len(of_rank))]
        return received

    def inbound(self) -> list[dict[int, list[int]]]:
        """Return, by rank and channel, what a rank receives without a part in making it, in the order of sending.

        A channel is a directed edge, named by its sender, or, as a negative number, the collectives of one sort and
        sender.
        """
        inbound: list[dict[int, list[int]]] = [{} for _ in self.made]
        dependencies = self.messages.dependencies
        for sender, (made, made_for) in enumerate(zip(self.made, self.made_for, strict=True)):
            for value, receiver in zip(made, made_for, strict=True):
                if receiver >= 0:
                    inbound[receiver].setdefault(sender, []).append(value)
                elif receiver == ALL:
                    makers, takers = dependencies.route(value)
                    for rank in set(takers) - set(makers):
                        inbound[rank].setdefault(self.channel(value, receiver), []).append(value)
        return inbound

    def channel(self, value: int, source: int) -> int:
        """Return the channel of a value; with several pipes, collectives of one sort have several senders."""
        if source != ALL:
            return source
        dependencies = self.messages.dependencies
        return ~(value // dependencies.num_microbatches * dependencies.num_ranks + dependencies.route(value).makers[0])


def _ends(dependencies: Dependencies, value_of: Callable[[Action], int], pipe: int) -> _Table:
    """Return what every computation makes, or needs (`value_of`), of a pipe's micro-batch 0, and its other end."""
    making = value_of == dependencies.value_of

    def end(action: Action) -> tuple[int, int]:
        value = value_of(action)
        if value == NOTHING or not dependencies.route(value).takers:
            return NOTHING, NOBODY
        route, first = dependencies.route(value), value - action.microbatch
        # A shard that makes a value for all shards alone has it already.
        if action.kind in SHARDS and route.makers == (action.stage,) and not making:
            return NOTHING, NOBODY
        if len(route.parties) > 2 or len(route.makers) > 1:
            return first, ALL
        if len(route.parties) == 2:
            return first, route.parties[1] if making else route.makers[0]
        return NOTHING, NOBODY

    stages = {kind: range(dependencies.num_ranks if kind in SHARDS else dependencies.num_stages) for kind in COMPUTE}
    return {kind: [end(Action(stage, kind, pipe)) for stage in of_kind] for kind, of_kind in stages.items()}


def _values(
    row: Sequence[Slot], tables: Sequence[tuple[_Table, _Table]]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return what the row's computations need, from whom, what they make, and for whom."""
    values: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
    add_needed, add_source, add_made, add_receiver = (column.append for column in values)
    num_pipes = len(tables)
    needed, made = tables[0]
    for cell in row:
        for action in (cell.compute, cell.overlapped):
            if action is None:
                continue
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            if num_pipes > 1:
                needed, made = tables[microbatch % num_pipes]
            first, other = needed[kind][stage]
            add_needed(first + microbatch)
            add_source(other)
            first, other = made[kind][stage]
            add_made(first + microbatch)
            add_receiver(other)
    return values


def _cells(row: Sequence[Slot]) -> list[range]:
    """Return the numbers of a rank's computations by cell that computes."""
    ends = [0, *accumulate(len(cell.computations) for cell in row if cell.compute is not None)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def kinds_of(schedule: Schedule) -> list[list[Kind]]:
    """Return the kinds of every rank's computations, in order."""
    return [[action.kind for _, action in schedule.computations(rank)] for rank in range(schedule.num_ranks)]


def turns_of(schedule: Schedule) -> list[list[int]]:
    """Return the turn of every rank's computations in Megatron's interleaved loop without `overlap_p2p_comm`.

    Between two turns the loop exchanges. A turn is a forward of the first ones, a backward of the last ones, and
    between them a forward and the backward after it; if computations overlap, it is a computation or two that do. If a
    rank has only one such pair, and the next rank leads with all forwards but at most one, each of its computations is
    a turn.
    """
    if any(cell.overlapped for row in schedule.ranks for cell in row):
        return [[turn for turn, cell in enumerate(_cells(row)) for _ in cell] for row in schedule.ranks]
    kinds = kinds_of(schedule)
    leading = [next((place for place, kind in enumerate(row) if kind is not Kind.FORWARD), len(row)) for row in kinds]
    turns = []
    for row, after in zip(kinds, [*leading[1:], 0], strict=True):
        pairs = {at for at, both in enumerate(pairwise(row)) if both[0] is Kind.FORWARD and both[1] is not Kind.FORWARD}
        if len(pairs) == 1 and after + 1 >= row.count(Kind.FORWARD):
            pairs.clear()
        turns.append(list(accumulate(int(place > 0 and place - 1 not in pairs) for place in range(len(row)))))
    return turns
