"""Messages over edges, on a wire that delivers only what is waited for: first messages pass through the hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.program import Message
from bpipe.transport import edges
from bpipe.transport.distributed import Control, PairGroups, Subject
from bpipe.transport.edges import Edge, Edges
from tests.unit.transport.loopback import controls

CPU = torch.device("cpu")


class Wire:
    """A directed edge: data arrive when they are waited for, and a sender may not change them before."""

    def __init__(self) -> None:
        self.under_way: deque[Sequence[torch.Tensor]] = deque()
        self.waited: list[int] = []
        self.is_broken = False

    def send(self, tensors: Sequence[torch.Tensor]) -> Pending:
        self.under_way.append(tensors)
        return Pending(self, lambda: self.waited.append(len(tensors)))

    def receive(self, tensors: Sequence[torch.Tensor]) -> Pending:
        def arrive() -> None:
            for target, source in zip(tensors, self.under_way.popleft(), strict=True):
                target.copy_(source)

        return Pending(self, arrive)

    def check(self) -> None:
        if self.is_broken:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")


class Pending:
    """An operation that never reports by itself that it is complete."""

    completed = False

    def __init__(self, wire: Wire, happen: Callable[[], object]) -> None:
        self._wire, self._happen = wire, happen

    def wait(self) -> None:
        self._wire.check()
        self._happen()


class HostsControl(Control):
    """The hosts' control group, which breaks with the wire and records each wait as 0."""

    def __init__(self, control: Any, wire: Wire) -> None:
        self._control, self._wire = control, wire

    def send_tensors(self, about: Subject, tensors: Sequence[torch.Tensor]) -> Any:
        self._wire.check()
        sending = self._control.send_tensors(about, tensors)

        def arrive() -> None:
            sending.wait()
            self._wire.waited.append(0)

        return Pending(self._wire, arrive)

    def receive_tensors(self, about: Subject) -> tuple[torch.Tensor, ...]:
        self._wire.check()
        received: tuple[torch.Tensor, ...] = self._control.receive_tensors(about)
        return received


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[Edges, Edges]:
    """Ranks 0 and 1, with a wire in each direction."""
    wires = {"up": Wire(), "down": Wire()}

    def batched(operation: Any, tensors: Sequence[torch.Tensor], partner: int, group: str) -> Pending:
        wire = wires[group]
        wire.check()
        return wire.send(tensors) if operation is edges.dist.isend else wire.receive(tensors)

    monkeypatch.setattr(edges, "batched", batched)
    groups: Any = [PairGroups(1, "up", "down", 7.0), PairGroups(0, "down", "up", 7.0)]  # type: ignore[arg-type]
    hosts = [HostsControl(control, wires["up"]) for control in controls(timeout_s=2.0)]
    pair = Edges(0, {1: Edge(groups[0], hosts[0])}, CPU), Edges(1, {0: Edge(groups[1], hosts[1])}, CPU)
    pair[0].wire = wires["up"]  # type: ignore[attr-defined]
    return pair


def forward(microbatch: int, stage: int = 0) -> Message:
    """A message from a stage of rank 0 to one of rank 1."""
    maker, taker = (Action(number, Kind.FORWARD, microbatch) for number in (stage, stage + 1))
    return Message(100 * stage + microbatch, (maker,), (taker,), (0, 1))


def made(microbatch: int, *shape: int) -> torch.Tensor:
    return torch.full(shape or (2, 3), 1.0 + microbatch)


def test_what_different_stages_send_may_differ_in_shape(ends: tuple[Edges, Edges]) -> None:
    low, high = ends
    sent = [forward(0), forward(0, stage=2), forward(1), forward(1, stage=2)]
    shapes = {0: (2, 3), 2: (5,)}
    for message in sent:
        high.post(message)
        low.send(message, (made(message.made_by[0].microbatch, *shapes[message.made_by[0].stage]),))
    for message in sent:
        (maker,) = message.made_by
        assert torch.equal(high.wait(message)[0], made(maker.microbatch, *shapes[maker.stage]))


