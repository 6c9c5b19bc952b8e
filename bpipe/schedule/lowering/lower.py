"""Lowering: what each rank does, messages included, as one `Program` per rank.

Computations and transfers are in the order of `program.steps`; what passes between ranks follows from
`schedule.dependencies`; the exchange order decides when it is sent, received and waited for. What data needs is always
waited for:

- A computation waits for its operands from other ranks, a backward for the load of its activations.
- The next computation, or a load before it, waits for what was evicted: it takes that memory.
- A RETURN waits for its HOST, a HOST for the RETURN that empties its buffer.
"""

import functools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise, repeat

from bpipe.schedule.action import COMPUTE, READING, SHARDS, Action, Key, Kind
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.host_buffers import Residencies, Residency, evicted_to, host_buffers
from bpipe.schedule.program import Exchange, MessageTable, Op, Program, Step, Transfer, steps
from bpipe.schedule.schedule import Schedule, Slot

_EVICT, _HOST, _RETURN, _LOAD = Kind.EVICT, Kind.HOST, Kind.RETURN, Kind.LOAD
_RUN, _POST, _SEND, _WAIT, _START, _FINISH = map(int, Op)
# With one neighbour in both directions, to one, and from one.
_BOTH, _GIVE, _TAKE = bytes([_SEND, _POST, _WAIT, _WAIT]), bytes([_SEND, _WAIT]), bytes([_POST, _WAIT])
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
        for rank, (values, made_for) in enumerate(zip(self.made, self.made_for, strict=True)):
            slots = (slot for slot, _ in self.schedule.computations(rank))
            for slot, value, receiver in zip(slots, values, made_for, strict=True):
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
                    sent = kinds[sender][: made_at[sender][value] + 1]
                    nth = sent.count(sent[-1]) - 1 + last
                    after = [turns[rank][own] + 1 for own, kind in enumerate(kinds[rank]) if kind is sent[-1]]
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
        for sender, (values, made_for) in enumerate(zip(self.made, self.made_for, strict=True)):
            for value, receiver in zip(values, made_for, strict=True):
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
    needs, makes = tables[0]
    for cell in row:
        for action in (cell.compute, cell.overlapped):
            if action is None:
                continue
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            if num_pipes > 1:
                needs, makes = tables[microbatch % num_pipes]
            first, source = needs[kind][stage]
            add_needed(first + microbatch)
            add_source(source)
            first, receiver = makes[kind][stage]
            add_made(first + microbatch)
            add_receiver(receiver)
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
        pairs = {
            place
            for place, (kind, later) in enumerate(pairwise(row))
            if kind is Kind.FORWARD and later is not Kind.FORWARD
        }
        if len(pairs) == 1 and after + 1 >= row.count(Kind.FORWARD):
            pairs.clear()
        turns.append(list(accumulate(int(place > 0 and place - 1 not in pairs) for place in range(len(row)))))
    return turns


def lower(schedule: Schedule, exchange: Exchange) -> tuple[Program, ...]:
    """Lower a schedule to one program per rank.

    Args:
        schedule: The schedule to run.
        exchange: When ranks send, receive and wait.

    Returns:
        The instructions of each rank.

    Raises:
        ValueError: Megatron's loops cannot run it: values of more than two ranks or, with one stage per rank,
            computations that overlap.
    """
    if exchange is not Exchange.POSTED:
        _check_runnable(schedule, exchange)
    if exchange is Exchange.TORCH:
        return lower_received(schedule)
    passing = Passing(schedule)
    # One rank after the other, because the state of a lowering is as large as its result.
    ranks = (_Lowering(schedule, rank, passing) for rank in range(schedule.num_ranks))
    if exchange is Exchange.MEGATRON_1F1B:
        return tuple(lowering.between() for lowering in ranks)
    if exchange is Exchange.MEGATRON_INTERLEAVED:
        both = zip(ranks, passing.received_behind(), strict=True)
        return tuple(lowering.interleaved(received) for lowering, received in both)
    if exchange is Exchange.MEGATRON_TURNS:
        turns = turns_of(schedule)
        ends = zip(ranks, turns, passing.received_before(turns), strict=True)
        return tuple(lowering.in_turns(own, received) for lowering, own, received in ends)
    return tuple(lowering.posted(inbound) for lowering, inbound in zip(ranks, passing.inbound(), strict=True))


