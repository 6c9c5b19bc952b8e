"""Messages between the two ranks of a pair: each finds whoever asks for its kind, in whatever order the two are."""

from __future__ import annotations

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bpipe.transport import control
from bpipe.transport.control import Control, Subject


class Wire:
    """What `torch.distributed` does between two ranks: messages with one tag keep their order, others do not care."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.waited = 0

    def isend(self, tensor: torch.Tensor, to: int, group: Any, tag: int) -> SimpleNamespace:
        # What is sent is read when it is waited for, as late as it may be.
        self.sent[to, tag].append(tensor)
        return SimpleNamespace(wait=self._wait)

    def irecv(self, tensor: torch.Tensor, source: int, group: Any, tag: int) -> SimpleNamespace:
        me = 1 - source
        return SimpleNamespace(wait=lambda: tensor.copy_(self.sent[me, tag].popleft()))

    def _wait(self) -> None:
        self.waited += 1


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    monkeypatch.setattr(control, "dist", wire)
    return wire


def ends() -> tuple[Control, Control]:
    return Control(1, None), Control(0, None)  # type: ignore[arg-type]


VALUES = [
    None,
    "",
    "zu wenig Speicher: 17 €",
    {"0": [1, 2]},
    [[3, [10**12, 0]], [0, []]],
    {"handle": "00" * 64},
    ["x" * 100_000],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_values_arrive_as_they_were(wire: Wire, value: Any) -> None:
    here, there = ends()
    here.send(Subject.SIZES, value)
    assert there.receive(Subject.SIZES) == value


def test_an_exchange_tells_before_it_listens(wire: Wire) -> None:
    """Both ends call it at once: neither may wait for the other to begin."""
    here, there = ends()
    there.send(Subject.PROBE, "from there")
    assert here.exchange(Subject.PROBE, "from here") == "from there"
    assert there.receive(Subject.PROBE) == "from here"
    assert wire.waited == 2
