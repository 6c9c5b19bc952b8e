"""Messages over edges, on a wire that delivers only what is waited for: what is announced when, and in which order
all of it goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from bpipe.ir.action import Action, Kind
from bpipe.ir.program import Message
from bpipe.transport import edges
from bpipe.transport.distributed import PairGroups
from bpipe.transport.edges import Edges

CPU = torch.device("cpu")


class Wire:
    """One directed edge. What is received is there once it was waited for, and what is sent may not change before
    that."""

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
    """An operation that never says by itself that it is over."""

    completed = False

    def __init__(self, wire: Wire, happen: Callable[[], object]) -> None:
        self._wire, self._happen = wire, happen

    def wait(self) -> None:
        self._wire.check()
        self._happen()


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
    found = Edges(0, {1: groups[0]}, CPU), Edges(1, {0: groups[1]}, CPU)
    found[0].wire = wires["up"]  # type: ignore[attr-defined]
    return found


def forward(microbatch: int, stage: int = 0) -> Message:
    """What goes from a stage of rank 0 to one of rank 1."""
    maker, taker = (Action(number, Kind.FORWARD, microbatch) for number in (stage, stage + 1))
    return Message(100 * stage + microbatch, (maker,), (taker,), (0, 1))


def made(microbatch: int, *shape: int) -> torch.Tensor:
    return torch.full(shape or (2, 3), 1.0 + microbatch)


def test_shapes_are_announced_once_and_receives_may_be_posted_before(ends: tuple[Edges, Edges]) -> None:
    low, high = ends
    for microbatch in range(2):
        high.post(forward(microbatch))
    for microbatch in range(3):
        low.send(forward(microbatch), (made(microbatch), torch.tensor(microbatch)))
    high.post(forward(2))
    for microbatch in range(3):
        tensor, number = high.wait(forward(microbatch))
        assert torch.equal(tensor, made(microbatch))
        assert number.dtype is torch.int64
        assert number.item() == microbatch


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


def test_what_is_sent_is_waited_for_with_its_announcement(ends: tuple[Edges, Edges]) -> None:
    low, _ = ends
    wire: Wire = low.wire  # type: ignore[attr-defined]
    low.send(forward(0), (made(0), made(1)))
    low.send(forward(1), (made(0), made(1)))
    assert low.wait(forward(0)) == ()
    assert wire.waited == [1, 2]
    low.wait(forward(1))
    assert wire.waited == [1, 2, 2]


def test_a_micro_batch_of_another_shape_is_refused(ends: tuple[Edges, Edges]) -> None:
    low, _ = ends
    low.send(forward(0), (made(0),))
    refused = (
        r"rank 0: 0F1>1F1 carries float32 \[4\], the first of its sort carried float32 \[2, 3\]: .* pad to one length"
    )
    with pytest.raises(ValueError, match=refused):
        low.send(forward(1), (made(1, 4),))


def test_what_was_not_posted_is_not_waited_for(ends: tuple[Edges, Edges]) -> None:
    with pytest.raises(ValueError, match="rank 1: waits for 0F0>1F0, which it never posted"):
        ends[1].wait(forward(0))


def test_an_edge_has_two_ends(ends: tuple[Edges, Edges]) -> None:
    message = forward(0)._replace(parties=(0, 1, 2))
    with pytest.raises(ValueError, match="0F0>1F0 is of 3 ranks together and an edge has two ends"):
        ends[0].send(message, (made(0),))


def test_more_than_an_announcement_can_describe_is_refused(ends: tuple[Edges, Edges]) -> None:
    with pytest.raises(
        ValueError, match="0F0>1F0 carries 16 tensors, more than an announcement of 64 numbers can describe"
    ):
        ends[0].send(forward(0), (made(0),) * 16)


@pytest.mark.parametrize("step", ["send", "let go", "receive", "announcement", "message"])
def test_what_fails_says_how_long_it_would_have_waited(step: str, ends: tuple[Edges, Edges]) -> None:
    low, high = ends
    wire: Wire = low.wire  # type: ignore[attr-defined]
    calls: dict[str, Callable[[], object]] = {
        "send": lambda: low.send(forward(1), (made(1),)),
        "let go": lambda: low.wait(forward(0)),
        "receive": lambda: high.post(forward(1)),
        "announcement": lambda: high.wait(forward(0)),
        "message": lambda: high.wait(forward(0)),
    }
    if step != "announcement":
        low.send(forward(0), (made(0),))
    if step != "receive":
        high.post(forward(0))
    if step == "message":
        # Its shape is known.
        high.wait(forward(0))
        low.send(forward(1), (made(1),))
        high.post(forward(1))
        calls[step] = lambda: high.wait(forward(1))
    wire.is_broken = True
    with pytest.raises(ConnectionError, match="the time-out is 7 s, --bpipe-timeout: Connection closed by peer"):
        calls[step]()


def test_a_backend_that_never_knows_is_asked_of_the_oldest_send_only(
    ends: tuple[Edges, Edges], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each send once asked all that were under way: an iteration of m micro-batches asked m * m / 2 times."""
    asked = []
    monkeypatch.setattr(Pending, "completed", property(lambda pending: asked.append(pending) or False))
    for microbatch in range(40):
        ends[0].send(forward(microbatch), (made(microbatch),))
    assert len(asked) == 39
