"""The two-sided transport's calls: which group, which order, how many at once, and what is waited for. Processes are in tests/gloo."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bpipe.transport import distributed
from bpipe.transport.distributed import MAX_BATCHED_OPERATIONS, Distributed, PairGroups, new_group, pair_groups

CPU = torch.device("cpu")


class Recorded:
    """`torch.distributed` on one rank, which writes down what it is asked for."""

    isend, irecv, ProcessGroup = "send", "receive", str

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[tuple[Any, ...]] = []
        self.waited: list[tuple[Any, ...]] = []

    def get_rank(self) -> int:
        return self.rank

    def new_group(self, ranks: list[int], timeout: Any, backend: str, group_desc: str) -> str:
        self.calls.append(("group", tuple(ranks), backend, timeout.total_seconds(), group_desc))
        return group_desc

    def P2POp(self, operation: str, buffer: torch.Tensor, partner: int, group: str) -> tuple[Any, ...]:
        return operation, buffer.numel(), partner, group

    def batch_isend_irecv(self, operations: list[tuple[Any, ...]]) -> list[Any]:
        self.calls.append(("batch", len(operations)))
        return [SimpleNamespace(wait=lambda each=each: self.waited.append(each)) for each in operations]


@pytest.fixture(params=[0, 1, 2])
def dist(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded(request.param)
    monkeypatch.setattr(distributed, "dist", recorded)
    return recorded


def test_every_rank_makes_every_group_and_the_two_of_a_pair_try_it(dist: Recorded) -> None:
    """A network that does not connect fails here, within the time-out, and not in the middle of a step."""
    groups = pair_groups(0, 1, "gloo", 7.0, CPU)
    assert [call for call in dist.calls if call[0] == "group"] == [
        ("group", (0, 1), "gloo", 7.0, "BPIPE_UP_0_1"),
        ("group", (0, 1), "gloo", 7.0, "BPIPE_DOWN_0_1"),
    ]
    if dist.rank == 2:
        assert groups is None
        assert dist.waited == []
        return
    # One direction after the other, so that what one rank sends first the other receives first.
    up, down = "BPIPE_UP_0_1", "BPIPE_DOWN_0_1"
    if dist.rank == 0:
        assert groups == PairGroups(1, sending=up, receiving=down)  # type: ignore[arg-type]
        assert dist.waited == [("send", 1, 1, up), ("receive", 1, 1, down)]
    else:
        assert groups == PairGroups(0, sending=down, receiving=up)  # type: ignore[arg-type]
        assert dist.waited == [("receive", 1, 0, up), ("send", 1, 0, down)]


def test_each_direction_has_its_group_and_every_operation_is_waited_for(dist: Recorded) -> None:
    transport = Distributed(None, PairGroups(5, "away", "here"))  # type: ignore[arg-type]
    buffers = [torch.zeros(length, dtype=torch.uint8) for length in (3, 1, 2)]
    for name, operation, group in (
        ("put", "send", "away"),
        ("get", "receive", "here"),
        ("host", "receive", "here"),
        ("give_back", "send", "away"),
    ):
        dist.waited.clear()
        works = getattr(transport, name)(0, buffers)
        assert dist.waited == []
        works.wait()
        assert dist.waited == [(operation, length, 5, group) for length in (3, 1, 2)]


def test_no_group_call_is_larger_than_nccls_limit(dist: Recorded) -> None:
    Distributed(None, PairGroups(5, "away", "here")).put(0, [torch.zeros(1, dtype=torch.uint8)] * (2 * MAX_BATCHED_OPERATIONS + 3)).wait()  # type: ignore[arg-type]
    assert dist.calls == [("batch", MAX_BATCHED_OPERATIONS), ("batch", MAX_BATCHED_OPERATIONS), ("batch", 3)]
    assert len(dist.waited) == 2 * MAX_BATCHED_OPERATIONS + 3


def test_what_is_under_way_is_kept_alive_until_it_is_waited_for(dist: Recorded) -> None:
    import weakref

    buffer = torch.zeros(4, dtype=torch.uint8)
    gone = weakref.ref(buffer)
    works = Distributed(None, PairGroups(5, "away", "here")).put(0, [buffer])  # type: ignore[arg-type]
    del buffer
    assert gone() is not None
    works.wait()
    assert gone() is None


def test_groups_end_with_the_time_out(dist: Recorded) -> None:
    new_group([0, 1], "gloo", 2.5, "CONTROL_0_1")
    assert dist.calls == [("group", (0, 1), "gloo", 2.5, "BPIPE_CONTROL_0_1")]
