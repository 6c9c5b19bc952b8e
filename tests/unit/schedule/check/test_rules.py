"""Every rule of the checker, also for two pipes, has a schedule that breaks only that rule; the error shows where."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.rules import RULES, ScheduleError, check, check_microbatch_order, check_no_deadlock
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.files.text import read_action, read_csv
from bpipe.schedule.hosts import host_memory_of, in_pairs, read_hosts
from bpipe.schedule.layout import Layout, one_pipe
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule, Slot

# rank 0 C  F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2 F6 B3 F7 B4  . B5  . B6  . B7
# rank 3 C   .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7  .  .  .
BALANCED = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))


def changed(schedule: Schedule, *cells: tuple[int, int, str]) -> Schedule:
    """Return the schedule with some slots rewritten: (rank, slot, "0F2 0EVICT1")."""
    rows = [list(row) for row in schedule.ranks]
    for rank, slot, text in cells:
        actions = [read_action(cell) for cell in text.split()]
        compute = actions[0] if actions and actions[0].kind.value in "FBIW" else None
        rows[rank][slot] = Slot(compute, tuple(actions[1:] if compute else actions))
    return replace(schedule, ranks=tuple(tuple(row) for row in rows))


def listing(text: str) -> list[Action]:
    return [read_action(cell) for cell in text.split()]


def refused(schedule: Schedule, exchange: Exchange = Exchange.MEGATRON_1F1B) -> ScheduleError:
    with pytest.raises(ScheduleError) as raised:
        check(schedule, exchange)
    return raised.value


# A forward among the transfers.
WRONG = Slot(Action(0, Kind.FORWARD, 0), (Action(0, Kind.FORWARD, 0),))

BROKEN = {
    # The schedule, and the rule, rank, slot and action of the error.
    "a computation twice": (changed(BALANCED, (0, 4, "0F3")), "each computation once 0 4 0F3"),
    "a computation missing": (changed(BALANCED, (2, 2, "")), "each computation once 2 21 None"),
    "another rank's stage": (changed(BALANCED, (1, 4, "2F0")), "each computation once 1 4 2F0"),
    "no such micro-batch": (changed(BALANCED, (0, 4, "0F8")), "each computation once 0 4 0F8"),
    "backward before forward": (changed(BALANCED, (3, 3, "3B0"), (3, 4, "3F0")), "forward before backward 3 3 3B0"),
    "a stage ahead of the one before": (changed(BALANCED, (2, 0, "2F0"), (2, 2, "")), "stage order 2 0 2F0"),
    "a backward ahead of the next stage's": (
        changed(BALANCED, (0, 5, "0B0"), (0, 7, "0EVICT3")),
        "stage order 0 5 0B0",
    ),
    "a transfer without its other end": (changed(BALANCED, (3, 2, "")), "other ends 0 2 0EVICT1"),
    "an other end without its transfer": (changed(BALANCED, (0, 8, "0F4")), "other ends 3 8 0RETURN1"),
    "an eviction of another rank's stage": (changed(BALANCED, (0, 4, "3EVICT0")), "other ends 0 4 3EVICT0"),
    "a transfer of no micro-batch": (changed(BALANCED, (0, 4, "0EVICT9")), "other ends 0 4 0EVICT9"),
    "a forward among the transfers": (
        replace(BALANCED, ranks=((WRONG, *BALANCED.ranks[0][1:]), *BALANCED.ranks[1:])),
        "other ends 0 0 0F0",
    ),
    "a transfer of a rank without partner": (replace(BALANCED, hosts=in_pairs((0, 2, 1, 3))), "other ends 0 2 0EVICT1"),
    "evicted beside its own forward": (
        changed(BALANCED, (0, 2, "0F2 0EVICT2"), (3, 2, "0HOST2")),
        "activations present 0 2 0EVICT2",
    ),
    "evicted after its backward": (
        changed(BALANCED, (0, 9, "0B1 0EVICT0"), (3, 9, "3F3 0HOST0")),
        "activations present 0 9 0EVICT0",
    ),
    "evicted twice": (changed(BALANCED, (0, 4, "0EVICT1"), (3, 4, "3B0 0HOST1")), "activations present 0 4 0EVICT1"),
    "loaded though present": (
        changed(BALANCED, (0, 1, "0F1 0LOAD0"), (3, 1, "0RETURN0")),
        "activations present 0 1 0LOAD0",
    ),
    "never loaded": (changed(BALANCED, (0, 12, "0F6"), (3, 12, "3B4")), "activations present 0 13 0B3"),
    "loaded beside its backward": (
        changed(BALANCED, (0, 12, "0F6"), (3, 12, "3B4"), (0, 13, "0B3 0LOAD3"), (3, 13, "3F5 0RETURN3")),
        "activations present 0 13 0LOAD3",
    ),
    "over its bound": (replace(BALANCED, bounds=(3, 2, 3, 3)), "bound 1 3 1F2"),
    "acceptor over its bound": (replace(BALANCED, bounds=(3, 3, 3, 2)), "bound 3 7 3F2"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_named_with_its_place(case: str) -> None:
    schedule, place = BROKEN[case]
    error = refused(schedule)
    assert f"{error.rule} {error.rank} {error.slot} {error.action}" == place
    assert "[" in str(error), "the grid shows the spot"


def test_an_error_shows_the_grid_with_the_spot_marked() -> None:
    error = refused(changed(BALANCED, (0, 12, "0F6"), (3, 12, "3B4")))
    assert str(error).split("\n") == [
        "activations present: rank 0, slot 13, 0B3: micro-batch 3 was evicted in slot 7 and is not loaded before this",
        "  slot    9 10 11 12  13  14 15 16 17",
        "rank 0 C B1 F5 B2 F6 [B3] F7 B4  . B5",
        "       T       E5    [  ]       L5",
        "rank 3 C F3 B3 F4 B4  F5  B5 F6 B6 F7",
        "       T       H5               R5",
    ]


SHAPES: dict[str, tuple[Callable[[Schedule], Schedule], str]] = {
    "nothing": (lambda plan: replace(plan, ranks=()), "0 ranks"),
    "ragged": (
        lambda plan: replace(plan, ranks=(plan.ranks[0][:-1], *plan.ranks[1:])),
        "rank 0 has 21 slots, but others have 22",
    ),
    "more than its slots": (
        lambda plan: replace(plan, num_microbatches=999_999_999),
        "999999999 micro-batches do not fit into 4 x 22 slots",
    ),
    "uneven": (lambda plan: replace(plan, layout=one_pipe((0, 1, 2, 2))), "equally many stages"),
    "bounds": (lambda plan: replace(plan, bounds=(3,)), "1 bounds for 4 ranks"),
    "host": (
        lambda plan: replace(plan, hosts=in_pairs((4, 2, 1, 0))),
        "rank 0: host 4 is not another rank from 0 to 3",
    ),
    "itself": (lambda plan: replace(plan, hosts=read_hosts("3,1,1,0")), "rank 1: host 1 is not another rank"),
    "another's host memory": (
        lambda plan: replace(plan, hosts=((host_memory_of(1),), (), (), ())),
        "rank 0: it cannot evict to the CPU memory of rank 1, only to its own",
    ),
    "slices": (
        lambda plan: replace(plan, layout=replace(plan.layout, slices=3)),
        "8 slices do not make whole micro-batches of 3",
    ),
    "too few partners": (lambda plan: replace(plan, hosts=in_pairs((3, 2, 1))), "hosts are given for 3 of 4 ranks"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_broken_shape_is_refused(case: str) -> None:
    change, reason = SHAPES[case]
    with pytest.raises(ScheduleError, match=reason):
        check(change(BALANCED))


def test_a_split_backward_needs_its_input_half_first() -> None:
    split = Schedule("split", 1, one_pipe((0,)), (tuple(Slot(read_action(cell)) for cell in ("0F0", "0I0", "0W0")),))
    check(split)
    error = refused(changed(split, (0, 1, "0W0"), (0, 2, "0I0")))
    assert (error.rule, error.slot, str(error.action)) == ("forward before backward", 1, "0W0")


def test_opposite_orders_on_a_pair_are_refused() -> None:
    """Two transfers in one slot pass in the order in which each end lists them: here the ends disagree."""
    schedule = changed(
        BALANCED, (0, 2, "0F2 0EVICT1 0EVICT0"), (3, 2, "0HOST0 0HOST1"), (0, 6, "0LOAD0"), (3, 6, "3B1 0RETURN0")
    )
    error = refused(schedule)
    assert (error.rule, error.rank, error.slot, str(error.action)) == ("order on a pair", 0, 2, "0EVICT1")
    check(changed(schedule, (3, 2, "0HOST1 0HOST0")))


def test_a_rank_that_runs_too_far_ahead_deadlocks_when_sends_block() -> None:
    """Rank 0 blocks in its send of F2 and rank 1 in its send of B0; posted messages pass."""
    ahead = listing("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3")
    behind = listing("1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")
    schedule = place("ahead", 4, one_pipe((0, 1)), [ahead, behind])
    check(schedule, Exchange.POSTED)
    error = refused(schedule, Exchange.MEGATRON_1F1B)
    assert error.rule == "no deadlock"
    assert "waits for the output of 0F2, which rank 1 never reaches" in str(error)
    assert "rank 0 for rank 1 at slot 3, rank 1 for rank 0 at slot 3" in str(error)
    assert check_no_deadlock in RULES


# Each is sound, but one pass of one stage takes micro-batch 1 before 0.
FORWARDS = """\
0F1,0F0,,,0B0,,0B1
,1F1,1F0,1B0,,1B1,
"""
BACKWARDS = """\
0F0,0F1,,,0B1,,0B0
,1F0,1F1,1B1,,1B0,
"""
INPUTS = """\
0F0,0F1,,,0I1,0I0,0W0,0W1
,1F0,1F1,1I1,1I0,1W0,1W1,
"""
WEIGHTS = """\
0F0,0F1,,,0B0,0B1,
,1F0,1F1,1I0,1I1,1W1,1W0
"""
MIXED = """\
0F0,0F1,,,0B0,0B1,
,1F0,1F1,1I0,1B1,1W0,
"""


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (FORWARDS, r"rank 0, slot 1, 0F0: comes after 0F1"),
        (BACKWARDS, r"rank 0, slot 6, 0B0: comes after 0B1"),
        (INPUTS, r"rank 0, slot 5, 0I0: comes after 0I1"),
        (WEIGHTS, r"rank 1, slot 6, 1W0: comes after 1W1"),
        (MIXED, r"rank 1, slot 5, 1W0: comes after 1B1"),
    ],
    ids=["forwards", "backwards", "inputs", "weights", "whole and in halves"],
)
def test_a_pass_out_of_order_is_sound_and_refused_for_training(text: str, place: str) -> None:
    schedule = read_csv(text)
    check(schedule)
    with pytest.raises(
        ScheduleError, match=f"order of micro-batches: {place}, but Megatron's own schedules compute"
    ) as refused:
        check_microbatch_order(schedule)
    assert "[" in str(refused.value), "the grid shows the spot"


FAMILY_SIZES = [(name, 4, m, max(family.min_chunks, 1)) for name, family in FAMILIES.items() for m in (4, 7, 8)]


@pytest.mark.parametrize(("name", "p", "m", "v"), FAMILY_SIZES)
def test_every_family_takes_micro_batches_in_order(name: str, p: int, m: int, v: int) -> None:
    check_microbatch_order(build(ScheduleConfig(name, p, m, num_chunks=v)))


OPPOSITE = Layout(((0, 1), (1, 0)))
# Two ranks, four micro-batches, all forwards first: rank 1 is rank 0's mirror image.
RANK_0, RANK_1 = "0F0 0F2 1F1 1F3 1B1 1B3 0B0 0B2", "0F1 0F3 1F0 1F2 1B0 1B2 0B1 0B3"


def schedule_of(*orders: str, layout: Layout = OPPOSITE, num_microbatches: int = 4) -> Schedule:
    return place("two", num_microbatches, layout, [[read_action(cell) for cell in order.split()] for order in orders])


def refused_two(schedule: Schedule) -> ScheduleError:
    with pytest.raises(ScheduleError) as raised:
        check(schedule)
    return raised.value


def test_mirror_images_keep_all_of_it() -> None:
    check(schedule_of(RANK_0, RANK_1))


BROKEN_OF_TWO = {
    # Rank 0's order: the rank and action to blame, and the reason. The first changes sums, the second reductions.
    "0F0 0F2 1F1 1F3 1B3 1B1 0B0 0B2": (1, "1B0", "is where rank 0 has 1B3: here it must be 1B2"),
    "0F0 0F2 1F1 1F3 0B0 0B2 1B1 1B3": (1, "1B0", "is where rank 0 has 0B0: here it must be 0B1"),
    "0F0 1F1 0F2 1F3 1B1 1B3 0B0 0B2": (1, "0F3", "is where rank 0 has 1F1: here it must be 1F0"),
}


@pytest.mark.parametrize("order", BROKEN_OF_TWO)
def test_a_broken_rule_of_two_pipes_is_named_with_its_place(order: str) -> None:
    *place, reason = BROKEN_OF_TWO[order]
    error = refused_two(schedule_of(order, RANK_1))
    assert [error.rule, error.rank, str(error.action)] == ["mirror images", *place]
    assert reason in str(error)
    assert "[" in str(error), "the grid shows the spot"


def test_pipes_in_one_direction_are_no_mirror_images() -> None:
    orders = "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"
    error = refused_two(schedule_of(*orders, layout=Layout(((0, 1), (0, 1))), num_microbatches=2))
    assert (error.rule, error.rank) == ("mirror images", 0)
    assert (
        "stage 0 is on ranks 0 and 0, but the second pipe must be the first one's mirror image: put it on ranks 0 and 1"
        in str(error)
    )


def test_three_pipes_are_refused() -> None:
    """No rule checked more than two pipes, so replicas in any order were accepted."""
    three = Layout(((0, 1), (1, 0), (0, 1)))
    error = refused_two(
        schedule_of("0F0 1F1 0F2 1B1 0B0 0B2", "1F0 1B0 0F1 0B1 1F2 1B2", layout=three, num_microbatches=3)
    )
    assert (error.rule, str(error)) == (
        "shape",
        "shape: there are 3 pipes: at most two are supported, in opposite directions",
    )
