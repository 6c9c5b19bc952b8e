"""No balanced plan deadlocks when everything waits for its other end, and the checker would notice if one did."""

from collections.abc import Iterable, Iterator

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import balance
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.check import deadlock
from bpipe.schedule.check.deadlock import Blocked, WaitLevel, size_messages
from bpipe.schedule.check.deadlock import blocked_ranks as blocked_in
from bpipe.schedule.check.rules import ScheduleError
from bpipe.schedule.families.families import FAMILIES, exchange_of
from bpipe.schedule.files.text import read_csv
from bpipe.schedule.host_buffers import Residency, host_buffers
from bpipe.schedule.lowering import lower
from bpipe.schedule.program import Exchange, Step, steps
from bpipe.schedule.schedule import Schedule
from tests.support.hand_made import PLANNED_WAITS, far_ahead, host_first, with_late_loads


def blocked_ranks(schedule: Schedule, waits: WaitLevel = WaitLevel.IN_EVERY_OPERATION) -> tuple[Blocked, ...]:
    """Return what blocks when a schedule runs by its family's exchange."""
    return blocked_in(schedule, waits, exchange_of(schedule.name))


def plans(name: str, chunks: int, stages: tuple[int, ...]) -> list[Schedule]:
    """Return schedules balanced to every bound from the smallest to four above it."""
    schedules = []
    for p in stages:
        for m in (p - 1, p, 2 * p, 3 * p + 1):
            plain = FAMILIES[name].generate(p, m, chunks)
            least = max(balance(plain).bounds or ())
            schedules += [balance(plain, [bound] * p) for bound in range(least, least + 4)]
    return schedules


def steps_without_start(schedule: Schedule, rank: int) -> Iterator[Step]:
    """Return steps in which transfers of the start wait until the rank reaches its first computation."""
    start, first, *others = steps(schedule, rank)
    return iter((Step(None), Step(first.compute, start.after + first.before, first.after), *others))


@pytest.mark.parametrize("waits", [waits for waits in WaitLevel if waits <= WaitLevel.IN_EVERY_OPERATION])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3)])
def test_no_plan_deadlocks(name: str, chunks: int, waits: WaitLevel) -> None:
    stages = (4, 6, 8, 12, 16) if chunks == 1 else (4, 6, 8)
    for schedule in plans(name, chunks, stages):
        assert not blocked_ranks(schedule, waits)


def default_plans(stages: Iterable[int], chunks: int, rounds: Iterable[int]) -> list[Schedule]:
    """Return plans as training runs them: balanced to the schedule's own bound."""
    name = "1f1b" if chunks == 1 else "interleaved-1f1b"
    sizes = [(p, p * times) for p in stages for times in rounds]
    return [build(ScheduleConfig(name, p, m, num_chunks=chunks, balance=BalanceConfig())) for p, m in sizes]


@pytest.mark.parametrize("chunks", [1, *(pytest.param(chunks, marks=pytest.mark.slow) for chunks in (2, 3))])
def test_no_default_plan_deadlocks_however_strictly_it_waits(chunks: int) -> None:
    """With one queue 13 of these 60 deadlocked: a pair's last transfers came before the last gradient."""
    for schedule in default_plans((4, 6, 8, 12, 16), chunks, (1, 2, 4, 8)):
        assert not any(blocked_ranks(schedule, waits) for waits in PLANNED_WAITS)


def steps_without_end(schedule: Schedule, rank: int) -> Iterator[Step]:
    """Return steps in which transfers after the last computation start before its message."""
    *others, last, end = steps(schedule, rank)
    return iter((*others, Step(last.compute, last.before, end.after), Step(None)))


