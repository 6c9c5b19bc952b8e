"""BPipe's worked example, and its algorithm as printed (with the erratum), against the balancing pass on 1F1B."""

from __future__ import annotations

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import balance
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Kind
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.host_buffers import num_host_buffers
from bpipe.schedule.memory import live_counts, num_transfers, peak_counts
from bpipe.schedule.schedule import Schedule

SIZES = [(p, m) for p in range(2, 17) for m in sorted({1, 2, p - 1, p, p + 1, 2 * p, 3 * p + 1, 6 * p})]
LARGE = [pytest.param(p, m, marks=pytest.mark.slow) for p in range(17, 33) for m in (p - 1, p, p + 1, 3 * p, 6 * p)]


def mu_opt(num_stages: int) -> int:
    return -(-(num_stages + 2) // 2)


def algorithm_1(schedule: Schedule, stage: int) -> dict[int, set[tuple[str, int]]]:
    """Kim et al. 2023, Algorithm 1; "latest finished forward" for the index of slot i-3, which may be a bubble."""
    p, m = schedule.num_stages, schedule.num_microbatches
    row = [slot.compute for slot in schedule.ranks[stage]]
    plan: dict[int, set[tuple[str, int]]] = {}
    num_evictions = max(0, min(p - stage, m) - mu_opt(p))
    away: set[int] = set()
    for slot, compute in enumerate(row):
        if compute is None:
            continue
        if compute.kind is Kind.FORWARD:
            if mu_opt(p) - 1 <= compute.microbatch < mu_opt(p) - 1 + num_evictions:
                previous = row[slot - 1]
                assert previous is not None
                plan.setdefault(slot, set()).add(("EVICT", previous.microbatch))
                away.add(previous.microbatch)
        elif compute.microbatch in away:
            plan.setdefault(slot - 1, set()).add(("LOAD", compute.microbatch))
            away.discard(compute.microbatch)
            before = row[slot - 1]
            if before is not None and before.kind is Kind.FORWARD:
                finished = [one.microbatch for one in row[: slot - 2] if one is not None and one.kind is Kind.FORWARD]
                plan.setdefault(slot - 2, set()).add(("EVICT", finished[-1]))
                away.add(finished[-1])
    return plan


def placed(plan: dict[int, set[tuple[str, int]]]) -> dict[tuple[str, int, int], int]:
    """By transfer, and how many of its kind that micro-batch had before, the slot."""
    found: dict[tuple[str, int, int], int] = {}
    for slot, transfers in sorted(plan.items()):
        for kind, microbatch in transfers:
            nth = sum(one[:2] == (kind, microbatch) for one in found)
            found[kind, microbatch, nth] = slot
    return found


def test_the_worked_example() -> None:
    schedule = build(ScheduleConfig("1f1b", num_ranks=4, num_microbatches=8, balance=BalanceConfig()))
    computed = "F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2 F6 B3 F7 B4  . B5  . B6  . B7"
    moved = " .  . E1  .  .  .  . E3 L1  .  . E5 L3  .  .  . L5  .  .  .  .  ."
    hosted = " .  . H1  .  .  .  . H3 R1  .  . H5 R3  .  .  . R5  .  .  .  .  ."
    row = schedule.ranks[0]
    assert [str(slot.compute)[1:] if slot.compute else "." for slot in row] == computed.split()
    assert [
        "+".join(f"{a.kind.value[0]}{a.microbatch}" for a in slot.transfers) or "." for slot in row
    ] == moved.split()
    row = schedule.ranks[3]
    assert [
        "+".join(f"{a.kind.value[0]}{a.microbatch}" for a in slot.transfers) or "." for slot in row
    ] == hosted.split()
    assert all(action.stage == 0 for slot in row for action in slot.transfers), "a HOST names the evictor's stage"
    assert schedule.bounds == (3, 3, 3, 3)
    assert schedule.partners == (3, 2, 1, 0)
    assert live_counts(schedule, 0) == (1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 1, 1)
    assert num_host_buffers(schedule, 3) == 2


@pytest.mark.parametrize(("p", "m"), [*SIZES, *LARGE])
def test_balancing_1f1b_is_algorithm_1(p: int, m: int) -> None:
    plain = FAMILIES["1f1b"].generate(p, m, 1)
    assert len(plain.ranks[0]) == 2 * (m + p - 1)
    assert peak_counts(plain) == tuple(min(p - stage, m) for stage in range(p))
    balanced = balance(plain, [mu_opt(p)] * p)
    check(balanced)
    assert max(peak_counts(balanced)) <= mu_opt(p)
    for stage in range(p // 2):
        made = placed(
            {
                slot: {(action.kind.value, action.microbatch) for action in cell.transfers}
                for slot, cell in enumerate(balanced.ranks[stage])
            }
        )
        printed = placed(algorithm_1(plain, stage))
        assert made.keys() == printed.keys()
        for transfer, slot in made.items():
            # Loads come as soon as the bound has room for them, where the algorithm leaves them the slot before their
            # backward.
            assert slot == printed[transfer] or (transfer[0] == "LOAD" and slot < printed[transfer])
        acceptor = p - 1 - stage
        assert num_host_buffers(balanced, acceptor) <= max(0, p - stage - mu_opt(p) + 1)


@pytest.mark.parametrize("p", range(1, 17))
def test_the_smallest_bound_is_the_papers_once_the_pipeline_is_full(p: int) -> None:
    """`mu_opt`: a pair saves p + 1 micro-batches together, and one more place serves an eviction and a load at once."""
    for m in (*range(1, p + 3), 3 * p + 1):
        (bound,) = set(build(ScheduleConfig("1f1b", p, m, balance=BalanceConfig())).bounds or ())
        assert bound == mu_opt(p) == (p + 3) // 2 if m >= p > 1 else bound <= mu_opt(p)


def test_a_short_iteration_keeps_less() -> None:
    """Four micro-batches never fill five ranks: the formula says 4, which is what they hold as they are."""
    schedule = build(ScheduleConfig("1f1b", 5, 4, balance=BalanceConfig()))
    assert schedule.bounds == (3,) * 5
    assert peak_counts(schedule) == (3, 3, 3, 3, 2)


# Exhaustive search under the same bound finds no fewer evictions: (p, m) -> one number an evictor.
FEWEST = {
    (4, 4): [1],
    (4, 5): [2],
    (4, 8): [3],
    (4, 12): [5],
    (5, 8): [2],
    (6, 6): [2, 1],
    (6, 10): [4, 3],
    (6, 12): [5, 3],
    (8, 8): [3, 2, 1],
    (8, 10): [3, 3, 2],
}


@pytest.mark.parametrize(("p", "m"), FEWEST)
def test_evictions_are_as_few_as_exhaustive_search_finds(p: int, m: int) -> None:
    balanced = build(ScheduleConfig("1f1b", p, m, balance=BalanceConfig()))
    assert [num_transfers(balanced, stage).evictions for stage in range((p - 4) // 2 + 1)] == FEWEST[p, m]
