"""A HOST waits for the lengths of a two-sided transfer, posts nothing before, and everything is waited for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bpipe.transport.control import Works
from bpipe.transport.distributed import Headed
from tests.unit.transport.loopback import controls


class Recorded(Headed):
    """Writes down what it would send and receive, and what was waited for."""

    def __init__(self, control: Any) -> None:
        super().__init__(control, None)  # type: ignore[arg-type]
        self.asked: list[tuple[str, list[int]]] = []
        self.waited: list[tuple[str, list[int]]] = []

    def _send(self, tensors: Sequence[torch.Tensor]) -> Works:
        return self._note("send", tensors)

    def _receive(self, tensors: Sequence[torch.Tensor]) -> Works:
        return self._note("receive", tensors)

    def _note(self, name: str, tensors: Sequence[torch.Tensor]) -> Works:
        asked = name, [tensor.numel() for tensor in tensors]
        self.asked.append(asked)
        return Works([SimpleNamespace(wait=lambda: self.waited.append(asked))], tensors)


def bytes_of(*lengths: int) -> list[torch.Tensor]:
    return [torch.zeros(length, dtype=torch.uint8) for length in lengths]


@pytest.fixture
def ends() -> tuple[Recorded, Recorded]:
    """An evictor and an acceptor."""
    here, there = controls(timeout_s=2.0, rendezvous=True)
    return Recorded(here), Recorded(there)


def test_a_host_posts_where_the_program_has_it(ends: tuple[Recorded, Recorded]) -> None:
    """A thread once posted it when the lengths had come, after what the rank had issued meanwhile."""
    evictor, acceptor = ends
    hosting = threading.Thread(
        target=lambda: (acceptor.host(0, bytes_of(512)), acceptor.get(1, bytes_of(9))), daemon=True
    )
    hosting.start()
    hosting.join(0.1)
    assert hosting.is_alive(), "nobody has told the lengths"
    assert acceptor.asked == []
    going = evictor.put(0, bytes_of(5))
    hosting.join(5.0)
    assert acceptor.asked == [("receive", [5]), ("receive", [9])]
    going.wait()
    assert evictor.waited == [("send", [5])]


def test_what_a_host_buffer_holds_is_sent_back(ends: tuple[Recorded, Recorded]) -> None:
    evictor, acceptor = ends
    hosting = threading.Thread(target=lambda: acceptor.host(0, bytes_of(2048)), daemon=True)
    hosting.start()
    evictor.put(0, bytes_of(5, 700)).wait()
    hosting.join(5.0)
    acceptor.give_back(0, bytes_of(2048)).wait()
    assert acceptor.asked == [("receive", [5, 700]), ("send", [5, 700])]
    assert acceptor.waited == [("send", [5, 700])]


def test_lengths_that_never_come_are_an_error_where_they_are_waited_for(ends: tuple[Recorded, Recorded]) -> None:
    _, acceptor = ends
    with pytest.raises(TimeoutError, match="no message about LENGTHS within 2 s"):
        acceptor.host(0, bytes_of(512))
    assert acceptor.asked == []