@pytest.mark.parametrize(("p", "m", "chunks"), [(8, 32, 1), (12, 12, 1), (16, 32, 2)])
def test_last_transfers_before_the_last_message_are_noticed(
    p: int, m: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In schedules whose loads come late, rank p-1 returns two micro-batches at its end.

    The second return waits for the first, which rank 0 receives only after gradients that rank p-1 has yet to send.
    """
    monkeypatch.setattr(lower, "steps", steps_without_end)
    (schedule,) = map(with_late_loads, default_plans((p,), chunks, (m // p,)))
    assert [bool(blocked_ranks(schedule, level)) for level in WaitLevel] == [
        level >= WaitLevel.AT_ISSUE for level in WaitLevel
    ]
    assert "transfer" in {block.rank: block.message for block in blocked_ranks(schedule, WaitLevel.AT_ISSUE)}[p - 1]


@pytest.mark.parametrize(
    ("p", "stuck_from"),
    [
        (4, WaitLevel.AT_ISSUE),
        (7, WaitLevel.AT_ISSUE),
        (8, WaitLevel.ASYNCHRONOUS),
        (12, WaitLevel.ASYNCHRONOUS),
        (16, WaitLevel.ASYNCHRONOUS),
    ],
)
def test_in_megatrons_1f1b_ranks_cannot_wait_for_sizes_before_there_is_a_communicator(
    p: int, stuck_from: WaitLevel
) -> None:
    """From 8 stages on, every first iteration over NCCL deadlocked; with fewer, it did once something synchronised the
    device before a message.

    Rank 6 of 8 waited for rank 1's sizes, rank 1 for rank 0's output, and rank 0 for rank 6 to make the pipeline's
    communicator.
    """
    for m in (p, 2 * p, 4 * p):
        schedule = build(ScheduleConfig("1f1b", p, m, num_chunks=1, balance=BalanceConfig()))
        verdicts = {waits: blocked_in(schedule, waits, Exchange.MEGATRON_1F1B, births=True) for waits in WaitLevel}
        assert [bool(blocked) for blocked in verdicts.values()] == [waits >= stuck_from for waits in WaitLevel]
        messages = {blocked.message for blocked in verdicts[stuck_from]}
        assert "the communicator of all ranks to be made" in messages
        if p == 8:
            assert "the sizes of what 1HOST3 carries" in messages
            assert {blocked.peer for blocked in verdicts[stuck_from]} == {1, 6}


def exchanges(name: str) -> list[Exchange]:
    """Return the exchanges by which a schedule of this name may run."""
    both = [Exchange.MEGATRON_INTERLEAVED, Exchange.MEGATRON_TURNS, Exchange.POSTED]
    return both if name == "interleaved-1f1b" else [FAMILIES[name].exchange, Exchange.POSTED]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_default_plan_but_megatrons_1f1b_depends_on_communicators_made_before(name: str) -> None:
    """Megatron's interleaved loop creates one communicator per pair of ranks; our own loop creates all at first."""
    family = FAMILIES[name]
    for p, m in ((4, 8), (8, 16), (12, 24)):
        for v in range(family.min_chunks, min(family.max_chunks or 2, 2) + 1):
            for exchange in exchanges(name):
                try:
                    schedule = build(
                        ScheduleConfig(name, p, m, num_chunks=v, balance=BalanceConfig(), exchange=exchange)
                    )
                except ScheduleError:
                    # Some cannot be balanced in this loop, which is refused before anything runs.
                    continue
                stuck = bool(blocked_in(schedule, WaitLevel.ASYNCHRONOUS, exchange, births=True))
                assert stuck == (exchange is Exchange.MEGATRON_1F1B and name == "1f1b" and p >= 8), (p, m, v, exchange)


REFILLED = """\
# bpipe schedule=1f1b microbatches=3 stage_to_rank=0,1 partners=1,0
0F0,0F1,0F2 0EVICT1,,0B0,0LOAD1,0EVICT2,,0B1 0LOAD2,,0B2
,1F0,1F1 0HOST1,1B0,,0RETURN1,0HOST2,1B1,1F2 0RETURN2,1B2,
"""


def slots_for_all(schedule: Schedule, rank: int) -> dict[Residency, int]:
    return {stay: slot for slot, stay in enumerate(host_buffers(schedule, rank))}


def test_a_slot_is_filled_only_when_it_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 hosts micro-batch 2 in the buffer of 1 before it sends the gradient that rank 0 needs to load 1."""
    schedule = read_csv(REFILLED)
    blocked = blocked_ranks(schedule, WaitLevel.ASYNCHRONOUS)
    assert {block.rank: block.message for block in blocked}[1] == "transfer 0 from rank 1 to rank 0"
    monkeypatch.setattr(lower, "host_buffers", slots_for_all)
    assert not blocked_ranks(schedule, WaitLevel.ASYNCHRONOUS)


def test_with_one_queue_what_is_sent_far_ahead_of_its_receiver_stands_in_the_way() -> None:
    """The third output blocks rank 0's queue until rank 1 receives the second."""
    schedule = far_ahead()
    blocked = {waits: blocked_in(schedule, waits, Exchange.POSTED) for waits in WaitLevel}
    assert [bool(faults) for faults in blocked.values()] == [waits >= WaitLevel.ONE_QUEUE for waits in WaitLevel]
    assert blocked[WaitLevel.ONE_QUEUE][0] == Blocked(0, 3, "the output of 0F2", 1)


def test_with_launches_that_block_receives_are_not_posted_ahead() -> None:
    """CUDA_LAUNCH_BLOCKING=1: our own loop posts a receive before it sends what the other end waits for, and the
    interleaved loop sends messages one by one. Batched messages do not block."""
    for name, chunks, passes in (
        ("1f1b", 1, {Exchange.POSTED: False, Exchange.MEGATRON_1F1B: True}),
        ("interleaved-1f1b", 2, {Exchange.MEGATRON_INTERLEAVED: False, Exchange.MEGATRON_TURNS: True}),
    ):
        for exchange, goes_on in passes.items():
            schedule = build(ScheduleConfig(name, 4, 8, num_chunks=chunks, balance=BalanceConfig(), exchange=exchange))
            assert bool(blocked_in(schedule, WaitLevel.BLOCKING_LAUNCHES, exchange)) is not goes_on
            assert not blocked_in(schedule, WaitLevel.ONE_QUEUE, exchange)


def test_where_sizes_differ_a_host_waits_for_its_evictor() -> None:
    """A host waits for the lengths of storages; two ranks that host before they evict would wait for each other's."""
    schedule = host_first()
    for waits in PLANNED_WAITS:
        assert bool(blocked_in(schedule, waits, Exchange.POSTED)) == (waits >= WaitLevel.AT_ISSUE)
        blocked = blocked_in(schedule, waits, Exchange.POSTED, differing=True)
        assert next((block.rank, block.peer, block.message) for block in blocked) == (
            0,
            1,
            "transfer 0 from rank 1 to rank 0",
        )


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 16), (12, 24)])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_default_plan_deadlocks_on_account_of_lengths(name: str, p: int, m: int) -> None:
    """A rank that waits for each transfer at its start also waits for its lengths."""
    for exchange in exchanges(name):
        for hosts in ("pair", "pool"):
            balanced = BalanceConfig(hosts=hosts)
            try:
                schedule = build(
                    ScheduleConfig(
                        name, p, m, num_chunks=FAMILIES[name].min_chunks, balance=balanced, exchange=exchange
                    )
                )
            except ScheduleError:
                continue
            assert not blocked_in(schedule, WaitLevel.IN_EVERY_OPERATION, exchange, differing=True)


