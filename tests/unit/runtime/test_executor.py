"""The loop: every family's program over a small model gives the gradients of the model in one piece, to the bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.runtime import executor as executor_module
from bpipe.runtime.errors import RuntimeFault, TransferError
from bpipe.runtime.executor import Executor, neighbours
from bpipe.runtime.stage import Tensors, TorchStages
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.files.text import read_csv
from bpipe.schedule.program import Instruction, Message, Op, Program, Transfer
from bpipe.schedule.schedule import Schedule
from bpipe.schedule.steps import steps
from tests.support.alone import Alone
from tests.unit.runtime.loop import Small, drawn, new_weight
from tests.unit.runtime.loop import schedule as balanced
from tests.unit.runtime.pipeline import WIDTH, Model, in_a_pipeline, in_one_piece
from tests.unit.runtime.test_engine import engine_for
from tests.unit.schedule.check.test_overlap import OVERLAPPED

# The halves of a backward apart.
SPLIT = """\
# bpipe schedule=hand-made microbatches=3 stage_to_rank=0,1,2
0F0,0F1,0F2,,,0I0,0W0,,0I1,0W1,,0I2,0W2,
,1F0,1F1,,1I0,1F2,,1I1,1W0,,1I2,1W1,1W2,
,,2F0,2I0,2F1,,2I1,2W0,2F2,2I2,2W1,2W2,,
"""
# Stages 1 and 2 are neighbours on one rank, so what passes between them is no message.
FOLDED = """\
# bpipe schedule=hand-made microbatches=2 stage_to_rank=0,1,1,0
0F0,0F1,,3F0,3B0,3F1,3B1,0B0,,0B1
,1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1,
"""


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


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


def test_a_backward_in_halves_gives_the_same_gradients() -> None:
    assert same(in_a_pipeline(read_csv(SPLIT)), in_one_piece(3, 3))


def test_a_forward_and_a_backward_in_one_place_are_computed_one_after_the_other() -> None:
    assert same(in_a_pipeline(OVERLAPPED, 2), in_one_piece(4, 4, 2))
    computed = [
        each.operand
        for each in Executor(OVERLAPPED, 0, TorchStages({}), Alone()).program.instructions
        if each.op is Op.RUN
    ]
    assert list(map(str, computed))[6:10] == ["3F1", "0F3", "3B1", "3F2"]


def test_an_engine_stands_around_each_of_the_two() -> None:
    """It took them for one, and ended every run of DualPipeV: it stands around a run's computations where nothing
    moves, too."""
    engine = engine_for(OVERLAPPED, rank=0)
    for _ in range(2):
        Executor(OVERLAPPED, 0, Small(OVERLAPPED, 0, new_weight()), drawn()).run(engine)


def test_what_stays_on_its_rank_is_handed_over_without_a_message() -> None:
    schedule = read_csv(FOLDED)
    sent = [
        each.operand
        for each in Executor(schedule, 1, TorchStages({}), Alone()).program.instructions
        if each.op is Op.SEND
    ]
    assert [str(message) for message in sent] == ["2F0>3F0", "2F1>3F1", "1B0>0B0", "1B1>0B1"]
    assert neighbours(schedule) == [(0, 1)]
    assert same(in_a_pipeline(schedule), in_one_piece(4, 2))


@pytest.mark.parametrize("config", [config for config in FAMILIES if config.balance], ids=named)
def test_a_programs_transfers_are_those_that_an_engine_starts(config: ScheduleConfig) -> None:
    """The executor leaves them to the engine, which folds the same schedule by itself."""
    schedule = build(config)
    for rank in range(schedule.num_ranks):
        program = Executor(schedule, rank, TorchStages({}), Alone()).program
        found = [each.operand for each in program.instructions if each.op in (Op.RUN, Op.START)]
        told = [action for step in steps(schedule, rank) for action in (*step.before, *step.computations, *step.after)]
        assert [each.action if isinstance(each, Transfer) else each for each in found] == told
        assert any(each.op is Op.START for each in program.instructions) is (rank in (0, schedule.num_ranks - 1))


def test_an_input_that_the_loop_holds_leaves_too() -> None:
    """A rank that receives its input keeps it for its gradient; on the first rank nobody but the graph has it."""
    plan = balanced(6, 12)
    moved = []
    for rank in (0, 1):
        engine = engine_for(plan, rank=rank)
        Executor(plan, rank, Small(plan, rank, new_weight()), drawn()).run(engine)
        moved += engine.moved_bytes.values()
    assert moved[0] == moved[1] > 0


class Log:
    """Calls and messages of a rank, in the order in which they came."""

    def __init__(self, length: int = 2) -> None:
        self._length = length
        self.entries: list[str] = []
        self.carried: list[Tensors] = []

    def begin(self) -> None:
        self.entries.append("begin")

    def before(self, op: Action) -> None:
        self.entries.append(f"before {op}")

    def after(self, op: Action, outputs: object = (), inputs: object = ()) -> None:
        self.entries.append(f"after {op}")

    def sent(self, op: Action) -> None:
        self.entries.append(f"sent {op}")

    def communicated(self) -> None:
        self.entries.append("communicated")

    def end(self) -> None:
        self.entries.append("end")

    def post(self, message: Message) -> None:
        self.entries.append(f"post {message}")

    def send(self, message: Message, tensors: Tensors) -> None:
        self.entries.append(f"send {message}")
        self.carried.append(tensors)

    def wait(self, message: Message) -> Tensors:
        self.entries.append(f"wait {message}")
        return (torch.ones(self._length),)


def test_each_call_has_its_place() -> None:
    plan, log = build(ScheduleConfig("1f1b", 3, 1)), Log()
    Executor(plan, 1, TorchStages({1: lambda microbatch, x: x * 2}), log).run(log)
    forward = ["post 0F0>1F0", "post 2B0>1B0", "wait 0F0>1F0", "before 1F0", "after 1F0", "send 1F0>2F0", "sent 1F0"]
    backward = ["wait 2B0>1B0", "wait 1F0>2F0", "before 1B0", "after 1B0", "send 1B0>0B0", "sent 1B0", "communicated"]
    assert log.entries == ["begin", *forward, *backward, "wait 1B0>0B0", "end"]


def test_what_nobody_else_needs_counts_as_sent_when_it_was_made() -> None:
    plan, log = read_csv(FOLDED), Log(WIDTH)
    model = Model(4)
    Executor(plan, 1, model.parts(plan, 1), log).run(log)
    calls = [entry for entry in log.entries if entry.startswith(("after", "send", "sent"))]
    passed_on = {"1B": "0B", "2F": "3F"}
    expected = []
    for cell in ("1F0", "2F0", "1F1", "2F1", "2B0", "1B0", "2B1", "1B1"):
        other = passed_on.get(cell[:2])
        expected += [f"after {cell}", *([f"send {cell}>{other}{cell[2]}"] if other else []), f"sent {cell}"]
    assert calls == expected


def test_what_is_sent_stays_when_its_stage_lets_go_of_it() -> None:
    """Megatron frees what it has sent by exchanging what lies behind the tensor, while it may still be on its way."""

    class LettingGo(TorchStages):
        def let_go(self, made: Tensors) -> None:
            for output in made:
                output.data = torch.zeros(2)

    plan, log = build(ScheduleConfig("1f1b", 3, 1)), Log()
    Executor(plan, 1, LettingGo({1: lambda microbatch, x: x * 2}), log).run()
    assert torch.equal(log.carried[0][0], torch.full((2,), 2.0))


def test_nobody_else_has_the_loss() -> None:
    class Keeping(TorchStages):
        def let_go(self, made: Tensors) -> None:
            raise AssertionError("of the last stage's output the value is needed, too")

    Executor(build(ScheduleConfig("1f1b", 3, 1)), 2, Keeping({2: lambda microbatch, x: x.sum()}), Log()).run()


def dropping(monkeypatch: pytest.MonkeyPatch, *dropped: str) -> None:
    """Programs without some instructions."""
    lower_as_run = executor_module.lower_as_run

    def without(program: Program) -> SimpleNamespace:
        return SimpleNamespace(instructions=[each for each in program.instructions if str(each) not in dropped])

    monkeypatch.setattr(
        executor_module, "lower_as_run", lambda *given: [without(program) for program in lower_as_run(*given)]
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
    monkeypatch.setattr(executor_module, "lower_as_run", lambda *given: [SimpleNamespace(instructions=[shard])])
    with pytest.raises(ValueError, match="rank 0: 0S0 is not a computation of a stage"):
        Executor(plan, 0, TorchStages({}), Alone())


# -- stages in plain torch
# --------------------------------------------------------------------------------------------------------------

FORWARD, BACKWARD = Action(1, Kind.FORWARD, 0), Action(1, Kind.BACKWARD, 0)


def test_several_tensors_pass_and_those_without_gradients_get_none() -> None:
    stages = TorchStages({1: lambda microbatch, x, mask: (x * mask, x + 1)})
    x, mask = torch.ones(2), torch.tensor([2, 3])
    assert [output.tolist() for output in stages.forward(FORWARD, (x, mask))] == [[2, 3], [2, 2]]
    (gradient,) = stages.backward(BACKWARD, (torch.ones(2), torch.full((2,), 10.0)))
    assert gradient.tolist() == [12, 13]


def test_a_part_that_makes_nothing_of_what_it_receives_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    stages = TorchStages({1: lambda microbatch, x: weight * 2})
    stages.forward(FORWARD, (torch.ones(2),))
    with pytest.raises(ValueError, match=r"a part did not use a tensor \(2,\) that it received"):
        stages.backward(BACKWARD, (torch.ones(2),))


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("post", "rank 1: 0F0>1F0 could not be posted; the other end is rank 0: it is gone"),
        ("wait", "rank 1: 0F0>1F0 did not pass; the other end is rank 0: it is gone"),
        ("send", "rank 1: 1F0>2F0 could not be sent; the other end is rank 2: it is gone"),
    ],
)
def test_a_message_that_does_not_pass_is_named_with_its_edge(
    failing: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Tensors:
        raise RuntimeError("it is gone")

    log = Log()
    monkeypatch.setattr(log, failing, fail)
    with pytest.raises(TransferError, match=message):
        Executor(build(ScheduleConfig("1f1b", 4, 8)), 1, TorchStages({1: lambda microbatch, x: x * 2}), log).run()