def test_what_is_sent_is_waited_for_also_by_way_of_the_hosts(ends: tuple[Edges, Edges]) -> None:
    low, _ = ends
    wire: Wire = low.wire  # type: ignore[attr-defined]
    for microbatch in range(2):
        low.send(forward(microbatch), (made(0), made(1)))
    assert low.wait(forward(0)) == ()
    assert wire.waited == [0]
    low.wait(forward(1))
    assert wire.waited == [0, 2]


def test_a_message_keeps_its_types_and_its_bits(ends: tuple[Edges, Edges]) -> None:
    low, high = ends
    tensors = torch.tensor([[1.5, -0.0]], dtype=torch.bfloat16), torch.tensor(True), torch.empty(0, 3)
    high.post(forward(0))
    low.send(forward(0), tensors)
    for sent, received in zip(tensors, high.wait(forward(0)), strict=True):
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        assert torch.equal(received, sent)


def test_a_micro_batch_of_another_shape_is_refused(ends: tuple[Edges, Edges]) -> None:
    low, _ = ends
    low.send(forward(0), (made(0),))
    refused = r"rank 0: 0F1>1F1 carries float32 \[4\], but the first such message carried float32 \[2, 3\]: .* pad them to one length"
    with pytest.raises(ValueError, match=refused):
        low.send(forward(1), (made(1, 4),))


def test_where_shapes_may_differ_every_message_tells_its_own_and_stands_in_no_edge(ends: tuple[Edges, Edges]) -> None:
    low, high = ends
    wire: Wire = low.wire  # type: ignore[attr-defined]
    for end in ends:
        end._differing = True
    shapes = [(2, 3), (4, 3), (1, 3), (4, 3)]
    for microbatch in range(2):
        high.post(forward(microbatch))
    for microbatch, shape in enumerate(shapes):
        low.send(forward(microbatch), (made(microbatch, *shape),))
    for microbatch in range(2, 4):
        high.post(forward(microbatch))
    for microbatch, shape in enumerate(shapes):
        assert torch.equal(high.wait(forward(microbatch))[0], made(microbatch, *shape))
    assert not wire.under_way


def test_what_was_not_posted_is_not_waited_for(ends: tuple[Edges, Edges]) -> None:
    with pytest.raises(ValueError, match="rank 1 waits for 0F0>1F0, which it never posted"):
        ends[1].wait(forward(0))


def test_an_edge_has_two_ends(ends: tuple[Edges, Edges]) -> None:
    message = forward(0)._replace(parties=(0, 1, 2))
    with pytest.raises(ValueError, match="0F0>1F0 involves 3 ranks, but an edge has two ends"):
        ends[0].send(message, (made(0),))


@pytest.mark.parametrize("step", ["first send", "let go", "first receive", "send", "receive", "message"])
def test_what_fails_says_how_long_it_would_have_waited(step: str, ends: tuple[Edges, Edges]) -> None:
    low, high = ends
    wire: Wire = low.wire  # type: ignore[attr-defined]
    calls: dict[str, Callable[[], object]] = {
        "first send": lambda: low.send(forward(0, stage=2), (made(1),)),
        "let go": lambda: low.wait(forward(0)),
        "first receive": lambda: high.wait(forward(0)),
        "send": lambda: low.send(forward(1), (made(1),)),
        "receive": lambda: high.post(forward(1)),
        "message": lambda: high.wait(forward(1)),
    }
    low.send(forward(0), (made(0),))
    high.post(forward(0))
    if step in ("receive", "message"):
        # From here on its shape is known.
        high.wait(forward(0))
    if step == "message":
        low.send(forward(1), (made(1),))
        high.post(forward(1))
    wire.is_broken = True
    with pytest.raises(ConnectionError, match=r"the time-out is 7 s, --bpipe-timeout: Connection closed") as caught:
        calls[step]()
    assert str(caught.value).count("time-out") == 1
