"""Keep every rank within the bytes it has room for.

In: a compute-only Schedule, rooms and sizes. Out: one with transfers.

What counts is what a run allocates: a rank's own micro-batches at their most, and besides its host buffers, which stay
once they are there. (`balance` counts what is hosted only while it is.) A rank that holds more than it has room for
sends to its partner what must leave and no more. Of a pair one sends at most: it sends as much as the other then has no
room for, all the time. Where parts of a micro-batch may leave (`fewest`), as much of each leaves as makes the fewest
bytes in all. Knows no tensors, no clock, and not what else a device holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from bpipe.balance.pairs import allocated_bytes, check_input, own_bytes, pairs_of, plan_rank, with_transfers
from bpipe.schedule.action import Kind
from bpipe.schedule.hosts import Pair, default_partners, in_pairs, pairing
from bpipe.schedule.memory import Memory, live_bytes, peak_counts
from bpipe.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ActivationBudget:
    """Memory to balance within: `room_bytes[rank]` for micro-batches and host buffers; `memory`: what one
    micro-batch of each stage holds."""

    room_bytes: tuple[int, ...]
    memory: Memory


# By stage, the bytes of a micro-batch that may move in place of all that can: ascending, the last is all. Every
# transfer of a stage moves the same.
Parts = Sequence[Sequence[int]]


class BudgetTooSmall(ValueError):
    """The ranks of a pair have not room enough, together or one of them."""

    def __init__(self, pair: Pair, why: str) -> None:
        super().__init__(why)
        self.pair = pair


def balance_within(
    schedule: Schedule, activation_budget: ActivationBudget, partners: Sequence[int] | None = None
) -> Schedule:
    """Balance with only those transfers without which some rank lacks room. Bounds are the counts that result.

    By default the rank that lacks most has the one with most to spare as its partner, and so on. Raises NoRoom.
    """
    check_rooms(schedule, activation_budget)
    chosen = chosen_partners(schedule, activation_budget) if partners is None else pairing(schedule.num_ranks, partners)
    fitted = replace(schedule, hosts=in_pairs(chosen))
    for pair in pairs_of(chosen):
        fitted = _pair_fitted(fitted, pair, activation_budget)
    return replace(fitted, bounds=tuple(map(ceil, peak_counts(fitted))))


def check_rooms(schedule: Schedule, activation_budget: ActivationBudget) -> None:
    """Raise BudgetTooSmall for a rank without room for any micro-batch, ValueError for what does not fit the
    schedule."""
    rooms = activation_budget.room_bytes
    if min(rooms, default=1) < 1:
        rank = rooms.index(min(rooms))
        raise BudgetTooSmall(
            (rank, rank), f"rank {rank} has no room for even one micro-batch, but the one being computed must be held"
        )
    check_input(schedule, rooms, activation_budget.memory)


def fewest_moved(
    schedule: Schedule, activation_budget: ActivationBudget, parts: Parts, partners: Sequence[int] | None = None
) -> ActivationBudget:
    """Return the rooms with those parts of micro-batches with which `fit` moves the fewest bytes; of a rank's stages
    all the how many-th.

    Where two choices move equally much it is the larger part, fewer times. Raises NoRoom.
    """
    chosen = chosen_partners(schedule, activation_budget) if partners is None else pairing(schedule.num_ranks, partners)
    plain = replace(schedule, hosts=in_pairs(chosen))
    memory = activation_budget.memory
    for pair in pairs_of(chosen):
        memory = _fewest_of_pair(plain, pair, ActivationBudget(activation_budget.room_bytes, memory), parts)
    return ActivationBudget(activation_budget.room_bytes, memory)


def _fewest_of_pair(plain: Schedule, pair: Pair, activation_budget: ActivationBudget, parts: Parts) -> Memory:
    best: tuple[int, Memory] | None = None
    refusal: BudgetTooSmall | None = None
    for memory in (activation_budget.memory, *less_moved(plain, pair, activation_budget.memory, parts)):
        try:
            fitted = _pair_fitted(plain, pair, ActivationBudget(activation_budget.room_bytes, memory))
        except BudgetTooSmall as error:
            refusal = refusal or error
            continue
        sent = {rank: sent_bytes(fitted, rank, memory) for rank in pair}
        if best is None or sum(sent.values()) < best[0]:
            senders = [rank for rank in pair if sent[rank]]
            best = sum(sent.values()), with_moved_sizes(plain, senders, activation_budget.memory, memory)
        if not any(sent.values()):
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best[1]


def with_moved_sizes(schedule: Schedule, ranks: Sequence[int], memory: Memory, other: Memory) -> Memory:
    """Return a memory in which these ranks' stages move as in `other`, all others as in `memory`."""
    stages = {stage for rank in ranks for stage in schedule.layout.stages_of(rank)}
    pairs = enumerate(zip(memory.stages, other.stages, strict=True))
    return replace(
        memory, stages=tuple(two if place // memory.slices in stages else one for place, (one, two) in pairs)
    )


def less_moved(schedule: Schedule, ranks: Sequence[int], memory: Memory, parts: Parts) -> Iterator[Memory]:
    """Yield memories in which transfers of these ranks' stages move less and less."""
    stages = {stage for rank in ranks for stage in schedule.layout.stages_of(rank)}
    most = max((len(parts[stage]) for stage in stages), default=0) if parts else 0
    for less in range(2, most + 1):
        part = {stage: parts[stage][max(0, len(parts[stage]) - less)] for stage in stages}
        places = enumerate(memory.stages)
        sizes = (
            replace(size, moved_bytes=part.get(place // memory.slices, size.moved_bytes)) for place, size in places
        )
        yield replace(memory, stages=tuple(sizes))


def sent_bytes(schedule: Schedule, rank: int, memory: Memory) -> int:
    """Return bytes that leave a rank in an iteration."""
    every = (action for slot in schedule.ranks[rank] for action in slot.transfers)
    return sum(
        memory.size(action.stage, action.microbatch).moved_bytes for action in every if action.kind is Kind.EVICT
    )


def chosen_partners(schedule: Schedule, activation_budget: ActivationBudget) -> tuple[int, ...]:
    """Pair the ranks that lack most with those that have most to spare."""
    return default_partners(
        [
            sum(allocated_bytes(schedule, rank, activation_budget.memory)) - room
            for rank, room in enumerate(activation_budget.room_bytes)
        ]
    )


def smallest_level_of_pair(
    schedule: Schedule,
    partners: Sequence[int],
    pair: Pair,
    rooms_at: Callable[[int], ActivationBudget],
    most: int,
    parts: Parts = (),
) -> int:
    """Return the smallest level in 1 to `most` with whose rooms the pair has enough; more than `most` where none is.

    `rooms_at(level)`: no rank's room is smaller at a higher level.
    """
    plain = replace(schedule, hosts=in_pairs(partners))
    memory = rooms_at(most).memory
    ours = tuple(sorted(set(pair)))
    together = max(map(sum, zip(*(own_bytes(schedule, rank, memory) for rank in ours), strict=True)), default=0)

    def enough(level: int) -> bool:
        activation_budget = rooms_at(level)
        if sum(activation_budget.room_bytes[rank] for rank in ours) < together:
            return False
        # What leaves wholly frees most; a part lets rooms be shared more evenly.
        for moved in (activation_budget.memory, *less_moved(plain, pair, activation_budget.memory, parts)):
            try:
                _pair_fitted(plain, pair, ActivationBudget(activation_budget.room_bytes, moved))
            except BudgetTooSmall:
                continue
            return True
        return False

    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _pair_fitted(schedule: Schedule, pair: Pair, activation_budget: ActivationBudget) -> Schedule:
    """With the transfers of this pair."""
    memory = activation_budget.memory
    over = [
        rank
        for rank in sorted(set(pair))
        if max(live_bytes(schedule, rank, memory), default=0) > activation_budget.room_bytes[rank]
    ]
    if over and pair[0] == pair[1]:
        raise BudgetTooSmall(pair, f"rank {pair[0]} has no partner and no room for its own micro-batches")
    if len(over) == 2:
        raise BudgetTooSmall(pair, f"ranks {pair[0]} and {pair[1]} both have no room for their own micro-batches")
    for sender in over:
        plan = plan_rank(schedule, sender, activation_budget.room_bytes[sender], memory)
        if isinstance(plan, str):
            raise BudgetTooSmall(pair, plan)
        rows = list(schedule.ranks)
        for rank in pair:
            rows[rank] = with_transfers(rows[rank], plan, own=rank == sender)
        schedule = replace(schedule, ranks=tuple(rows))
    for host in (rank for rank in pair if over and rank not in over):
        needed = sum(allocated_bytes(schedule, host, memory))
        if needed > activation_budget.room_bytes[host]:
            room = memory.with_unit(activation_budget.room_bytes[host])
            raise BudgetTooSmall(
                pair,
                f"rank {host}, which hosts for rank {over[0]}, needs {memory.with_unit(needed)} but has room for "
                f"{room}",
            )
    return schedule
