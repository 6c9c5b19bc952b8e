"""Collectives in groups that deliver only what is waited for, and how the first message of each kind passes."""

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.program import Message
from bpipe.transport import collectives
from bpipe.transport.collectives import SORTS, Collectives, SharedGroups
from tests.unit.transport.loopback import controls

CPU = torch.device("cpu")
RANKS = 3
LAST = RANKS - 1
# Global ranks differ from positions in the pipeline.
PIPELINE = (7, 5, 3)


class Group:
    """A group of all ranks: what each rank gave, by the number of the collective."""

    def __init__(self) -> None:
        self.given: defaultdict[int, dict[int, torch.Tensor]] = defaultdict(dict)


class Seat:
    """One rank's end of a group. The result of a collective exists only after its wait."""

    def __init__(self, group: Group, rank: int) -> None:
        self._group, self._rank, self._next = group, rank, 0

    def size(self) -> int:
        return RANKS

    def _get_backend(self, device: torch.device) -> object:
        """A backend that takes one operation per call, like gloo's."""
        return object()

    def issue(self, tensor: torch.Tensor | None, arrive: Callable[[dict[int, torch.Tensor]], object] | None) -> Any:
        number, self._next = self._next, self._next + 1
        if tensor is not None:
            self._group.given[number][self._rank] = tensor.clone()

        def wait() -> None:
            if arrive is not None:
                arrive(self._group.given[number])

        return SimpleNamespace(wait=wait, is_completed=lambda: False)

    @property
    def place(self) -> int:
        return PIPELINE[self._rank]


def broadcast(tensor: torch.Tensor, source: int, group: Seat, async_op: bool) -> Any:
    is_source = group.place == source
    return group.issue(
        tensor if is_source else None,
        None if is_source else lambda tensors: tensor.copy_(tensors[PIPELINE.index(source)]),
    )


def reduce(tensor: torch.Tensor, target: int, group: Seat, async_op: bool) -> Any:
    def arrive(tensors: dict[int, torch.Tensor]) -> None:
        tensor.copy_(sum(tensors[rank] for rank in range(RANKS)))  # type: ignore[arg-type]

    return group.issue(tensor, arrive if group.place == target else None)


def gather(whole: torch.Tensor, part: torch.Tensor, group: Seat, async_op: bool) -> Any:
    return group.issue(part[0], lambda tensors: whole.copy_(torch.stack([tensors[rank] for rank in range(RANKS)])))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Collectives]:
    monkeypatch.setattr(collectives, "dist", SimpleNamespace(broadcast=broadcast, reduce=reduce))
    monkeypatch.setattr(collectives, "gather_into", gather)
    groups = {kind: Group() for kind in SORTS}
    result = []
    hosts: list[dict[int, Any]] = [{} for _ in range(RANKS)]
    for low, high in itertools.combinations(range(RANKS), 2):
        hosts[low][high], hosts[high][low] = controls(timeout_s=2.0, rendezvous=True)
    for rank in range(RANKS):
        seats: Any = {kind: Seat(group, rank) for kind, group in groups.items()}
        result.append(
            Collectives(rank, SharedGroups(PIPELINE, seats, hosts[rank], 7.0), lambda action: action.stage, CPU)
        )
    return result


def shards(kind: Kind, microbatch: int) -> tuple[Action, ...]:
    return tuple(Action(rank, kind, microbatch) for rank in range(RANKS))


def output(microbatch: int) -> Message:
    """The output of the last stage, for all shards."""
    return Message(
        microbatch, (Action(LAST, Kind.FORWARD, microbatch),), shards(Kind.SHARD_FORWARD, microbatch), (LAST, 0, 1)
    )


def statistics(microbatch: int) -> Message:
    makers, needed = (shards(kind, microbatch) for kind in (Kind.SHARD_FORWARD, Kind.SHARD_BACKWARD))
    return Message(100 + microbatch, makers, needed, (0, 1, LAST))


def gradient(microbatch: int) -> Message:
    makers = shards(Kind.SHARD_BACKWARD, microbatch)
    return Message(200 + microbatch, makers, (Action(LAST, Kind.BACKWARD, microbatch),), (0, 1, LAST))


def test_all_get_what_one_makes(ranks: list[Collectives]) -> None:
    """The first message carries all shapes through the hosts, so it waits in no queue."""
    for microbatch in range(3):
        tensors = torch.arange(6.0).reshape(2, 3) + microbatch, torch.tensor([microbatch])
        for rank in (0, 1):
            ranks[rank].post(output(microbatch))
        ranks[LAST].send(output(microbatch), tensors)
        for rank in (0, 1):
            received = ranks[rank].wait(output(microbatch))
            assert [tensor.tolist() for tensor in received] == [tensor.tolist() for tensor in tensors]
        assert ranks[LAST].wait(output(microbatch)) == ()
    seat: Any = ranks[LAST]._groups.of[Kind.FORWARD]
    assert seat._next == 4, "two tensors of each but the first"