def lower_received(
    schedule: Schedule, received: Sequence[Sequence[Sequence[int]]] | None = None
) -> tuple[Program, ...]:
    """Lower a schedule for torch's runtime.

    Args:
        schedule: The schedule to run.
        received: `received[rank][k]` are the values posted after the rank's k-th cell, before the first if k is 0; by
            default where torch's own list has them.

    Returns:
        The instructions of each rank.
    """
    passing = Passing(schedule)
    ranks = (_Lowering(schedule, rank, passing) for rank in range(schedule.num_ranks))
    both = zip(ranks, passing.listed_by_torch() if received is None else received, strict=True)
    return tuple(lowering.listed(after) for lowering, after in both)


def _check_runnable(schedule: Schedule, exchange: Exchange) -> None:
    overlapped = next((cell for row in schedule.ranks for cell in row if cell.overlapped is not None), None)
    if overlapped is not None and exchange is Exchange.MEGATRON_1F1B:
        raise ValueError(
            f"{overlapped.compute} and {overlapped.overlapped} overlap, but the exchange {exchange.value} handles one "
            "computation at a time: choose another exchange, or a schedule without overlaps"
        )
    if schedule.layout.shard_kinds:
        raise ValueError(
            f"the exchanges of {exchange.value} are between two ranks, but shards of the vocabulary need "
            f"{Exchange.POSTED.value}"
        )


@functools.cache
def _exchanged(num_sent: int, num_received: int) -> bytes:
    """Return the operations that send and receive messages at once."""
    return bytes([_SEND] * num_sent + [_POST] * num_received + [_WAIT] * (num_sent + num_received))


