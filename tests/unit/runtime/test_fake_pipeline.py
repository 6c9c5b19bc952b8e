"""Whole pipelines on devices that order nothing by themselves: messages, transfers and halves of backwards, with one
queue too."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from bpipe.balance.pairs import balance
from bpipe.build import BalanceConfig, ScheduleConfig, build
from bpipe.ir.action import Action, Kind
from bpipe.ir.memory import num_transfers
from bpipe.ir.program import Instruction, Op
from bpipe.ir.schedule import Schedule
from bpipe.runtime import executor as executor_module
from bpipe.runtime import streams
from bpipe.runtime.activations import ActivationsState
from bpipe.runtime.evictor import Evictor
from bpipe.runtime.executor import Executor
from bpipe.runtime.streams import Streams
from bpipe.transport import edges
from bpipe.transport.distributed import Works, batched
from tests.support.hand_made import far_ahead, v_flat
from tests.unit.runtime import fake_pipeline
from tests.unit.runtime.fake_device import FakeTensor, without_the_end_of
from tests.unit.runtime.fake_pipeline import findings, splits

KINDS = ["one-sided", "two-sided"]
SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "1f1b": lambda: build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig())),
    "interleaved": lambda: build(ScheduleConfig("interleaved-1f1b", 4, 8, 2, BalanceConfig())),
    "split": lambda: build(ScheduleConfig("1f1b-split", 4, 8, balance=BalanceConfig())),
    "grouped": lambda: build(ScheduleConfig("grouped-interleaved", 4, 6, 2, BalanceConfig(), group_size=2)),
    "v-flat": lambda: balance(v_flat(4, 3), (3, 16, 16, 4), (2, 3, 0, 1)),
    "v-half": lambda: balance(build(ScheduleConfig("v-half", 4, 6, 2)), (4, 3, 12, 12), (2, 3, 0, 1)),
}


@pytest.mark.parametrize("one_connection", [False, True], ids=["many connections", "one connection"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_everything_is_ordered(name: str, kind: str, one_connection: bool) -> None:
    schedule = SCHEDULES[name]()
    assert sum(num_transfers(schedule, rank).evictions for rank in range(4)) > 1
    assert splits(schedule) is (name not in ("1f1b", "interleaved"))
    for seed in range(2):
        assert findings(schedule, kind, one_connection, seed) == []


def test_one_queue_stands_still_where_messages_run_far_ahead() -> None:
    """What the checker says of it, seen on the device."""
    assert findings(far_ahead(), "two-sided") == []
    (finding,) = findings(far_ahead(), "two-sided", one_connection=True)
    assert finding.startswith("deadlock: ")


# -- each part of the order, taken away
# -------------------------------------------------------------------------------------------------


def without_waiting_for_messages(patch: pytest.MonkeyPatch) -> None:
    class Unwaited(Works):
        def wait(self) -> None:
            """What is under way goes on."""

    def unwaited(*given: Any) -> Works:
        works = batched(*given)
        return Unwaited(works._works, works._tensors)

    patch.setattr(edges, "batched", unwaited)


def with_programs(patch: pytest.MonkeyPatch, change: Callable[[list[Instruction]], list[Instruction]]) -> None:
    lower_as_run = executor_module.lower_as_run

    def changed(*given: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(instructions=change([*program.instructions])) for program in lower_as_run(*given)]  # type: ignore[arg-type]

    patch.setattr(executor_module, "lower_as_run", changed)


def without_one(text: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: with_programs(patch, lambda program: [each for each in program if str(each) != text])


def without_handing_over(patch: pytest.MonkeyPatch) -> None:
    """What the same rank's next stage needs is lost: no message carries it."""
    run = Executor._run

    def lost(self: Executor, action: Action, calls: Any) -> None:
        run(self, action, calls)
        sent = {
            each.operand.value
            for each in self._instructions
            if each.op is Op.SEND and not isinstance(each.operand, Action)
        }
        if (value := self._dependencies.value_of(action)) not in sent:
            self._values.pop(value, None)

    patch.setattr(Executor, "_run", lost)


def with_receives_swapped(patch: pytest.MonkeyPatch) -> None:
    """The second output of the first stage is received in place of the first."""

    def swapped(program: list[Instruction]) -> list[Instruction]:
        names = {"post 0F0>1F0": "post 0F1>1F1", "post 0F1>1F1": "post 0F0>1F0"}
        by_name = {str(each): each for each in program}
        return [by_name[names.get(str(each), str(each))] for each in program]

    with_programs(patch, swapped)


def with_the_very_output(patch: pytest.MonkeyPatch) -> None:
    """Whoever made it exchanges what lies behind it, while it is to be sent or handed over."""
    patch.setattr(FakeTensor, "detach", lambda self: self)


def with_halves_that_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    """A load is waited for by whole backwards only."""
    finish = Evictor.finish_load

    def only_whole(self: Evictor, backward: Action) -> None:
        if backward.kind is Kind.BACKWARD:
            finish(self, backward)
        else:
            self._known.pop((backward.stage, backward.microbatch), None)

    patch.setattr(Evictor, "finish_load", only_whole)


def with_weights_that_let_go_first(patch: pytest.MonkeyPatch) -> None:
    """What the weights' half needs is freed with the inputs' half."""
    free = fake_pipeline.Saved.free

    def all_at_once(self: fake_pipeline.Saved, *places: int) -> None:
        free(self, 0, 1, 2) if len(places) == 2 else None

    patch.setattr(fake_pipeline.Saved, "free", all_at_once)


def without_events_of_compute(patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def only_the_stream(self: Streams, stream: Any) -> Iterator[None]:
        with streams.current(stream):
            yield

    patch.setattr(Streams, "_behind_compute", only_the_stream)


BROKEN: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = {
    "a message is not waited for": ("v-half", without_waiting_for_messages, "not ordered behind"),
    "a receive is missing": (
        "split",
        without_one("post 1F1>2F1"),
        "never posted|wait for each other|is not here for|never begin",
    ),
    "a wait is missing": ("grouped", without_one("wait 1F1>2F1"), "the output of 1F1 is not here for 2F1"),
    "a send is missing": ("v-half", without_one("send 1F1>2F1"), "nothing used|wait for each other|reads|never begin"),
    "a hand-over is missing": ("v-half", without_handing_over, "the output of 3F0 is not here for 4F0"),
    "two receives are swapped": ("split", with_receives_swapped, "waits for 0F0>1F0, which it never posted"),
    "an output is sent as it is": ("v-half", with_the_very_output, "memory that was freed is used|reads"),
    "the inputs' half does not wait for its load": ("split", with_halves_that_do_not_wait, "not ordered behind"),
    "the weights' half comes too late": ("v-flat", with_weights_that_let_go_first, "memory that was freed is used"),
    "transfers do not wait for the computation": ("grouped", without_events_of_compute, "not ordered behind"),
    "memory is freed before it has left": (
        "v-half",
        partial(without_the_end_of, ActivationsState.AWAY),
        "not ordered behind",
    ),
    "a backward does not wait for its load": (
        "grouped",
        partial(without_the_end_of, ActivationsState.HERE),
        "not ordered behind",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_missing_is_noticed(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, breaking, message = BROKEN[name]
    breaking(monkeypatch)
    try:
        found = findings(SCHEDULES[schedule](), kind)
    except (AssertionError, RuntimeError, ValueError) as error:
        found = [str(error)]
    assert any(re.search(message, finding) for finding in found), found[:3]