def test_the_first_is_kept_until_everybody_has_it(ranks: list[Collectives]) -> None:
    for rank in (0, 1):
        ranks[rank].post(output(0))
    ranks[LAST].send(output(0), (torch.ones(2),))
    ended = threading.Event()
    threading.Thread(target=lambda: (ranks[LAST].wait(output(0)), ended.set()), daemon=True).start()
    assert len(ranks[0].wait(output(0))) == 1
    assert not ended.wait(0.1)
    ranks[1].wait(output(0))
    assert ended.wait(5.0)


def test_one_gets_the_sum_of_what_all_make(ranks: list[Collectives]) -> None:
    for rank in range(RANKS):
        ranks[rank].send(gradient(0), (torch.tensor([1.0, rank]),))
    assert [ranks[rank].wait(gradient(0)) for rank in (0, 1)] == [(), ()]
    (total,) = ranks[LAST].wait(gradient(0))
    assert total.tolist() == [3.0, 3.0]


class Lane:
    """Jobs run when somebody calls `go` or waits for their result."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def run(self, job: Callable[[], None], after: Sequence[Any] = ()) -> Any:
        def all_of_it() -> None:
            for pending in after:
                pending.wait()
            job()

        self.jobs.append(all_of_it)
        return SimpleNamespace(wait=self.go)

    def go(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()

    def close(self, wait: bool = True) -> None:
        raise AssertionError


def with_stage(microbatch: int) -> Message:
    """What is gathered and what the last stage needs from it are one value."""
    message = statistics(microbatch)
    return message._replace(needed_by=(*message.needed_by, Action(LAST, Kind.BACKWARD, microbatch)))


def test_a_stage_gets_the_sum_of_what_all_make_of_what_all_made(ranks: list[Collectives]) -> None:
    lanes = [Lane() for _ in ranks]
    for rank, rank_collectives in enumerate(ranks):

        def late(microbatch: int, gathered: Any, rank: int = rank) -> tuple[torch.Tensor]:
            return (gathered[0].sum() * 10**rank + torch.tensor([float(microbatch)]),)

        rank_collectives._second = collectives.SecondStep(late, lanes[rank])
        rank_collectives.send(with_stage(1), (torch.tensor([1.0 + rank]),))
    for rank in (0, 1):
        (whole,) = ranks[rank].wait(with_stage(1))
        assert whole.tolist() == [[1.0], [2.0], [3.0]]
        assert len(lanes[rank].jobs) == 1, "nobody waits for what it does not need"
        lanes[rank].go()
    whole, total = ranks[LAST].wait(with_stage(1))
    assert whole.tolist() == [[1.0], [2.0], [3.0]]
    assert total.tolist() == [6.0 * 111 + 3]


def test_what_breaks_beside_the_computation_is_told_to_the_computation(ranks: list[Collectives]) -> None:
    """Rank 0 needs no result of it."""
    lane = Lane()

    def late(microbatch: int, gathered: Any) -> Any:
        raise RuntimeError("out of memory")

    for rank_collectives in ranks:
        rank_collectives._second = collectives.SecondStep(late, lane if rank_collectives is ranks[0] else Lane())
        rank_collectives.send(with_stage(0), (torch.tensor([1.0]),))
    with pytest.raises(RuntimeError, match="out of memory"):
        lane.go()
    with pytest.raises(RuntimeError, match="out of memory"):
        ranks[0].wait(with_stage(0))


def test_what_was_never_posted_is_not_waited_for(ranks: list[Collectives]) -> None:
    with pytest.raises(ValueError, match=r"rank 0 waits for 2F0>0S0\+1S0\+2S0, which it never posted"):
        ranks[0].wait(output(0))


def test_another_shape_than_the_first_is_refused(ranks: list[Collectives]) -> None:
    ranks[0].send(statistics(0), (torch.zeros(2),))
    with pytest.raises(ValueError, match=r"rank 0: .* but the first such message carried"):
        ranks[0].send(statistics(1), (torch.zeros(3),))


def test_each_message_goes_its_way(ranks: list[Collectives]) -> None:
    """Messages with two ends go over edges."""
    log: list[str] = []
    edges: Any = SimpleNamespace(
        post=lambda message: log.append(f"post {message}"), wait=lambda message: (torch.tensor(4),)
    )
    for number, rank in enumerate(ranks):
        rank._edges = edges
        rank.send(statistics(0), (torch.tensor([number]),))
    (whole,) = ranks[0].wait(statistics(0))
    assert whole.tolist() == [[0], [1], [2]]
    passed = Message(300, (Action(0, Kind.FORWARD, 0),), (Action(1, Kind.FORWARD, 0),), (0, 1))
    ranks[1].post(passed)
    assert ranks[1].wait(passed) == (torch.tensor(4),)
    assert log == ["post 0F0>1F0"]