class _Lowering:
    """The instructions of one rank while they are made, and those of its transfers not waited for yet."""

    def __init__(self, schedule: Schedule, rank: int, passing: Passing) -> None:
        self.rank, self.passing = rank, passing
        self.needed, self.needed_from = passing.needed[rank], passing.needed_from[rank]
        self.made, self.made_for = passing.made[rank], passing.made_for[rank]
        self.schedule, self.layout = schedule, schedule.layout
        self.evicted_to = evicted_to(schedule, rank)
        self.away: dict[Key, int] = {}
        row = schedule.ranks[rank]
        self.steps = steps(schedule, rank)
        self.slots = [0, *(slot for slot, cell in enumerate(row) if cell.compute is not None), len(row) - 1]
        # By residency, made when the first is hosted here: half of the ranks host nothing.
        self.buffers: dict[Residency, int] = {}
        self.ops = bytearray()
        self.operands: list[Action | int | Transfer] = []
        self.starts: list[int] = []
        self.leaving: list[Transfer] = []
        self.loading: dict[Key, Transfer] = {}
        self.hosted: dict[Key, Transfer] = {}
        self.residencies = Residencies()
        # By host buffer: the RETURN that empties it.
        self.emptied: dict[int, Transfer] = {}

    def _program(self) -> Program:
        """Wait for what was given back, and return the program."""
        for transfer in self.emptied.values():
            self._add(_FINISH, transfer)
        return Program(self.rank, bytes(self.ops), self.operands, self.starts, self.slots, self.passing.messages)

    def between(self) -> Program:
        """Return the program of Megatron's loop for one stage per rank, which exchanges between two computations."""
        ops, operands, add_start = self.ops, self.operands, self.starts.append
        left, left_to = NOTHING, NOBODY
        # The loop's start and end compute nothing.
        ends = [*self.needed, NOTHING], [*self.needed_from, NOBODY], [*self.made, NOTHING], [*self.made_for, NOBODY]
        self.starts.append(0)
        self._step(next(self.steps))
        for step, value, source, output, made_for in zip(self.steps, *ends, strict=True):
            add_start(len(operands))
            if left_to == source:
                if source != NOBODY:
                    ops += _BOTH
                    operands += (left, value, left, value)
            else:
                if left_to != NOBODY:
                    ops += _GIVE
                    operands += (left, left)
                if source != NOBODY:
                    ops += _TAKE
                    operands += (value, value)
            self._step(step)
            left, left_to = output, made_for
        return self._program()

    def interleaved(self, received: Sequence[list[int]]) -> Program:
        """Return the program of Megatron's loop for several stages per rank, which exchanges after a computation."""
        ops, operands = self.ops, self.operands
        done = 0
        for step, inputs in zip(self.steps, [*received, []], strict=True):
            self.starts.append(len(operands))
            self._step(step)
            ends = range(done, done + len(step.computations))
            done = ends.stop
            outputs = [self.made[number] for number in ends if self.made_for[number] != NOBODY]
            if outputs or inputs:
                ops += _exchanged(len(outputs), len(inputs))
                both = [*outputs, *inputs]
                operands += both
                operands += both
        return self._program()

    def in_turns(self, turns: Sequence[int], received: Sequence[list[int]]) -> Program:
        """Return the program of the same loop without overlap, which exchanges between turns."""
        left: list[int] = []
        begun, done = -1, 0
        self.starts.append(0)
        self._step(next(self.steps))
        for step in self.steps:
            self.starts.append(len(self.operands))
            # The loop's end is a turn that computes nothing.
            turn = turns[done] if step.compute is not None else turns[-1] + 1
            if turn != begun:
                both = [*left, *received[turn]]
                self.ops += _exchanged(len(left), len(received[turn]))
                self.operands += both + both
                left, begun = [], turn
            self._step(step)
            ends = range(done, done + len(step.computations))
            left += [self.made[number] for number in ends if self.made_for[number] != NOBODY]
            done = ends.stop
        return self._program()

    def posted(self, inbound: dict[int, list[int]]) -> Program:
        """Return the program of our executor: on every channel receives are posted one ahead, in the sender's order."""
        row = self.schedule.ranks[self.rank]
        if not any(cell.transfers or cell.overlapped for cell in row):
            return self._posted_alone([cell.compute for cell in row if cell.compute is not None], inbound)
        taken = dict.fromkeys(inbound, 0)
        early: set[int] = set()

        def take(value: int, source: int) -> None:
            self._take(value, source, inbound, taken, early)

        return self._sent_at_once(take, [[messages[0] for messages in inbound.values()]])

    def listed(self, received: Sequence[Sequence[int]]) -> Program:
        """Return the program of torch's own runtime, with receives where its list has them."""
        return self._sent_at_once(lambda value, source: self._add(_WAIT, value), received)

    def _sent_at_once(self, take: Callable[[int, int], None], posted: Sequence[Sequence[int]]) -> Program:
        """Return the program in which what a computation makes is sent right after it, and waited for at the end.

        Args:
            take: Waits for a value that comes from a rank.
            posted: The values whose receives are posted after the start of the loop and after each computation.
        """
        ends = zip(self.needed, self.needed_from, self.made, self.made_for, strict=True)
        sent: list[int] = []
        for step, receives in zip(self.steps, chain(posted, repeat(())), strict=False):
            self.starts.append(len(self.operands))
            outputs = []
            for _, (value, source, output, made_for) in zip(step.computations, ends, strict=False):
                if source != NOBODY:
                    take(value, source)
                if made_for != NOBODY:
                    outputs.append(output)
            self._step(step, outputs)
            sent += outputs
            for value in receives:
                self._add(_POST, value)
        self.ops += bytes([_WAIT] * len(sent))
        self.operands += sent
        return self._program()

    def _posted_alone(self, computations: Sequence[Action], inbound: dict[int, list[int]]) -> Program:
        """Return the program if nothing moves or overlaps, as in most schedules of a search, in half the time."""
        taken = dict.fromkeys(inbound, 0)
        early: set[int] = set()
        sent: list[int] = []
        ops, operands, add_start = self.ops, self.operands, self.starts.append
        add_op, add_operand = ops.append, operands.append
        add_start(0)
        for messages in inbound.values():
            self._add(_POST, messages[0])
        ends = self.needed, self.needed_from, self.made, self.made_for
        for action, value, source, output, made_for in zip(computations, *ends, strict=True):
            add_start(len(operands))
            if source != NOBODY:
                self._take(value, source, inbound, taken, early)
            add_op(_RUN)
            add_operand(action)
            if made_for != NOBODY:
                add_op(_SEND)
                add_operand(output)
                sent.append(output)
        add_start(len(operands))
        ops += bytes([_WAIT] * len(sent))
        operands += sent
        return self._program()

    def _take(
        self, value: int, source: int, inbound: dict[int, list[int]], taken: dict[int, int], early: set[int]
    ) -> None:
        """Wait for a value, and before it for all earlier ones of its sender."""
        channel = source if source != ALL else self.passing.channel(value, source)
        messages = inbound.get(channel)
        if messages is None or (source == ALL and value not in messages):
            # The rank has a part in making it, and has sent that.
            assert source == ALL, "what a rank needs and does not make is on one of its channels"
            self._add(_WAIT, value)
            return
        if value in early:
            early.remove(value)
            return
        ops, operands, place = self.ops, self.operands, taken[channel]
        while True:
            passed = messages[place]
            place += 1
            ops.append(_WAIT)
            operands.append(passed)
            if place < len(messages):
                ops.append(_POST)
                operands.append(messages[place])
            if passed == value:
                break
            early.add(passed)
        taken[channel] = place

    def _add(self, op: int, operand: Action | int | Transfer) -> None:
        self.ops.append(op)
        self.operands.append(operand)

    def _step(self, step: Step, sent: Sequence[int] = ()) -> None:
        """Add the transfers and computations of a step, with `sent` directly after these."""
        compute, before, after, overlapped = step
        if self.leaving:
            self._finish_evictions()
        for action in before:
            self._start(action)
        if self.loading:
            self._finish_loads(step.computations)
        if compute is not None:
            self.ops.append(_RUN)
            self.operands.append(compute)
        if overlapped is not None:
            self._add(_RUN, overlapped)
        for value in sent:
            self.ops.append(_SEND)
            self.operands.append(value)
        for action in after:
            if action.kind is _LOAD:
                self._finish_evictions()
            self._start(action)

    def _finish_loads(self, needed_by: Sequence[Action]) -> None:
        for action in needed_by:
            if action.kind in READING and action.key in self.loading:
                self._add(_FINISH, self.loading.pop(action.key))

    def _finish_evictions(self) -> None:
        for transfer in self.leaving:
            self._add(_FINISH, transfer)
        self.leaving.clear()

    def _start(self, action: Action) -> None:
        kind, key = action.kind, action.key
        if kind is _EVICT:
            self.away[key] = next(self.evicted_to).rank
        other = self.away.get(key, self.rank) if kind is _EVICT or kind is _LOAD else self.layout.rank_of(*key)
        sends = kind is _EVICT or kind is _RETURN
        transfer = Transfer(action, self.rank, other) if sends else Transfer(action, other, self.rank)
        if kind is _HOST:
            emptied = self.emptied.pop(self._buffer(action), None)
            if emptied is not None:
                self._add(_FINISH, emptied)
            self.hosted[key] = transfer
        elif kind is _RETURN:
            # Rules refuse a schedule that gives back what it does not host, but the check may lower it before.
            if key in self.hosted:
                self._add(_FINISH, self.hosted.pop(key))
                self.emptied[self._buffer(action)] = transfer
        elif kind is _LOAD:
            self.loading[key] = transfer
        else:
            self.leaving.append(transfer)
        self._add(_START, transfer)

    def _buffer(self, action: Action) -> int:
        if not self.buffers:
            self.buffers = host_buffers(self.schedule, self.rank)
        return self.buffers[self.residencies.of(action)]


