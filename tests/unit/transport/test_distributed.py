"""The two-sided transport: which group, which order, how many operations at once, and what is waited for."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bpipe.transport import distributed
from bpipe.transport.distributed import (
    MAX_BATCHED_OPERATIONS,
    MAX_CTAS,
    Distributed,
    PairGroups,
    destroy_groups,
    new_group,
    pair_groups,
    try_out,
)

CPU = torch.device("cpu")


class Options:
    """torch's, as of 2.11."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(max_ctas=-1, min_ctas=-1)


class Recorded:
    """`torch.distributed` on one rank, which writes down what it is asked for."""

    isend, irecv, ProcessGroup = "send", "receive", str

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.options: list[Any] = []
        self.destroyed: list[str] = []
        self.ProcessGroupNCCL = SimpleNamespace(Options=Options)
        self.calls: list[tuple[Any, ...]] = []
        self.waited: list[tuple[Any, ...]] = []

    def get_rank(self) -> int:
        return self.rank

    def new_group(self, ranks: list[int], timeout: Any, backend: str, pg_options: Any, group_desc: str) -> str:
        self.options.append(pg_options)
        self.calls.append(("group", tuple(ranks), backend, timeout.total_seconds(), group_desc))
        return group_desc

    def destroy_process_group(self, group: str) -> None:
        self.destroyed.append(group)

    def issue(self, operation: str, buffers: list[torch.Tensor], partner: int, group: str) -> list[Any]:
        """For `bpipe.transport.distributed.issue`."""
        self.calls.append(("batch", len(buffers)))
        asked = [(operation, buffer.numel(), partner, group) for buffer in buffers]
        return [SimpleNamespace(wait=lambda each=each: self.waited.append(each)) for each in asked]


@pytest.fixture(params=[0, 1, 2])
def dist(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded(request.param)
    monkeypatch.setattr(distributed, "dist", recorded)
    monkeypatch.setattr(distributed, "issue", recorded.issue)
    return recorded


def test_every_rank_makes_every_group_and_the_two_of_a_pair_try_it(dist: Recorded) -> None:
    """A network that does not connect fails here, within the time-out, and not in the middle of a step."""
    groups = pair_groups(0, 1, "gloo", 7.0)
    assert [call for call in dist.calls if call[0] == "group"] == [
        ("group", (0, 1), "gloo", 7.0, "BPIPE_UP_0_1"),
        ("group", (0, 1), "gloo", 7.0, "BPIPE_DOWN_0_1"),
    ]
    assert dist.waited == []
    if dist.rank == 2:
        assert groups is None
        return
    assert groups is not None
    try_out(groups, CPU)
    # One direction after the other, so that what one rank sends first the other receives first.
    up, down = "BPIPE_UP_0_1", "BPIPE_DOWN_0_1"
    if dist.rank == 0:
        assert groups == PairGroups(1, sending=up, receiving=down, timeout_s=7.0)  # type: ignore[arg-type]
        assert dist.waited == [("send", 1, 1, up), ("receive", 1, 1, down)]
    else:
        assert groups == PairGroups(0, sending=down, receiving=up, timeout_s=7.0)  # type: ignore[arg-type]
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
    Distributed(None, PairGroups(5, "away", "here")).put(
        0, [torch.zeros(1, dtype=torch.uint8)] * (2 * MAX_BATCHED_OPERATIONS + 3)
    ).wait()  # type: ignore[arg-type]
    assert dist.calls == [("batch", MAX_BATCHED_OPERATIONS), ("batch", MAX_BATCHED_OPERATIONS), ("batch", 3)]
    assert len(dist.waited) == 2 * MAX_BATCHED_OPERATIONS + 3


class Group:
    """Of ranks 3 and 7, as a backend that can or cannot start several operations at once."""

    def __init__(self, supports_coalescing: bool) -> None:
        self.supports_coalescing = supports_coalescing
        self.asked: list[Any] = []

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> str:
        self.asked.append(("send", tensors[0].numel(), rank, tag))
        return f"work {len(self.asked)}"

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> str:
        self.asked.append(("recv", tensors[0].numel(), rank, tag))
        return f"work {len(self.asked)}"


@pytest.mark.parametrize("operation", ["send", "recv"])
@pytest.mark.parametrize("at_once", [True, False])
def test_operations_are_started_in_one_call_where_a_backend_has_one(
    at_once: bool, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ranks of the group; torch's own batch took two thirds more of the main thread's time."""
    group = Group(at_once)

    @contextlib.contextmanager
    def together(*asked: Any, **named: Any) -> Iterator[Any]:
        assert (asked, named) == ((group, CPU), {"async_ops": True})
        call = SimpleNamespace(works=[])
        group.asked.append("begin")
        yield call
        group.asked.append("end")
        call.works.append("the work of all")

    monkeypatch.setattr(torch.distributed, "_coalescing_manager", together)
    monkeypatch.setattr(torch.distributed, "get_group_rank", lambda given, rank: [3, 7].index(rank))
    asked = torch.distributed.isend if operation == "send" else torch.distributed.irecv
    works = distributed.issue(asked, [torch.zeros(2), torch.zeros(5)], 7, group)  # type: ignore[arg-type]
    each = [(operation, 2, 1, 0), (operation, 5, 1, 0)]
    assert group.asked == (["begin", *each, "end"] if at_once else each)
    assert works == (["the work of all"] if at_once else ["work 1", "work 2"])


def test_this_torch_starts_several_operations_at_once() -> None:
    """The names by which `issue` asks for that are not public: a torch without them has to be noticed."""
    assert list(inspect.signature(torch.distributed._coalescing_manager).parameters) == ["group", "device", "async_ops"]
    assert "supports_coalescing" in dir(torch._C._distributed_c10d.Backend)


@pytest.mark.parametrize("few_units", [True, False])
def test_nccl_carries_messages_at_once_and_transfers_on_few_units(few_units: bool, dist: Recorded) -> None:
    new_group([0, 1], "nccl", 2.5, "UP_0_1", few_units)
    (options,) = dist.options
    assert options.is_high_priority_stream
    assert options.config.max_ctas == (MAX_CTAS if few_units else -1)


def test_both_ranks_destroy_their_groups_in_one_order(dist: Recorded) -> None:
    if dist.rank == 2:
        return
    destroy_groups(pair_groups(0, 1, "gloo", 7.0))  # type: ignore[arg-type]
    assert dist.destroyed == ["BPIPE_UP_0_1", "BPIPE_DOWN_0_1"]
