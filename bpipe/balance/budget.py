"""Keep every rank within the bytes it has room for.

What counts is what a run allocates: a rank's own micro-batches at their most, and its host buffers all the time, unlike
`balance`, which counts what is hosted only while it is. A rank that holds more than it has room for sends to its
partner only what must leave. At most one rank of a pair sends: as much as the other then has room for, all the time. If
parts of a micro-batch may leave (`fewest_moved`), the part of each is chosen that makes the fewest bytes in all.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from bpipe.balance.pairs import allocated_bytes, check_input, own_bytes, pairs_of, plan_rank, with_transfers
from bpipe.schedule.action import Kind
from bpipe.schedule.hosts import Pair, default_partners, in_pairs, pairing
from bpipe.schedule.memory import Memory, live_bytes, peak_counts
from bpipe.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ActivationBudget:
    """Memory to balance within.

    Attributes:
        room_bytes: Each rank's room for micro-batches and host buffers.
        memory: What one micro-batch of each stage holds.
    """

    room_bytes: tuple[int, ...]
    memory: Memory


# By stage, sizes of the part of a micro-batch that moves: ascending, the last is all that can. Every transfer of a
# stage moves the same.
Parts = Sequence[Sequence[int]]


class BudgetTooSmall(ValueError):
    """The ranks of a pair, together or one of them, have too little room."""

    def __init__(self, pair: Pair, why: str) -> None:
        super().__init__(why)
        self.pair = pair


def balance_within(
    schedule: Schedule, activation_budget: ActivationBudget, partners: Sequence[int] | None = None
) -> Schedule:
    """Balance with only those transfers without which some rank lacks room. Bounds are the counts that result.

    Args:
        schedule: The schedule without transfers.
        activation_budget: The bytes that every rank has room for.
        partners: By rank; by default the rank that lacks most is paired with the one with most to spare, and so on.

    Returns:
        The schedule with its transfers.

    Raises:
        BudgetTooSmall: The ranks of a pair have too little room.
    """
    check_rooms(schedule, activation_budget)
    chosen = chosen_partners(schedule, activation_budget) if partners is None else pairing(schedule.num_ranks, partners)
    fitted = replace(schedule, hosts=in_pairs(chosen))
    for pair in pairs_of(chosen):
        fitted = _pair_fitted(fitted, pair, activation_budget)
    return replace(fitted, bounds=peak_counts(fitted))


def check_rooms(schedule: Schedule, budget: ActivationBudget) -> None:
    """Raise BudgetTooSmall for a rank without room for any micro-batch, ValueError if sizes do not fit the schedule."""
    rooms = budget.room_bytes
    if min(rooms, default=1) < 1:
        rank = rooms.index(min(rooms))
        reason = f"rank {rank} has no room for even one micro-batch, but the one being computed must be held"
        raise BudgetTooSmall((rank, rank), reason)
    check_input(schedule, rooms, budget.memory)


def fewest_moved(
    schedule: Schedule, budget: ActivationBudget, parts: Parts, partners: Sequence[int] | None = None
) -> ActivationBudget:
    """Return the budget with those parts of micro-batches with which `balance_within` moves the fewest bytes.

    All stages of a rank move the part of the same index. Of two choices that move equally much, the larger part moves
    fewer times.

    Args:
        schedule: The schedule without transfers.
        budget: The bytes that every rank has room for.
        parts: By stage, the sizes of a part of a micro-batch to choose from.
        partners: By rank; as in `balance_within`.

    Raises:
        BudgetTooSmall: The ranks of a pair have too little room.
    """
    chosen = chosen_partners(schedule, budget) if partners is None else pairing(schedule.num_ranks, partners)
    plain = replace(schedule, hosts=in_pairs(chosen))
    for pair in pairs_of(chosen):
        budget = replace(budget, memory=_fewest_of_pair(plain, pair, budget, parts))
    return budget


def _fewest_of_pair(plain: Schedule, pair: Pair, budget: ActivationBudget, parts: Parts) -> Memory:
    best: tuple[int, Memory] | None = None
    refusal: BudgetTooSmall | None = None
    for memory in (budget.memory, *less_moved(plain, pair, budget.memory, parts)):
        try:
            fitted = _pair_fitted(plain, pair, replace(budget, memory=memory))
        except BudgetTooSmall as error:
            refusal = refusal or error
            continue
        sent = {rank: sent_bytes(fitted, rank, memory) for rank in pair}
        if best is None or sum(sent.values()) < best[0]:
            stages = _stages_of(plain, [rank for rank in pair if sent[rank]])
            sizes = enumerate(zip(budget.memory.stages, memory.stages, strict=True))
            moved = tuple(less if place // memory.slices in stages else whole for place, (whole, less) in sizes)
            best = sum(sent.values()), replace(budget.memory, stages=moved)
        if not any(sent.values()):
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best[1]


def _stages_of(schedule: Schedule, ranks: Sequence[int]) -> set[int]:
    return {stage for rank in ranks for stage in schedule.layout.stages_of(rank)}


def less_moved(schedule: Schedule, ranks: Sequence[int], memory: Memory, parts: Parts) -> Iterator[Memory]:
    """Yield memories in which transfers of these ranks' stages move less and less."""
    stages = _stages_of(schedule, ranks)
    count = max((len(parts[stage]) for stage in stages), default=0) if parts else 0
    for less in range(2, count + 1):
        part = {stage: parts[stage][max(0, len(parts[stage]) - less)] for stage in stages}
        places = enumerate(memory.stages)
        sizes = (
            replace(size, moved_bytes=part.get(place // memory.slices, size.moved_bytes)) for place, size in places
        )
        yield replace(memory, stages=tuple(sizes))


def sent_bytes(schedule: Schedule, rank: int, memory: Memory) -> int:
    """Return the bytes that leave a rank in an iteration."""
    evicted = (action for _, action in schedule.transfers(rank) if action.kind is Kind.EVICT)
    return sum(memory.size(*action.key).moved_bytes for action in evicted)


def chosen_partners(schedule: Schedule, budget: ActivationBudget) -> tuple[int, ...]:
    """Pair the ranks that lack most with those that have most to spare."""
    rooms = enumerate(budget.room_bytes)
    return default_partners([sum(allocated_bytes(schedule, rank, budget.memory)) - room for rank, room in rooms])


def smallest_level_of_pair(
    schedule: Schedule,
    partners: Sequence[int],
    pair: Pair,
    rooms_at: Callable[[int], ActivationBudget],
    limit: int,
    parts: Parts = (),
) -> int:
    """Return the smallest level in 1 to `limit` whose rooms suffice for the pair; more than `limit` if none does.

    Args:
        schedule: The schedule without transfers.
        partners: By rank.
        pair: The two ranks.
        rooms_at: Returns the budget of a level, in which no rank's room is smaller at a higher level.
        limit: The highest level to try.
        parts: By stage, the sizes of a part of a micro-batch to choose from; by default all of it moves.
    """
    plain = replace(schedule, hosts=in_pairs(partners))
    memory = rooms_at(limit).memory
    ranks = tuple(sorted(set(pair)))
    together = max(map(sum, zip(*(own_bytes(schedule, rank, memory) for rank in ranks), strict=True)), default=0)

    def attempt(level: int) -> None:
        budget = rooms_at(level)
        if sum(budget.room_bytes[rank] for rank in ranks) >= together:
            # Evicting micro-batches whole frees most; a part lets rooms be shared more evenly.
            for moved in (budget.memory, *less_moved(plain, pair, budget.memory, parts)):
                with suppress(BudgetTooSmall):
                    _pair_fitted(plain, pair, replace(budget, memory=moved))
                    return
        raise BudgetTooSmall(pair, "the pair has too little room")

    return smallest_level(attempt, limit)[0]


def smallest_level(attempt: Callable[[int], object], limit: int) -> tuple[int, Pair]:
    """Return the smallest level in 1 to `limit` at which an attempt does not raise BudgetTooSmall, more than `limit` if
    none, and the ranks that lacked room just below it.

    Args:
        attempt: No rank's room is smaller at a higher level.
        limit: The highest level to try.
    """
    low, high, worst = 0, limit + 1, (0, 0)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            attempt(middle)
            high = middle
        except BudgetTooSmall as error:
            low, worst = middle, error.pair
    return high, worst


def _pair_fitted(schedule: Schedule, pair: Pair, budget: ActivationBudget) -> Schedule:
    """Return the schedule with the transfers of this pair."""
    memory, rooms, ranks = budget.memory, budget.room_bytes, sorted(set(pair))
    over = [rank for rank in ranks if max(live_bytes(schedule, rank, memory), default=0) > rooms[rank]]
    if over and pair[0] == pair[1]:
        raise BudgetTooSmall(pair, f"rank {pair[0]} has no partner and no room for its own micro-batches")
    if len(over) == 2:
        raise BudgetTooSmall(pair, f"ranks {pair[0]} and {pair[1]} both have no room for their own micro-batches")
    if not over:
        return schedule
    sender, host = over[0], pair[1] if over[0] == pair[0] else pair[0]
    plan = plan_rank(schedule, sender, rooms[sender], memory)
    if isinstance(plan, str):
        raise BudgetTooSmall(pair, plan)
    rows = list(schedule.ranks)
    for rank in pair:
        rows[rank] = with_transfers(rows[rank], plan, own=rank == sender)
    schedule = replace(schedule, ranks=tuple(rows))
    needed = sum(allocated_bytes(schedule, host, memory))
    if needed > rooms[host]:
        sizes = f"needs {needed} {memory.unit} but has room for {rooms[host]} {memory.unit}"
        raise BudgetTooSmall(pair, f"rank {host}, which hosts for rank {sender}, {sizes}")
    return schedule
