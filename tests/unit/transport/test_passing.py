"""What comes from a partner goes on into the node's memory and back from there: in order, through the same tensors, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from bpipe.transport.base import Pending
from bpipe.transport.lanes import ThreadLane
from bpipe.transport.layout import BufferLayout
from bpipe.transport.passing import Passing
from tests.unit.runtime.held import HeldTwoSided
from tests.unit.transport.loopback import alone

LENGTHS = (600, 40)
NUM_SLOTS = 3


def tensors(value: int = 0) -> list[torch.Tensor]:
    return [torch.full((length,), value, dtype=torch.uint8) for length in LENGTHS]


def passing(inner: HeldTwoSided, lanes: tuple[ThreadLane, ThreadLane]) -> Passing:
    made = Passing(inner, alone(*lanes)[0], *lanes)
    made.reach(BufferLayout.of([(0,)] * NUM_SLOTS, {0: LENGTHS}))
    return made


@pytest.fixture
def lanes() -> Iterator[tuple[ThreadLane, ThreadLane]]:
    made = ThreadLane("coming", 10.0), ThreadLane("going", 10.0)
    yield made
    for lane in made:
        lane.close()


@pytest.mark.parametrize("late_send", [False, True])
@pytest.mark.parametrize("late_receive", [False, True])
def test_several_go_through_the_same_tensors_and_come_back_in_another_order(
    late_send: bool, late_receive: bool, lanes: tuple[ThreadLane, ThreadLane]
) -> None:
    here, there = HeldTwoSided.pair(late_send, late_receive, timeout_s=10.0)
    way, coming, going = passing(there, lanes), tensors(), tensors()
    for turn in range(2):
        # All is asked for before the partner does anything.
        hosted = [way.host(slot, coming) for slot in range(NUM_SLOTS)]
        order = (1, 2, 0) if turn else (2, 0, 1)
        given = []
        for slot in order:
            way.bring(slot, going)
            given.append(way.give_back(slot, going))
        puts = [here.put(slot, tensors(10 * turn + slot + 1)) for slot in range(NUM_SLOTS)]
        back = [tensors() for _ in order]
        for pending in (*puts, *hosted):
            pending.wait()
        for slot, target in zip(order, back, strict=True):
            here.get(slot, target).wait()
            assert [set(tensor.tolist()) for tensor in target] == [{10 * turn + slot + 1}] * len(LENGTHS)
        for pending in given:
            pending.wait()
    way.release()


class Broken:
    """A partner that is gone: what it was to send never comes."""

    def wait(self) -> None:
        raise ConnectionError("gone")


def test_what_did_not_come_is_neither_kept_nor_sent_back(lanes: tuple[ThreadLane, ThreadLane], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its backward would take whatever was in the buffer for its activations."""
    _, there = HeldTwoSided.pair(late_send=False, late_receive=False, timeout_s=10.0)
    sent: list[int] = []

    def give_back(host_buffer: int, given: Sequence[torch.Tensor]) -> Pending:
        sent.append(host_buffer)
        return Broken()

    monkeypatch.setattr(there, "host", lambda host_buffer, given: Broken())
    monkeypatch.setattr(there, "give_back", give_back)
    way = passing(there, lanes)
    hosted = way.host(0, tensors())
    way.bring(0, tensors())
    given = way.give_back(0, tensors())
    for pending in (hosted, given):
        with pytest.raises(ConnectionError, match="gone"):
            pending.wait()
    assert not sent
    with pytest.raises(ConnectionError, match="gone"):
        way.release()
    way.abandon()


def test_a_slot_that_is_not_free_is_refused(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    _, there = HeldTwoSided.pair(late_send=False, late_receive=False, timeout_s=0.2)
    way = passing(there, lanes)
    way.host(0, tensors())
    with pytest.raises(RuntimeError, match="host buffer 0 is holding, but must be free for this transfer"):
        way.host(0, tensors())
    with pytest.raises(RuntimeError, match="host buffer 1 is free, but must be holding for this transfer"):
        way.bring(1, tensors())
    way.abandon()


def test_the_other_end_sends_and_takes_as_ever(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    here, there = HeldTwoSided.pair(late_send=False, late_receive=False, timeout_s=10.0)
    way = passing(here, lanes)
    way.announce({0: LENGTHS}).wait()
    assert there.learn() == {0: LENGTHS}
    there.announce({3: LENGTHS}).wait()
    assert way.learn() == {3: LENGTHS}
    room = tensors()
    put, hosted = way.put(0, tensors(5)), there.host(0, room)
    put.wait()
    hosted.wait()
    back = tensors()
    given, got = there.give_back(0, room), way.get(0, back)
    given.wait()
    got.wait()
    assert [set(tensor.tolist()) for tensor in back] == [{5}] * len(LENGTHS)
