"""Rules of two pipes: one order of gradient sums and of reductions on a pair, and mirror images."""

from __future__ import annotations

import pytest

from bpipe.schedule.check.rules import ScheduleError, check
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.files.text import read_action
from bpipe.schedule.layout import Layout
from bpipe.schedule.schedule import Schedule

OPPOSITE = Layout(((0, 1), (1, 0)))
# Two ranks, four micro-batches, all forwards first: rank 1 is rank 0's mirror image.
RANK_0, RANK_1 = "0F0 0F2 1F1 1F3 1B1 1B3 0B0 0B2", "0F1 0F3 1F0 1F2 1B0 1B2 0B1 0B3"


def schedule_of(*orders: str, layout: Layout = OPPOSITE, num_microbatches: int = 4) -> Schedule:
    return place("two", num_microbatches, layout, [[read_action(cell) for cell in order.split()] for order in orders])


def refused(schedule: Schedule) -> ScheduleError:
    with pytest.raises(ScheduleError) as raised:
        check(schedule)
    return raised.value


def test_mirror_images_keep_all_of_it() -> None:
    check(schedule_of(RANK_0, RANK_1))


BROKEN = {
    # rank 0's order; the rule, rank and action to blame, and a part of the reason
    "0F0 0F2 1F1 1F3 1B3 1B1 0B0 0B2": ("order of gradient sums", 0, "1B3", "0: here it must be 1"),
    "0F0 0F2 1F1 1F3 0B0 0B2 1B1 1B3": ("order of reductions", 1, "1B2", "completes the gradients of stage 1 at"),
    # No mirror image, though sums and reductions meet.
    "0F0 1F1 0F2 1F3 1B1 1B3 0B0 0B2": ("mirror images", 1, "0F3", "is where rank 0 has 1F1: here it must be 1F0"),
}


@pytest.mark.parametrize("order", BROKEN)
def test_a_broken_rule_of_two_pipes_is_named_with_its_place(order: str) -> None:
    *place, reason = BROKEN[order]
    error = refused(schedule_of(order, RANK_1))
    assert [error.rule, error.rank, str(error.action)] == place
    assert reason in str(error)
    assert "[" in str(error), "the grid shows the spot"


def test_halves_count_by_the_one_that_completes_gradients() -> None:
    """I may come in any order that its needs allow; W is what adds the last of a micro-batch."""
    first, second = "0F0 0F2 1F1 1F3 1I1 1I3 1W1 1W3 0B0 0B2", "0F1 0F3 1F0 1F2 1I0 1I2 1W0 1W2 0B1 0B3"
    check(schedule_of(first, second))
    error = refused(schedule_of(first.replace("1W1 1W3", "1W3 1W1"), second))
    assert (error.rule, str(error.action)) == ("order of gradient sums", "1W3")


def test_pipes_in_one_direction_are_no_mirror_images() -> None:
    orders = "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"
    error = refused(schedule_of(*orders, layout=Layout(((0, 1), (0, 1))), num_microbatches=2))
    assert (error.rule, error.rank) == ("mirror images", 0)
    assert (
        "stage 0 is on ranks 0 and 0, but the second pipe must be the first one's mirror image: put it on ranks 0 and 1"
        in str(error)
    )


def test_one_pipe_is_asked_nothing() -> None:
    """Megatron's own V takes stage 0's last backward last, and an order of our own may take any."""
    check(
        place(
            "one",
            2,
            Layout(((0, 1),)),
            [
                [read_action(one) for one in ["0F0", "0F1", "0B1", "0B0"]],
                [*map(read_action, ["1F0", "1F1", "1B1", "1B0"])],
            ],
        )
    )


def test_three_pipes_are_refused() -> None:
    """No rule looked at more than two, so replicas of any order were taken."""
    three = Layout(((0, 1), (1, 0), (0, 1)))
    error = refused(schedule_of("0F0 1F1 0F2 1B1 0B0 0B2", "1F0 1B0 0F1 0B1 1F2 1B2", layout=three, num_microbatches=3))
    assert (error.rule, str(error)) == (
        "shape",
        "shape: there are 3 pipes: at most two are supported, in opposite directions",
    )
