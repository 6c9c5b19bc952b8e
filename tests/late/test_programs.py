"""A pipeline on late devices whose program lacks an instruction deadlocks, or reports what is missing."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from bpipe.runtime import executor as executor_module
from bpipe.runtime.evictor import Evictor
from bpipe.runtime.executor import Executor
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.program import Instruction, Op
from tests.late.cases import SCHEDULES
from tests.late.devices import DIRECTED
from tests.late.pipeline import LatePipeline, wrong_bits

Broken = Callable[[], AbstractContextManager[Any]]


def with_programs(change: Callable[[list[Instruction]], list[Instruction]]) -> AbstractContextManager[Any]:
    lower_as_run = executor_module.lower_as_run

    def changed(*arguments: Any) -> list[SimpleNamespace]:
        return [SimpleNamespace(instructions=change([*program.instructions])) for program in lower_as_run(*arguments)]

    return patch.object(executor_module, "lower_as_run", changed)


def without_one(text: str) -> Broken:
    return lambda: with_programs(lambda program: [instruction for instruction in program if str(instruction) != text])


def with_receives_swapped() -> AbstractContextManager[Any]:
    """Receive the second output of the first stage in place of the first."""
    names = {"post 0F0>1F0": "post 0F1>1F1", "post 0F1>1F1": "post 0F0>1F0"}

    def swapped(program: list[Instruction]) -> list[Instruction]:
        by_name = {str(instruction): instruction for instruction in program}
        return [by_name[names.get(str(instruction), str(instruction))] for instruction in program]

    return with_programs(swapped)


def without_handing_over() -> AbstractContextManager[Any]:
    """Lose the value for the same rank's next stage, which no message carries."""
    run = Executor._run

    def lost(self: Executor, action: Action, calls: Any) -> None:
        run(self, action, calls)
        sent = {
            instruction.operand.value
            for instruction in self._instructions
            if instruction.op is Op.SEND and not isinstance(instruction.operand, Action)
        }
        if (value := self._dependencies.value_of(action)) not in sent:
            self._values.pop(value, None)

    return patch.object(Executor, "_run", lost)


def with_halves_that_do_not_wait() -> AbstractContextManager[Any]:
    """Let only whole backwards wait for a load."""
    finish = Evictor.finish_load

    def only_whole(self: Evictor, backward: Action) -> None:
        if backward.kind is Kind.BACKWARD:
            finish(self, backward)
        else:
            self._known.pop((backward.stage, backward.microbatch), None)

    return patch.object(Evictor, "finish_load", only_whole)


BROKEN: dict[str, tuple[str, Broken, str]] = {
    "a receive is missing": ("split", without_one("post 1F1>2F1"), "nobody can go on|has not arrived for|never posted"),
    "a wait is missing": ("grouped", without_one("wait 1F1>2F1"), "the output of 1F1 has not arrived for 2F1"),
    "a send is missing": ("v-half", without_one("send 1F1>2F1"), "nobody can go on|bytes are sent"),
    "a hand-over is missing": ("v-half", without_handing_over, "the output of 3F0 has not arrived for 4F0"),
    "two receives are swapped": ("split", with_receives_swapped, "waits for 0F0>1F0, which it never posted"),
    "the inputs' half does not wait for its load": (
        "split",
        with_halves_that_do_not_wait,
        "wrong bits|this micro-batch saved",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_missing_is_noticed(name: str) -> None:
    schedule, broken, message = BROKEN[name]
    with broken(), pytest.raises((AssertionError, RuntimeError, ValueError), match=message):
        run_in_directed_orders(schedule)


def run_in_directed_orders(schedule: str) -> None:
    for draw in DIRECTED[:5]:
        assert not wrong_bits(LatePipeline(SCHEDULES[schedule](), "two-sided"), draw), "wrong bits"
