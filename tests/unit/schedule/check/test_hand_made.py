"""What Megatron's loops do not know, of the families and by hand, is placed, checked, lowered, simulated, drawn and
balanced."""

from __future__ import annotations

from functools import partial

import pytest

from bpipe.build import ScheduleConfig, build
from bpipe.draw.svg import write_svg
from bpipe.schedule.action import Kind
from bpipe.schedule.check.case import ScheduleError
from bpipe.schedule.check.rules import check
from bpipe.schedule.files.document import read_json, write_json
from bpipe.schedule.files.text import read_csv, write_csv
from bpipe.schedule.lowering.lower import lower
from bpipe.schedule.program import Exchange, Op
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, ShardCost, StageCost
from bpipe.simulate.engine import simulate
from tests.unit.schedule.families.test_sharded_schedules import SPLIT, sharded

SCHEDULES = {
    **{
        f"v-half {p}x{m}": partial(build, ScheduleConfig("v-half", p, m, num_chunks=2))
        for p, m in ((4, 8), (5, 7), (8, 16))
    },
    **{
        f"v-min {p}x{m}": partial(build, ScheduleConfig("v-min", p, m, num_chunks=2))
        for p, m in ((4, 8), (6, 9), (8, 16))
    },
    "zb-h1": partial(build, ScheduleConfig("zb-h1", 4, 8)),
    **{
        f"chimera {p}x{m}": partial(build, ScheduleConfig("chimera", p, m))
        for p, m in ((2, 3), (4, 4), (8, 8), (8, 12))
    },
    **{f"bitpipe {v}": partial(build, ScheduleConfig("bitpipe", 4, 6, num_chunks=v)) for v in (2, 3)},
    "mixpipe": partial(build, ScheduleConfig("mixpipe", 4, 9)),
    **{f"algorithm {one.value} {p}x{m}": partial(sharded, p, m, one) for one in SPLIT for p, m in ((4, 8), (8, 12))},
}


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> Schedule:
    return SCHEDULES[request.param]()


def test_it_keeps_every_rule(schedule: Schedule) -> None:
    check(schedule)


def test_it_is_read_as_it_is_written(schedule: Schedule) -> None:
    assert read_json(write_json(schedule)) == schedule
    again = read_csv(write_csv(schedule), schedule.name)
    assert again == schedule


def test_every_computation_is_in_a_program_and_every_message_has_its_ends(schedule: Schedule) -> None:
    programs = lower(schedule, Exchange.POSTED)
    for program, row in zip(programs, schedule.ranks, strict=True):
        run = [operand for op, operand in program.instructions if op is Op.RUN]
        assert run == [cell.compute for cell in row if cell.compute is not None]
    sent = [
        operand
        for program in programs
        for op, operand in zip(program.ops, program.operands, strict=True)
        if op == Op.SEND
    ]
    for program in programs:
        for op, operand in program.instructions:
            if op in (Op.POST, Op.SEND, Op.WAIT):
                assert program.rank in operand.parties
                assert sent.count(operand.value) == len(operand.made_by)


def test_it_is_simulated_on_its_own_grid_and_drawn(schedule: Schedule) -> None:
    is_split = any(cell.compute and cell.compute.kind is Kind.BACKWARD_INPUT for cell in schedule.ranks[0])
    unit = StageCost(1, 2, weight_s=1) if is_split else StageCost(1, 1)
    simulation = simulate(schedule, Costs((unit,) * schedule.num_stages, shards=(ShardCost(1, 1),)))
    for timed, row in zip(simulation.computations, schedule.ranks, strict=True):
        assert [(one.action, one.start_s) for one in timed] == [
            (cell.compute, slot) for slot, cell in enumerate(row) if cell.compute
        ]
    assert write_svg(schedule).startswith("<svg")


def test_a_shard_is_refused_where_the_vocabulary_is_whole() -> None:
    with pytest.raises(ScheduleError, match="S belongs to a split vocabulary, but here it is whole"):
        check(read_csv("# bpipe schedule=a microbatches=1 stage_to_rank=0\n0F0,0S0,0B0\n"))
