"""What happens around torch's runtime in a step: calls of the engine, and memory of its buffers."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Action, Kind
from bpipe.torch import calls
from bpipe.torch.calls import ReceiveBuffers, StepCalls, WatchedList
from bpipe.torch.orders import torch_orders
from bpipe.torch.upstream import Computation, TorchAction


class Notes:
    """Records the calls."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.said.append(" ".join([name, *map(str, args[:1])]))


class Stage(SimpleNamespace):
    """A stage whose methods, like those of torch's stages, belong to its class or to itself."""

    def backward_weight_one_chunk(self, microbatch: int) -> str:
        return f"W{microbatch}"


def stage(index: int) -> Any:
    return Stage(
        stage_index=index,
        forward_one_chunk=lambda mb: f"F{mb}",
        backward_one_chunk=lambda mb, full_backward=True: f"B{mb}",
    )


def run(actions: list[Any], index: int = 1) -> list[str]:
    """Do what torch's loop does with its list, as far as it concerns us."""
    notes, subject = Notes(), stage(index)
    step = StepCalls(notes, actions)
    before = dict(vars(subject))
    with step.around([subject]):
        step.begin()
        for action in step.watched():
            for part in action.sub_actions or (action,):
                if part.computation_type is Computation.FORWARD:
                    assert subject.forward_one_chunk(part.microbatch_index) == f"F{part.microbatch_index}"
                    step.forward_ran((), ())
                elif part.computation_type is Computation.FULL_BACKWARD:
                    subject.backward_one_chunk(part.microbatch_index)
                elif part.computation_type is Computation.BACKWARD_INPUT:
                    subject.backward_one_chunk(part.microbatch_index, full_backward=False)
                elif part.computation_type is Computation.BACKWARD_WEIGHT:
                    subject.backward_weight_one_chunk(part.microbatch_index)
                else:
                    notes.said.append(str(part))
    assert vars(subject) == before, "outside of a step the stage is torch's own"
    return notes.said


def parsed(words: str) -> list[Any]:
    return [TorchAction.from_str(word) for word in words.split()]


