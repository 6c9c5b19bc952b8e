"""Lengths in front of a two-sided transport: a HOST waits for them and posts nothing before, and everything is
waited for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal

import pytest
import torch

from bpipe.transport.base import Pending
from bpipe.transport.headed import Headed
from bpipe.transport.layout import Sizes
from tests.unit.transport.loopback import controls


class Asked:
    """One operation of the transport below: what it was asked for, and whether it was waited for."""

    def __init__(self, name: str, host_buffer: int, lengths: list[int]) -> None:
        self.said = (name, host_buffer, lengths)
        self.waited = False

    def wait(self) -> None:
        self.waited = True


class Below:
    """A transport that writes down what it is asked for."""

    one_sided: Literal[False] = False

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def _note(self, name: str, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Asked:
        self.asked.append(Asked(name, host_buffer, [tensor.numel() for tensor in tensors]))
        return self.asked[-1]

    def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Asked:
        return self._note("put", host_buffer, tensors)

    def get(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Asked:
        return self._note("get", host_buffer, tensors)

    def host(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Asked:
        return self._note("host", host_buffer, tensors)

    def give_back(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Asked:
        return self._note("give_back", host_buffer, tensors)

    def announce(self, sizes: Sizes) -> Pending:
        raise AssertionError("nobody announces here")

    def learn(self) -> dict[int, tuple[int, ...]]:
        raise AssertionError("nobody learns here")

    def release(self) -> None:
        """Nothing is held."""

    withdraw = abandon = release


def bytes_of(*lengths: int) -> list[torch.Tensor]:
    return [torch.zeros(length, dtype=torch.uint8) for length in lengths]


@pytest.fixture
def ends() -> tuple[Headed, Below, Headed, Below]:
    """An evictor and an acceptor, and what lies below each."""
    here, there = controls(timeout_s=2.0, rendezvous=True)
    below = Below(), Below()
    return Headed(below[0], here), below[0], Headed(below[1], there), below[1]  # type: ignore[arg-type]


def test_a_host_posts_where_the_program_has_it(ends: tuple[Headed, Below, Headed, Below]) -> None:
    """A thread once posted it when the lengths had come, behind what the rank had issued meanwhile."""
    evictor, _, acceptor, receiving = ends
    hosting = threading.Thread(
        target=lambda: (acceptor.host(0, bytes_of(512)), acceptor.get(1, bytes_of(9))), daemon=True
    )
    hosting.start()
    hosting.join(0.1)
    assert hosting.is_alive(), "nobody has told the lengths"
    assert receiving.asked == []
    going = evictor.put(0, bytes_of(5))
    hosting.join(5.0)
    assert [asked.said for asked in receiving.asked] == [("host", 0, [5]), ("get", 1, [9])]
    going.wait()


def test_lengths_that_never_come_are_an_error_where_they_are_waited_for(
    ends: tuple[Headed, Below, Headed, Below],
) -> None:
    _, _, acceptor, receiving = ends
    with pytest.raises(TimeoutError, match="no message about LENGTHS within 2 s"):
        acceptor.host(0, bytes_of(512))
    assert receiving.asked == []