# By message: where a rank first waits for it, and where it sends it.
_Positions = tuple[dict[int, int], dict[int, int]]


def lower_as_run(schedule: Schedule, exchange: Exchange) -> tuple[Program, ...]:
    """Lower a schedule as it is run: our executor releases what a rank has sent as soon as it must have arrived.

    A sent value is kept until it is waited for, and a backend may not report by itself when it has arrived. A later
    message that all its receivers make after taking the value confirms it, so waiting for it then takes no time and
    blocks nobody. Other sends are waited for at the end. The check and the simulation use programs as `lower` makes
    them, which wait for all sends at the end.
    """
    programs = lower(schedule, exchange)
    if exchange is not Exchange.POSTED:
        return programs
    positions = [_positions(program) for program in programs]
    return tuple(_moved(program, _answers(program, positions)) for program in programs)


def _answers(program: Program, positions: Sequence[_Positions]) -> dict[int, list[int]]:
    """Return what a rank has sent, by the received message that confirms it; values for one rank come first."""
    rank, route = program.rank, program.messages.dependencies.route
    waited, sent = positions[rank]
    received = sorted((place, value) for value, place in waited.items() if rank in route(value).takers)
    alone: dict[int, list[int]] = {}
    together: dict[int, list[int]] = {}
    for value, place in sent.items():
        makers, takers = route(value)
        is_alone = len(makers) == len(takers) == 1
        if len(makers) > 1 and rank in takers:
            # It is waited for where it is used.
            continue
        others = set(takers) - {rank}
        for _, message in received[bisect_right(received, (place, -1)) :]:
            answering, asking = route(message)
            # A value for one rank is confirmed by a message between the two.
            if is_alone and (len(answering) > 1 or len(asking) > 1):
                continue
            if others <= set(answering) and all(
                positions[other][0][value] < positions[other][1].get(message, -1) for other in others
            ):
                (alone if is_alone else together).setdefault(message, []).append(value)
                break
    return {message: [*alone.get(message, ()), *together.get(message, ())] for message in {**alone, **together}}


