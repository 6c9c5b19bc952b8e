"""One-sided access to host buffers: their states, the order of accesses, and how the two ends part."""

import threading
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch

from bpipe.transport.memory import BufferLayout, DeviceMemory, SharedMemory, Sizes
from bpipe.transport.one_sided import HostMemory, OneSidedCopies, Peer
from bpipe.transport.streams import Job, Pending, ThreadLane
from tests.unit.transport.fake_cuda import FakeCuda
from tests.unit.transport.loopback import AtOnce, alone, controls, peers, together

SIZES: Sizes = {0: (1000, 24, 4096)}
STAGES = (frozenset({0}), frozenset({0}))
LAYOUT = BufferLayout.of(STAGES, SIZES)


def announce(evictor: OneSidedCopies, sizes: Sizes = SIZES, layout: BufferLayout = LAYOUT) -> Pending:
    """An evictor takes the layout of its host buffers and announces its sizes."""
    evictor.reach(layout)
    return evictor.announce(sizes)


def lend(acceptor: OneSidedCopies) -> None:
    """An acceptor lends the memory that the announced sizes need."""
    if acceptor.lends:
        acceptor.lend(BufferLayout.of(STAGES, acceptor.learn()).nbytes)


@pytest.fixture(params=[peers, alone], ids=["peer", "host"])
def pair(
    request: pytest.FixtureRequest, lanes: tuple[ThreadLane, ThreadLane]
) -> Iterator[tuple[OneSidedCopies, OneSidedCopies]]:
    """An evictor and an acceptor that know each other's memory."""
    evictor, acceptor = request.param(*lanes)
    announce(evictor).wait()
    lend(acceptor)
    yield evictor, acceptor
    evictor.abandon()
    acceptor.abandon()


def tensors(seed: int | None = None) -> list[torch.Tensor]:
    if seed is None:
        return [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in SIZES[0]]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator) for nbytes in SIZES[0]]


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


def test_what_was_put_comes_back(pair: tuple[OneSidedCopies, OneSidedCopies]) -> None:
    evictor, _ = pair
    received = [tensors(), tensors()]
    for number in (0, 1):
        evictor.put(number, tensors(number)).wait()
    for number in (1, 0):
        evictor.get(number, received[number]).wait()
    assert same(received[0], tensors(0))
    assert same(received[1], tensors(1))


def test_a_host_buffer_that_is_taken_is_refused(pair: tuple[OneSidedCopies, OneSidedCopies]) -> None:
    evictor, _ = pair
    evictor.put(0, tensors(1)).wait()
    with pytest.raises(RuntimeError, match=r"host buffer 0 is holding, but must be free for this transfer"):
        evictor.put(0, tensors(2))
    received = tensors()
    evictor.get(0, received).wait()
    assert same(received, tensors(1)), "what was refused must not have moved"


def test_a_host_buffer_that_holds_nothing_is_refused(pair: tuple[OneSidedCopies, OneSidedCopies]) -> None:
    evictor, _ = pair
    with pytest.raises(RuntimeError, match="host buffer 1 is free, but must be holding for this transfer"):
        evictor.get(1, tensors())


class Written(ThreadLane):
    """Records what its jobs wait for."""

    def __init__(self) -> None:
        super().__init__("written", 5.0)
        self.asked: list[tuple[Pending, tuple[Pending, ...]]] = []

    def run(self, job: Job, after: Sequence[Pending] = ()) -> Pending:  # type: ignore[override]
        pending = super().run(job, after)
        self.asked.append((pending, tuple(after)))
        return pending


def test_what_touches_a_host_buffer_waits_for_what_touched_it_last() -> None:
    """And for nothing else: two host buffers have nothing to do with each other."""
    lane = Written()
    evictor, _ = alone(lane, lane)
    announce(evictor).wait()
    first, second = evictor.put(0, tensors(0)), evictor.put(1, tensors(1))
    home, again = evictor.get(0, tensors()), evictor.put(0, tensors(2))
    assert lane.asked == [(first, ()), (second, ()), (home, (first,)), (again, (home,))]
    evictor.release()
    lane.close()


