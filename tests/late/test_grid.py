"""Compare the deadlock checker with late groups over a grid of plans (`tests.late.grid`).

In addition to balanced plans, transfers are started earlier or later on the hosts' side, which deadlocks many plans.
"""

import pytest

from bpipe.schedule.action import Kind
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.lowering.lower import lower
from bpipe.schedule.program import Exchange
from tests.late.cases import SCHEDULES
from tests.late.grid import (
    EXCHANGES,
    MOVES,
    Run,
    deadlocks,
    disagreements,
    may_deadlock,
    moved,
    moves_anything,
    plan_of,
)
from tests.support.hand_made import far_ahead, host_first

PLANS = {**SCHEDULES, "far ahead": far_ahead}
SHARE = [
    ("v-half", 4),
    ("zb-h1", 4),
    *(
        pytest.param(name, p, marks=pytest.mark.slow)
        for name, p in (("1f1b", 8), ("interleaved-1f1b", 4), ("chimera", 4))
    ),
]


@pytest.mark.parametrize("kind", ["two-sided", "host"])
@pytest.mark.parametrize("name", PLANS)
def test_both_say_the_same_of_a_schedule(name: str, kind: str) -> None:
    """Run our own loop, with one hardware queue per stream and with one for all."""
    schedule = PLANS[name]()
    for waits, connections in ((WaitLevel.ASYNCHRONOUS, 0), (WaitLevel.ONE_QUEUE, 1)):
        run = Run(kind, connections, waits)
        assert deadlocks(schedule, Exchange.POSTED, run) == bool(blocked_ranks(schedule, waits)), run


@pytest.mark.parametrize(("name", "p"), SHARE)
def test_both_say_the_same(name: str, p: int) -> None:
    for exchange in sorted(EXCHANGES[name], key=lambda member: member.value):
        schedule = plan_of(name, p, p if p == 8 else 2 * p, exchange)
        assert schedule is not None
        assert disagreements(schedule, exchange, everything=False)[0] == []


@pytest.mark.parametrize(("name", "exchange"), [("1f1b", Exchange.POSTED), ("zb-h1", Exchange.TORCH)])
def test_both_say_the_same_of_a_plan_that_was_moved(name: str, exchange: Exchange) -> None:
    schedule = plan_of(name, 4, 8, exchange)
    assert schedule is not None
    changed = moved(schedule, Kind.HOST, 2)
    assert changed is not None
    wrong, num_deadlocks = disagreements(changed, exchange, everything=False, in_one_slot=False)
    assert wrong == []
    assert num_deadlocks


def test_memory_that_a_host_lends_is_waited_for() -> None:
    """The hosts come three slots after the evictions. The checker reported a deadlock, but with both ends taking part,
    nothing is lent and the plan runs. It deadlocks over `peer` if hosts wait for messages."""
    schedule = plan_of("mixpipe", 6, 12, Exchange.POSTED)
    assert schedule is not None
    changed = moved(schedule, Kind.HOST, 3)
    assert changed is not None
    for kind, stands in (("two-sided", False), ("peer", True)):
        run = Run(kind, hosts_wait=True)
        assert deadlocks(changed, Exchange.POSTED, run) is stands
        assert may_deadlock(changed, Exchange.POSTED, run) is stands


def test_both_say_the_same_of_births() -> None:
    """Megatron's 1F1B of 8 stages deadlocks unless its communicator is made in advance, over all that send sizes;
    with 4 stages it does not."""
    for p, stands in ((4, False), (8, True)):
        schedule = plan_of("1f1b", p, 8, Exchange.MEGATRON_1F1B)
        assert schedule is not None
        for kind in ("two-sided", "peer"):
            for births in (False, True):
                run = Run(kind, births=births)
                verdicts = (
                    deadlocks(schedule, Exchange.MEGATRON_1F1B, run),
                    may_deadlock(schedule, Exchange.MEGATRON_1F1B, run),
                )
                assert verdicts == (stands and births, stands and births), run
        # With a node's own memory, no rank waits for sizes.
        assert not deadlocks(schedule, Exchange.MEGATRON_1F1B, Run("host", births=True))


def test_both_say_the_same_of_plans_that_stand_still() -> None:
    for schedule, run, stands in (
        (far_ahead(), Run(), False),
        (far_ahead(), Run(waits=WaitLevel.ONE_QUEUE, connections=1), True),
        (host_first(), Run(), False),
        (host_first(), Run(differing=True), True),
        (host_first(), Run(waits=WaitLevel.AT_ISSUE, at_issue=True), True),
    ):
        assert (deadlocks(schedule, Exchange.POSTED, run), may_deadlock(schedule, Exchange.POSTED, run)) == (
            stands,
            stands,
        ), run


def test_a_rank_that_idles_takes_two_messages_of_one_neighbour() -> None:
    """With six stages or more and twice as many micro-batches, an idle rank that waits for its next forward is sent two
    gradients. The stand-in for Megatron's loop took only one, and failed for every such plan of the slow grid."""
    exchange = Exchange.MEGATRON_INTERLEAVED
    schedule = plan_of("interleaved-1f1b", 6, 12, exchange)
    assert schedule is not None
    instructions = [str(instruction) for instruction in lower(schedule, exchange)[0].instructions]
    assert "post 7B2>6B2, post 7B3>6B3" in ", ".join(instructions)
    assert disagreements(schedule, exchange, everything=False)[0] == []


def test_launches_that_block_hold_our_own_loop_and_not_megatrons() -> None:
    """A host that waits for a receive which it posts ahead never reaches what the sender waits for; the trainer refuses
    such a plan with CUDA_LAUNCH_BLOCKING=1."""
    for exchange, stands in ((Exchange.POSTED, True), (Exchange.MEGATRON_1F1B, False)):
        schedule = plan_of("1f1b", 4, 8, exchange)
        assert schedule is not None
        for kind in ("two-sided", "host"):
            run = Run(kind, waits=WaitLevel.BLOCKING_LAUNCHES)
            assert deadlocks(schedule, exchange, run) is stands, run
            assert may_deadlock(schedule, exchange, run) is stands, run


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAMILIES)
def test_both_say_the_same_over_the_grid(name: str) -> None:
    wrong: list[str] = []
    for p, m in ((4, 4), (4, 8), (6, 12), (8, 8), (8, 16)):
        for exchange in sorted(EXCHANGES[name], key=lambda member: member.value):
            for hosts in ("pair", "pool"):
                schedule = plan_of(name, p, m, exchange, hosts)
                if schedule is not None and (hosts == "pair" or moves_anything(schedule)):
                    wrong += [
                        f"p={p} m={m} {hosts} {difference}"
                        for difference in disagreements(schedule, exchange, everything=True)[0]
                    ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAMILIES)
def test_both_say_the_same_of_plans_that_were_moved(name: str) -> None:
    wrong: list[str] = []
    plans = num_deadlocks = 0
    for p, m in ((4, 8), (6, 12)):
        for exchange in sorted(EXCHANGES[name], key=lambda member: member.value):
            schedule = plan_of(name, p, m, exchange)
            for kind, by in MOVES if schedule is not None else ():
                assert schedule is not None
                changed = moved(schedule, kind, by)
                if changed is not None:
                    differences, deadlocked = disagreements(changed, exchange, everything=True, in_one_slot=False)
                    plans, num_deadlocks = plans + 1, num_deadlocks + deadlocked
                    wrong += [f"p={p} m={m} {kind.name} {by:+} {difference}" for difference in differences]
    print(f"{name}: {plans} plans, {num_deadlocks} runs deadlocked")
    assert wrong == []
    assert plans
    assert num_deadlocks
