"""The two-sided transport: groups, orders, lengths that come first, control messages, and the threads of copy engines."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bpipe.transport import distributed
from bpipe.transport.distributed import (
    MAX_BATCHED_OPERATIONS,
    MAX_CTAS,
    Control,
    Distributed,
    Headed,
    PairGroups,
    Subject,
    Works,
    destroy_groups,
    new_group,
    pair_groups,
    try_out,
)
from bpipe.transport.streams import ThreadLane
from tests.unit.transport.loopback import controls

CPU = torch.device("cpu")


class Options:
    """NCCL's options in torch, as of 2.11."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(max_ctas=-1, min_ctas=-1)


class Recorded:
    """A stand-in for `torch.distributed` on one rank, which records its calls."""

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
        """Replaces `bpipe.transport.distributed.issue`."""
        self.calls.append(("batch", len(buffers)))
        requests = [(operation, buffer.numel(), partner, group) for buffer in buffers]
        return [SimpleNamespace(wait=lambda request=request: self.waited.append(request)) for request in requests]


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
    """A group of ranks 3 and 7, whose backend can or cannot start several operations at once."""

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
    """Ranks are those in the group. torch's own batch took two thirds more of the main thread's time."""
    group = Group(at_once)

    @contextlib.contextmanager
    def together(*arguments: Any, **named: Any) -> Iterator[Any]:
        assert (arguments, named) == ((group, CPU), {"async_ops": True})
        call = SimpleNamespace(works=[])
        group.asked.append("begin")
        yield call
        group.asked.append("end")
        call.works.append("the work of all")

    monkeypatch.setattr(torch.distributed, "_coalescing_manager", together)
    monkeypatch.setattr(torch.distributed, "get_group_rank", lambda _, rank: [3, 7].index(rank))
    function = torch.distributed.isend if operation == "send" else torch.distributed.irecv
    works = distributed.issue(function, [torch.zeros(2), torch.zeros(5)], 7, group)  # type: ignore[arg-type]
    operations = [(operation, 2, 1, 0), (operation, 5, 1, 0)]
    assert group.asked == (["begin", *operations, "end"] if at_once else operations)
    assert works == (["the work of all"] if at_once else ["work 1", "work 2"])


def test_this_torch_starts_several_operations_at_once() -> None:
    """`issue` uses names that are not public, so a torch without them must be noticed."""
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


class Headed(Headed):
    """Records what it would send and receive, and what was waited for."""

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
def ends() -> tuple[Headed, Headed]:
    """An evictor and an acceptor."""
    first, second = controls(timeout_s=2.0, rendezvous=True)
    return Headed(first), Headed(second)


def test_a_host_posts_where_the_program_has_it(ends: tuple[Headed, Headed]) -> None:
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


def test_what_a_host_buffer_holds_is_sent_back(ends: tuple[Headed, Headed]) -> None:
    evictor, acceptor = ends
    hosting = threading.Thread(target=lambda: acceptor.host(0, bytes_of(2048)), daemon=True)
    hosting.start()
    evictor.put(0, bytes_of(5, 700)).wait()
    hosting.join(5.0)
    acceptor.give_back(0, bytes_of(2048)).wait()
    assert acceptor.asked == [("receive", [5, 700]), ("send", [5, 700])]
    assert acceptor.waited == [("send", [5, 700])]


def test_lengths_that_never_come_are_an_error_where_they_are_waited_for(ends: tuple[Headed, Headed]) -> None:
    _, acceptor = ends
    with pytest.raises(TimeoutError, match="no message about LENGTHS within 2 s"):
        acceptor.host(0, bytes_of(512))
    assert acceptor.asked == []


class Wire:
    """What `torch.distributed` does between two ranks: only messages with the same tag keep their order."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.waited = 0

    def isend(self, tensor: torch.Tensor, to: int, group: Any, tag: int) -> SimpleNamespace:
        # A sent tensor is read when its receiver waits, as late as possible.
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
    monkeypatch.setattr(distributed, "dist", wire)
    return wire


def control_ends() -> tuple[Control, Control]:
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
    first, second = control_ends()
    first.send(Subject.SIZES, value)
    # An exchange sends before it receives: neither end may wait for the other to begin.
    assert second.exchange(Subject.SIZES, "back") == value
    assert first.receive(Subject.SIZES) == "back"


class Gate:
    """A job that begins and then waits until it is opened."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.open.wait(5.0)


def test_jobs_of_a_lane_run_in_the_order_they_were_asked_for(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    results: list[int] = []
    gate = Gate()
    lanes[0].run(gate)
    tickets = [lanes[0].run(lambda number=number: results.append(number)) for number in range(50)]  # type: ignore[misc]
    assert results == []
    gate.open.set()
    tickets[-1].wait()
    assert results == list(range(50))


def test_a_job_waits_for_those_of_the_other_lane_it_comes_after(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    outbound, inbound = lanes
    results: list[str] = []
    gate = Gate()
    first = outbound.run(lambda: (gate(), results.append("put"))[0])
    second = inbound.run(lambda: results.append("get"), after=[first])
    assert gate.begun.wait(5.0)
    assert results == []
    gate.open.set()
    second.wait()
    assert results == ["put", "get"]


def test_an_error_is_raised_where_somebody_waits_and_the_lane_lives_on(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    def fail() -> None:
        raise OSError("no such memory")

    results: list[str] = []
    failed = lanes[0].run(fail)
    follows = lanes[1].run(lambda: results.append("never"), after=[failed])
    later = lanes[0].run(lambda: results.append("other"))
    later.wait()
    for ticket in (failed, failed, follows):
        with pytest.raises(OSError, match="no such memory"):
            ticket.wait()
    assert results == ["other"], "a job whose predecessor failed has nothing to work on"


def test_a_job_that_does_not_end_is_a_time_out() -> None:
    lane = ThreadLane("outbound", 0.05)
    gate = Gate()
    ticket = lane.run(gate)
    with pytest.raises(TimeoutError, match=r"no copy within 0\.05 s"):
        ticket.wait()
    gate.open.set()
    lane.close()