def _positions(program: Program) -> _Positions:
    waited: dict[int, int] = {}
    sent: dict[int, int] = {}
    for place, (op, operand) in enumerate(zip(program.ops, program.operands, strict=True)):
        if isinstance(operand, int) and op in (_SEND, _WAIT):
            (sent if op == _SEND else waited).setdefault(operand, place)
    return waited, sent


def _moved(program: Program, answers: Mapping[int, Sequence[int]]) -> Program:
    ops = bytearray()
    operands: list[Action | int | Transfer] = []
    # New place of each instruction.
    places: list[int] = []
    kept: set[int] = set()
    released: set[int] = set()
    for op, operand in zip(program.ops, program.operands, strict=True):
        places.append(len(operands))
        if op == _WAIT and operand in released:
            continue
        ops.append(op)
        operands.append(operand)
        if op == _SEND and isinstance(operand, int):
            kept.add(operand)
        elif op == _WAIT and isinstance(operand, int):
            arrived = [value for value in answers.get(operand, ()) if value in kept]
            released.update(arrived)
            # Every rank waits for a collective where it is used and again at the end.
            kept.difference_update(arrived)
            ops += bytes([_WAIT] * len(arrived))
            operands += arrived
    places.append(len(operands))
    return replace(program, ops=bytes(ops), operands=operands, starts=[places[start] for start in program.starts])
