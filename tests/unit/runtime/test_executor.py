"""The pipeline loop: with every family's program, a small model has the same gradients as in one piece, to the bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.runtime import RuntimeFault
from bpipe.runtime import executor as executor_module
from bpipe.runtime.executor import Executor, neighbours
from bpipe.runtime.stage import TorchStages
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.files.text import read_csv
from bpipe.schedule.program import Instruction, Op, Program
from bpipe.schedule.schedule import Schedule
from tests.support.alone import Alone
from tests.unit.runtime.loop import Small, drawn, new_weight
from tests.unit.runtime.loop import schedule as balanced
from tests.unit.runtime.pipeline import in_a_pipeline, in_one_piece
from tests.unit.runtime.test_engine import engine_for
from tests.unit.schedule.check.test_overlap import OVERLAPPED

# Stages 1 and 2 are neighbours on one rank, so nothing is sent between them.
FOLDED = """\
# bpipe schedule=hand-made microbatches=2 stage_to_rank=0,1,1,0
0F0,0F1,,3F0,3B0,3F1,3B1,0B0,,0B1
,1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1,
"""


def same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(actual) == len(expected) and all(map(torch.equal, actual, expected))


FAMILIES = [
    ScheduleConfig("1f1b", 4, 8),
    ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()),
    ScheduleConfig("1f1b", 1, 2),
    ScheduleConfig("gpipe", 3, 4),
    ScheduleConfig("interleaved-1f1b", 2, 4, num_chunks=3),
    ScheduleConfig("interleaved-1f1b", 4, 8, num_chunks=2, balance=BalanceConfig()),
    ScheduleConfig("1f1b-split", 4, 8, balance=BalanceConfig(), delay=1),
    ScheduleConfig("zb-h1", 4, 8),
    *(ScheduleConfig(name, 4, 7, num_chunks=2) for name in ("zb-v", "v-half", "v-min")),
]


def named(config: ScheduleConfig) -> str:
    return f"{config.schedule} p={config.num_ranks} m={config.num_microbatches} {config.balance_name}"


@pytest.mark.parametrize("config", FAMILIES, ids=named)
def test_every_family_computes_what_the_model_in_one_piece_does(config: ScheduleConfig) -> None:
    schedule = build(config)
    assert same(in_a_pipeline(schedule, 2), in_one_piece(schedule.num_stages, config.num_microbatches, 2))


def test_an_engine_stands_around_each_of_the_two() -> None:
    """The engine took the overlapped pair for one computation, which ended every run of DualPipeV."""
    engine = engine_for(OVERLAPPED, rank=0)
    for _ in range(2):
        Executor(OVERLAPPED, 0, Small(OVERLAPPED, 0, new_weight()), drawn()).run(engine)


def test_what_stays_on_its_rank_is_handed_over_without_a_message() -> None:
    schedule = read_csv(FOLDED)
    sent = [
        instruction.operand
        for instruction in Executor(schedule, 1, TorchStages({}), Alone()).program.instructions
        if instruction.op is Op.SEND
    ]
    assert [str(message) for message in sent] == ["2F0>3F0", "2F1>3F1", "1B0>0B0", "1B1>0B1"]
    assert neighbours(schedule) == [(0, 1)]
    assert same(in_a_pipeline(schedule), in_one_piece(4, 2))


def dropping(monkeypatch: pytest.MonkeyPatch, *dropped: str) -> None:
    """Drop instructions from every program."""
    lower_as_run = executor_module.lower_as_run

    def without(program: Program) -> SimpleNamespace:
        return SimpleNamespace(
            instructions=[instruction for instruction in program.instructions if str(instruction) not in dropped]
        )

    monkeypatch.setattr(
        executor_module, "lower_as_run", lambda *arguments: [without(program) for program in lower_as_run(*arguments)]
    )


def run_alone(plan: Schedule, rank: int) -> None:
    Executor(plan, rank, Small(plan, rank, new_weight()), drawn()).run()


def test_a_program_that_does_not_wait_for_what_it_needs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dropping(monkeypatch, "wait 0F1>1F1")
    with pytest.raises(RuntimeFault, match="rank 1: the output of 0F1 has not arrived for 1F1"):
        run_alone(balanced(), 1)


def test_a_program_that_leaves_something_over_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dropping(monkeypatch, "send 1F1>2F1")
    with pytest.raises(RuntimeFault, match="rank 1: nothing used the output of 1F1"):
        run_alone(balanced(), 1)


def test_what_no_stage_computes_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = balanced()
    shard = Instruction(Op.RUN, Action(0, Kind.SHARD_FORWARD, 0))
    monkeypatch.setattr(executor_module, "lower_as_run", lambda *_: [SimpleNamespace(instructions=[shard])])
    with pytest.raises(ValueError, match="rank 0: 0S0 is not a computation of a stage"):
        Executor(plan, 0, TorchStages({}), Alone())


FORWARD, BACKWARD = Action(1, Kind.FORWARD, 0), Action(1, Kind.BACKWARD, 0)


def test_a_part_that_makes_nothing_of_what_it_receives_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    stages = TorchStages({1: lambda microbatch, x: weight * 2})
    stages.forward(FORWARD, (torch.ones(2),))
    with pytest.raises(ValueError, match=r"a part did not use a tensor \(2,\) that it received"):
        stages.backward(BACKWARD, (torch.ones(2),))