POSTED = [
    (name, p, m, v)
    for name, family in FAMILIES.items()
    for p, m in ((4, 8), (6, 12), (8, 16))
    for v in range(family.min_chunks, min(family.max_chunks or 3, 3) + 1)
]


@pytest.mark.parametrize(("name", "p", "m", "v"), POSTED)
def test_no_family_deadlocks_in_our_own_loop_however_strictly_it_waits(name: str, p: int, m: int, v: int) -> None:
    for balancing in (None, BalanceConfig()):
        schedule = build(ScheduleConfig(name, p, m, num_chunks=v, balance=balancing, exchange=Exchange.POSTED))
        assert not any(blocked_in(schedule, waits, Exchange.POSTED) for waits in PLANNED_WAITS)


def test_without_a_hook_at_the_start_acceptors_come_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """An acceptor that starts its half only at its first computation waits there for a rank that waits for it."""
    monkeypatch.setattr(lower, "steps", steps_without_start)
    schedules = plans("1f1b", 1, (4, 6, 8))
    stuck = [schedule for schedule in schedules if blocked_ranks(schedule, WaitLevel.IN_EVERY_OPERATION)]
    assert stuck
    assert not any(blocked_ranks(schedule, WaitLevel.AFTER_EXCHANGES) for schedule in stuck)
    blocked = {block.rank for block in blocked_ranks(stuck[0])}
    assert {0, stuck[0].num_ranks - 1} <= blocked


RINGS = [{(0, 1), (1, 0)}, {(0, 1), (1, 2), (2, 0)}, {(0, 2), (1, 0), (2, 1), (2, 0)}]


@pytest.mark.parametrize("links", RINGS)
def test_words_with_which_iterations_begin_go_round_in_no_ring(
    links: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that host for each other in a ring send before they receive, so nobody waits for ever; in the reverse order
    they would."""
    plain = FAMILIES["1f1b"].generate(3, 4, 1)
    monkeypatch.setattr(deadlock, "links_of", lambda schedule: links)
    assert not blocked_ranks(plain)

    def hearing_first(of: Iterable[tuple[int, int]], rank: int) -> list[tuple[bool, tuple[int, int]]]:
        return sorted(size_messages(of, rank), key=lambda word: word[0])

    monkeypatch.setattr(deadlock, "size_messages", hearing_first)
    blocked = blocked_ranks(plain)
    # Ranks outside of the ring wait for its messages.
    assert {block.rank for block in blocked} == {0, 1, 2}
    assert blocked[0].message == f"the word that rank {blocked[0].peer} starts with rank {blocked[0].rank}"
    assert blocked[0].slot == 0