class Watched(SharedMemory):
    """Records which of the two ends closes first."""

    def __init__(self, closed: list[str]) -> None:
        self._closed = closed

    def make(self, nbytes: int):  # type: ignore[no-untyped-def]
        handle, region = super().make(nbytes)
        self._watch(region, "lent")
        return handle, region

    def open(self, handle):  # type: ignore[no-untyped-def]
        region = super().open(handle)
        self._watch(region, "opened")
        return region

    def _watch(self, region, name: str) -> None:  # type: ignore[no-untyped-def]
        close = region.close

        def closing() -> None:
            self._closed.append(name)
            close()

        region.close = closing


def test_memory_is_not_freed_while_the_partner_has_it_open(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    closed: list[str] = []
    evictor, acceptor = peers(*lanes, lender=lambda: Watched(closed))
    announce(evictor).wait()
    lend(acceptor)
    evictor.put(0, tensors(1)).wait()
    parting = threading.Thread(target=acceptor.release)
    parting.start()
    parting.join(0.05)
    assert closed == [], "the acceptor let go first"
    evictor.release()
    parting.join(5.0)
    assert closed == ["opened", "lent"]


class Failing(SharedMemory):
    def make(self, nbytes: int):  # type: ignore[no-untyped-def]
        raise OSError(12, "Cannot allocate memory")


def test_an_acceptor_without_memory_tells_its_evictor(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    evictor, acceptor = peers(*lanes, lender=Failing)
    announce(evictor).wait()
    with pytest.raises(OSError, match="Cannot allocate memory"):
        lend(acceptor)
    with pytest.raises(RuntimeError, match=r"the partner could not allocate the host buffers that it lends: OSError"):
        evictor.put(0, tensors(1)).wait()


def test_asking_never_waits_for_the_partner(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    """The lane's thread waits for the partner's memory, so the loop goes on even in the first iteration."""
    evictor, acceptor = peers(*lanes)
    announce(evictor).wait()
    put = evictor.put(0, tensors(7))
    received = tensors()
    load = evictor.get(0, received)
    lend(acceptor)
    for pending in (put, load):
        pending.wait()
    assert same(received, tensors(7))
    for end in (evictor, acceptor):
        end.abandon()


def on_a_device(cuda: FakeCuda, kind: str) -> tuple[OneSidedCopies, OneSidedCopies]:
    """Both ends as on a GPU, where copies are issued at once and nobody knows when they end."""
    lanes, device = (AtOnce(), AtOnce()), cuda.device()
    if kind == "host":
        return HostMemory(device, *lanes), HostMemory(device, *lanes)
    first, second = controls()
    return Peer(first, DeviceMemory(device), *lanes), Peer(second, DeviceMemory(device), *lanes)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["peer", "host"])
def test_after_an_error_neither_end_waits_for_its_device_or_frees_what_is_copied(cuda: FakeCuda, kind: str) -> None:
    """Waiting for a kernel that never ends delayed the traceback by minutes."""
    evictor, acceptor = on_a_device(cuda, kind)
    announce(evictor).wait()
    lend(acceptor)
    evictor.put(0, tensors(1))
    cuda.calls.clear()
    for end in (acceptor, evictor):
        end.abandon()
    assert cuda.calls == []
    assert len(cuda.allocated) == len(cuda.opened) == (kind == "peer")
    assert len(cuda.locked) == (kind == "host")


@pytest.mark.parametrize("kind", ["peer", "host"])
def test_parting_in_good_order_waits_for_the_device_and_frees(cuda: FakeCuda, kind: str) -> None:
    evictor, acceptor = on_a_device(cuda, kind)
    announce(evictor).wait()
    lend(acceptor)
    evictor.put(0, tensors(1))
    for end in (evictor, acceptor):
        end.release()
    assert "cudaDeviceSynchronize" in cuda.calls
    assert (cuda.allocated, cuda.opened, cuda.locked) == ({}, [], {})


def test_two_that_lend_to_each_other_need_not_wait_for_each_other() -> None:
    """A gloo send is complete once received: both used to wait for the other to receive."""
    ends = [Peer(control, SharedMemory(), AtOnce(), AtOnce()) for control in controls(timeout_s=2.0, rendezvous=True)]  # type: ignore[arg-type]

    def both_roles(end: OneSidedCopies, seed: int) -> None:
        announced = announce(end)
        lend(end)
        received = tensors()
        end.put(0, tensors(seed)).wait()
        end.get(0, received).wait()
        announced.wait()
        assert same(received, tensors(seed))
        end.release()

    together(*(partial(both_roles, end, seed) for seed, end in enumerate(ends)))
