"""Torch's receive buffers have memory only while it is needed, and nobody who holds one loses it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bpipe.schedule.action import Action, Kind
from bpipe.torch.calls import ReceiveBuffers
from bpipe.torch.upstream import Computation, TorchAction

MICROBATCHES, BYTES = 3, 4 * 8


def info(buffer: torch.Tensor | None, is_root_arg: bool = False) -> Any:
    return SimpleNamespace(buffer=buffer, is_root_arg=is_root_arg)


def stage(index: int) -> Any:
    return SimpleNamespace(
        stage_index=index,
        args_recv_info={mb: (info(torch.ones(8)), info(None, True)) for mb in range(MICROBATCHES)},
        # An output without a gradient has no buffer.
        grad_recv_info={mb: (info(torch.ones(8)), info(None)) for mb in range(MICROBATCHES)},
    )


def held(buffers: ReceiveBuffers, of: Any) -> list[int]:
    assert buffers.nbytes == sum(
        each.buffer.untyped_storage().nbytes()
        for infos in (of.args_recv_info, of.grad_recv_info)
        for row in infos.values()
        for each in row
        if each.buffer is not None
    )
    return [of.args_recv_info[mb][0].buffer.untyped_storage().nbytes() for mb in range(MICROBATCHES)]


def received(kind: Any, microbatch: int) -> Any:
    return TorchAction(1, kind, microbatch)


def test_a_buffer_is_there_from_its_receive_to_its_last_use() -> None:
    here = stage(1)
    buffers = ReceiveBuffers([here], {1}.__contains__)
    buffers.begin()
    assert held(buffers, here) == [0, 0, 0]
    buffers.receives(received(Computation.RECV_F, 1))
    buffers.receives(received(Computation.FORWARD, 2))
    assert held(buffers, here) == [0, BYTES, 0]
    buffers.receives(received(Computation.RECV_B, 1))
    assert buffers.nbytes == 2 * BYTES
    buffers.used(Action(1, Kind.BACKWARD_INPUT, 1))
    assert buffers.nbytes == 2 * BYTES
    buffers.used(Action(1, Kind.BACKWARD_WEIGHT, 1))
    assert buffers.nbytes == 0
    # The next step's.
    buffers.end()
    buffers.begin()
    buffers.receives(received(Computation.RECV_F, 0))
    assert held(buffers, here) == [BYTES, 0, 0]


def test_what_somebody_holds_is_left_until_the_end_of_the_step() -> None:
    """A gradient that is a view of what was received is still to be sent."""
    here = stage(1)
    buffers = ReceiveBuffers([here], {1}.__contains__)
    buffers.begin()
    buffers.receives(received(Computation.RECV_B, 0))
    here.grad_recv_info[0][0].buffer.fill_(5)
    sent = here.grad_recv_info[0][0].buffer.view(2, 4)
    buffers.used(Action(1, Kind.BACKWARD, 0))
    assert torch.equal(sent, torch.full((2, 4), 5.0))
    del sent
    assert buffers.nbytes == BYTES
    buffers.end()
    assert buffers.nbytes == 0


def test_what_stays_on_the_rank_is_nobodys_buffer() -> None:
    """Torch puts the output of the other stage there, which is that one's."""
    here = stage(1)
    ReceiveBuffers([here], {0, 1, 2}.__contains__).begin()
    assert here.args_recv_info[0][0].buffer.untyped_storage().nbytes() == BYTES


def test_what_a_broken_off_step_took_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bpipe.torch.calls.KEEPS_BUFFERS", False)
    here = stage(1)
    here.args_recv_info = here.grad_recv_info = {0: (info(None),)}
    buffers = ReceiveBuffers([here], {1}.__contains__)
    buffers.begin()
    buffers.took(1, 0, [torch.ones(8)])
    buffers.begin()
    assert buffers.nbytes == 0
