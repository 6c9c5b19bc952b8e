"""Combined 1F1B: Megatron's order, pairs that hold both, and balancing of pairs."""

from __future__ import annotations

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Kind
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.family import FamilyOptions
from bpipe.schedule.families.interleaved import COMBINED
from bpipe.schedule.lowering.lower import lower
from bpipe.schedule.memory import num_transfers, peak_counts
from bpipe.schedule.program import Exchange, Op
from bpipe.schedule.schedule import Schedule

EXCHANGES = (Exchange.MEGATRON_INTERLEAVED, Exchange.MEGATRON_TURNS, Exchange.POSTED)


def made(p: int, m: int, v: int, group: int | None = None, balance: BalanceConfig | None = None) -> Schedule:
    return build(ScheduleConfig(COMBINED.name, p, m, num_chunks=v, balance=balance, group_size=group))


@pytest.mark.parametrize(
    ("p", "m", "v", "g"), [(2, 4, 2, 2), (4, 8, 2, 4), (4, 12, 3, 4), (4, 12, 2, 6), (8, 16, 2, 8)]
)
def test_it_is_megatrons_order(p: int, m: int, v: int, g: int) -> None:
    """`get_pp_rank_microbatches`: one forward more than interleaved 1F1B before the first backward, and then a
    forward with each backward, as long as there are forwards."""
    turns = [
        (chunk, microbatch)
        for first in range(0, m, g)
        for chunk in range(v)
        for microbatch in range(first, min(first + g, m))
    ]
    for rank, row in enumerate(COMBINED.generate(p, m, v, FamilyOptions(group_size=g)).ranks):
        cells = [cell.computations for cell in row if cell.compute is not None]
        ahead = min(2 * (p - rank - 1) + (v - 1) * g + 1, len(turns))
        pairs = len(turns) - ahead
        assert [len(cell) for cell in cells] == [1] * ahead + [2] * pairs + [1] * (len(turns) - pairs)
        flat = [one for cell in cells for one in cell]
        forwards = [(one.stage // p, one.microbatch) for one in flat if one.kind is Kind.FORWARD]
        backwards = [(v - 1 - one.stage // p, one.microbatch) for one in flat if one.kind is Kind.BACKWARD]
        assert forwards == backwards == turns


@pytest.mark.parametrize(("p", "m", "v"), [(2, 8, 2), (4, 8, 2), (4, 16, 3), (8, 16, 2), (8, 32, 4)])
def test_ranks_hold_one_more_than_interleaved_and_pairs_level_it(p: int, m: int, v: int) -> None:
    plain, interleaved = made(p, m, v), build(ScheduleConfig("interleaved-1f1b", p, m, num_chunks=v))
    assert peak_counts(plain) == tuple(one + 1 for one in peak_counts(interleaved))
    balanced = made(p, m, v, balance=BalanceConfig())
    peaks = peak_counts(plain)
    # What leaves beside a pair is there until both are over, and what comes back already: one more than half of both.
    assert max(peak_counts(balanced)) == (peaks[0] + peaks[-1]) // 2 + 1
    for exchange in EXCHANGES:
        check(balanced, exchange)
    assert any(num_transfers(balanced, rank).evictions for rank in range(p)) is (p > 2)


def test_a_pair_begins_with_both_inputs_and_passes_both_outputs_on_behind() -> None:
    """In the loop that overlaps messages and in the one that does not, nothing stands between the two of a pair."""
    schedule = made(4, 8, 2, balance=BalanceConfig())
    for exchange in EXCHANGES:
        for program, row in zip(lower(schedule, exchange), schedule.ranks, strict=True):
            ran = [number for number, one in enumerate(program.instructions) if one.op is Op.RUN]
            together = [cell.computations for cell in row if cell.overlapped is not None]
            found = [
                (program.instructions[number].operand, program.instructions[number + 1].operand)
                for number in ran
                if number + 1 in ran and program.starts.count(number + 1) == 0
            ]
            assert [pair for pair in found if pair in together] == together


def test_micro_batches_that_do_not_exist_leave_the_other_of_their_pair_alone() -> None:
    schedule = made(4, 9, 2)
    check(schedule)
    assert sum(len(cell.computations) for row in schedule.ranks for cell in row) == 2 * 2 * 4 * 9


def test_a_group_smaller_than_the_pipeline_is_refused() -> None:
    with pytest.raises(ValueError, match="a group of 3 micro-batches is outside 4 to 8"):
        made(4, 8, 2, group=3)