def test_waits_for_others_may_stand_between_a_computation_and_its_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.15 lists WAIT_SEND_F after a backward, so `sent` was called for the backward before its SEND_B."""
    # Torch before 2.15 has no such action, so UNSHARD takes its place.
    monkeypatch.setattr(calls, "SEND_WAITS", (Computation.UNSHARD,))
    assert run(parsed("1F0 1SEND_F0 1B0 1UNSHARD 1SEND_B0 1F1 1B1 1UNSHARD")) == [
        *("begin", "before 1F0", "after 1F0", "1SEND_F0", "sent 1F0"),
        *("before 1B0", "after 1B0", "1UNSHARD", "1SEND_B0", "sent 1B0"),
        *("before 1F1", "after 1F1", "sent 1F1", "before 1B1", "after 1B1", "sent 1B1", "communicated", "1UNSHARD"),
    ]


def test_halves_and_overlaps() -> None:
    overlap = TorchAction(-1, Computation.OVERLAP_F_B, None, tuple(parsed("1F1 1B0")))
    assert run([*parsed("1F0 1SEND_F0"), overlap, *parsed("1SEND_F1 1SEND_B0 1I1 1SEND_B1 1W1")]) == [
        *("begin", "before 1F0", "after 1F0", "1SEND_F0", "sent 1F0"),
        *("before 1F1", "after 1F1", "sent 1F1", "before 1B0", "after 1B0", "1SEND_F1", "1SEND_B0", "sent 1B0"),
        *("before 1I1", "after 1I1", "1SEND_B1", "sent 1I1", "before 1W1", "after 1W1", "sent 1W1", "communicated"),
    ]


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "v-half"])
def test_every_computation_has_its_calls_once(name: str) -> None:
    schedule = build(ScheduleConfig(name, 2, 4, num_chunks=1 if name == "1f1b" else 2))
    for actions in torch_orders(schedule).values():
        own = [action for action in actions if action.stage_index == actions[0].stage_index]
        calls = run(own, own[0].stage_index)
        assert calls == [
            "begin",
            *(f"{call} {action}" for action in own for call in ("before", "after", "sent")),
            "communicated",
        ]


def test_a_list_that_is_watched_is_copied_as_a_list() -> None:
    """Torch copies the whole schedule to print it with an error."""
    seen: list[int] = []
    watched = WatchedList(["a", "b"], lambda action: None, seen.append)
    assert type(copy.deepcopy({0: watched})[0]) is list
    assert seen == []
    assert list(watched) == ["a", "b"]
    assert seen == [0, 1]


MICROBATCHES, BYTES = 3, 4 * 8


def info(buffer: torch.Tensor | None, is_root_arg: bool = False) -> Any:
    return SimpleNamespace(buffer=buffer, is_root_arg=is_root_arg)


def receiving(index: int) -> Any:
    return SimpleNamespace(
        stage_index=index,
        args_recv_info={mb: (info(torch.ones(8)), info(None, True)) for mb in range(MICROBATCHES)},
        # An output without a gradient has no buffer.
        grad_recv_info={mb: (info(torch.ones(8)), info(None)) for mb in range(MICROBATCHES)},
    )


def held(buffers: ReceiveBuffers, of: Any) -> list[int]:
    assert buffers.nbytes == sum(
        info.buffer.untyped_storage().nbytes()
        for infos in (of.args_recv_info, of.grad_recv_info)
        for row in infos.values()
        for info in row
        if info.buffer is not None
    )
    return [of.args_recv_info[mb][0].buffer.untyped_storage().nbytes() for mb in range(MICROBATCHES)]


def received(kind: Any, microbatch: int) -> Any:
    return TorchAction(1, kind, microbatch)


def test_a_buffer_is_there_from_its_receive_to_its_last_use() -> None:
    receiver = receiving(1)
    buffers = ReceiveBuffers([receiver], {1}.__contains__)
    buffers.begin()
    assert held(buffers, receiver) == [0, 0, 0]
    buffers.receives(received(Computation.RECV_F, 1))
    buffers.receives(received(Computation.FORWARD, 2))
    assert held(buffers, receiver) == [0, BYTES, 0]
    buffers.receives(received(Computation.RECV_B, 1))
    assert buffers.nbytes == 2 * BYTES
    buffers.used(Action(1, Kind.BACKWARD_INPUT, 1))
    assert buffers.nbytes == 2 * BYTES
    buffers.used(Action(1, Kind.BACKWARD_WEIGHT, 1))
    assert buffers.nbytes == 0
    # The next step begins anew.
    buffers.end()
    buffers.begin()
    buffers.receives(received(Computation.RECV_F, 0))
    assert held(buffers, receiver) == [BYTES, 0, 0]


def test_what_somebody_holds_is_left_until_the_end_of_the_step() -> None:
    """A gradient that is still to be sent may be a view of what was received."""
    receiver = receiving(1)
    buffers = ReceiveBuffers([receiver], {1}.__contains__)
    buffers.begin()
    buffers.receives(received(Computation.RECV_B, 0))
    receiver.grad_recv_info[0][0].buffer.fill_(5)
    sent = receiver.grad_recv_info[0][0].buffer.view(2, 4)
    buffers.used(Action(1, Kind.BACKWARD, 0))
    assert torch.equal(sent, torch.full((2, 4), 5.0))
    del sent
    assert buffers.nbytes == BYTES
    buffers.end()
    assert buffers.nbytes == 0


def test_what_stays_on_the_rank_is_nobodys_buffer() -> None:
    """Torch puts the other stage's output there, which belongs to that stage."""
    receiver = receiving(1)
    ReceiveBuffers([receiver], {0, 1, 2}.__contains__).begin()
    assert receiver.args_recv_info[0][0].buffer.untyped_storage().nbytes() == BYTES


def test_what_a_broken_off_step_took_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bpipe.torch.calls.KEEPS_BUFFERS", False)
    receiver = receiving(1)
    receiver.args_recv_info = receiver.grad_recv_info = {0: (info(None),)}
    buffers = ReceiveBuffers([receiver], {1}.__contains__)
    buffers.begin()
    buffers.took(1, 0, [torch.ones(8)])
    buffers.begin()
    assert buffers.nbytes == 0
