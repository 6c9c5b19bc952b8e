"""The smallest bound of a pair, against an oracle that tries every eviction and load in every slot."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, product

import pytest

from bpipe.balance.pairs import balance, choose_partners, pairs_of, smallest_bound
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.layout import one_pipe
from bpipe.schedule.memory import counts_of, peak_counts
from bpipe.schedule.schedule import Schedule

F, B = Kind.FORWARD, Kind.BACKWARD

# A stage's micro-batch, and the slots of its forward, of what needs it back, and of what lets it go.
Key = tuple[int, int]
Spans = dict[Key, tuple[int, int, int]]
Keys = frozenset[Key]
# Of each rank of a pair, which are away, and which were.
State = tuple[tuple[Keys, Keys], tuple[Keys, Keys]]
NOTHING: Keys = frozenset()


def drawn(seed: int) -> Schedule:
    """Every rank's order drawn at random from what could come next."""
    rng = random.Random(seed)
    p, m = rng.choice((2, 2, 3, 4)), rng.randint(2, 5)
    orders: list[list[Action]] = [[] for _ in range(p)]
    done: set[Action] = set()
    while len(done) < 2 * p * m:
        ready = [
            action
            for rank, k, kind in product(range(p), range(m), (F, B))
            if (action := Action(rank, kind, k)) not in done and all(need in done for need in needs(action, p))
        ]
        action = rng.choice(ready)
        done.add(action)
        orders[action.stage].append(action)
    return place("drawn", m, one_pipe(range(p)), orders)


def needs(action: Action, p: int) -> list[Action]:
    rank, kind, k = action.stage, action.kind, action.microbatch
    if kind is F:
        return [Action(rank - 1, F, k)] if rank else []
    return [Action(rank, F, k), *([Action(rank + 1, B, k)] if rank < p - 1 else [])]


def subsets(items: list[Key]) -> Iterator[Keys]:
    for size in range(len(items) + 1):
        yield from map(frozenset, combinations(items, size))


def can_keep(schedule: Schedule, pair: tuple[int, int], bound: int) -> bool:
    """Whether any evictions and loads keep both ranks within the bound, if each micro-batch leaves at most once."""
    spans = [spans_of(schedule, rank) for rank in pair]
    states: set[State] = {((NOTHING, NOTHING), (NOTHING, NOTHING))}
    for slot in range(len(schedule.ranks[0])):
        after: set[State] = set()
        for state in states:
            choices = [list(moves(spans[one], *state[one], slot)) for one in (0, 1)]
            for chosen in product(*choices):
                held = [
                    sum(first <= slot <= last for first, _, last in spans[one].values())
                    - len(state[one][0])
                    + len(chosen[one][0])
                    + len(state[1 - one][0])
                    + len(chosen[1 - one][1])
                    for one in (0, 1)
                ]
                if max(held) <= bound:
                    mine, other = (
                        ((away - loaded) | evicted, back | loaded)
                        for (away, back), (loaded, evicted) in zip(state, chosen, strict=True)
                    )
                    after.add((mine, other))
        states = after
    return any(not mine[0] and not other[0] for mine, other in states)


def spans_of(schedule: Schedule, rank: int) -> Spans:
    found: Spans = {}
    for number, slot in enumerate(schedule.ranks[rank]):
        if slot.compute is not None:
            key = slot.compute.stage, slot.compute.microbatch
            first, needed, _ = found.get(key, (number, number, number))
            found[key] = first, number if slot.compute.kind in (B, Kind.BACKWARD_INPUT) else needed, number
    return found


def moves(spans: Spans, away: Keys, back: Keys, slot: int) -> Iterator[tuple[Keys, Keys]]:
    """What a rank may load and evict beside a slot. What its next slot computes on has to come back now."""
    due = {key for key in away if spans[key][1] == slot + 1}
    may_leave = [
        key
        for key, (first, needed, _) in spans.items()
        if first < slot < needed - 1 and key not in away and key not in back
    ]
    for loaded in subsets(sorted(away)):
        if due <= loaded:
            yield from ((loaded, evicted) for evicted in subsets(may_leave))


def bounds_of(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Of every pair, the smallest bound that is found and the smallest there is."""
    memory = counts_of(schedule)
    for pair in pairs_of(choose_partners(schedule, None)):
        if pair[0] != pair[1]:
            found = smallest_bound(schedule, pair, memory)
            yield (
                found,
                next(bound for bound in range(1, found + 1) if bound == found or can_keep(schedule, pair, bound)),
            )


SMALL = [(name, p, m, 1) for name in ("gpipe", "1f1b", "1f1b-split", "zb-h1") for p in (2, 3, 4) for m in (2, 3, 4, 5)]
LARGER = [(name, p, m, 1) for name in ("1f1b", "1f1b-split") for p, m in ((6, 6), (8, 8))]
LARGER.append(("grouped-interleaved", 4, 4, 2))
CHUNKS = [
    (name, 2, m, 2) for name in ("interleaved-1f1b", "grouped-interleaved", "zb-v", "v-half", "v-min") for m in (2, 4)
]


@pytest.mark.parametrize(("name", "p", "m", "chunks"), [*SMALL, *LARGER, *CHUNKS])
def test_of_a_family_it_is_the_smallest_there_is(name: str, p: int, m: int, chunks: int) -> None:
    assert [found == least for found, least in bounds_of(FAMILIES[name].generate(p, m, chunks))] == [True] * (p // 2)


def test_of_drawn_orders_it_is_hardly_ever_more_than_the_smallest() -> None:
    """Loads right before their backwards made partners host too long: 2 % of these can keep one less."""
    every = [pair for seed in range(600) for pair in bounds_of(drawn(seed))]
    assert len(every) > 700
    assert max(found - least for found, least in every) <= 1
    assert sum(found > least for found, least in every) <= len(every) // 80


@pytest.mark.parametrize(("seed", "bound"), [(54, 3), (61, 2), (110, 2), (248, 3), (263, 3)])
def test_where_a_partner_has_room_only_for_a_while_loads_come_early(seed: int, bound: int) -> None:
    """Bounds that were refused: what is hosted goes back as soon as its own rank has room for it again."""
    schedule = drawn(seed)
    balanced = balance(schedule, (bound,) * schedule.num_ranks)
    check(balanced)
    assert max(peak_counts(balanced)) <= bound < max(peak_counts(schedule))
