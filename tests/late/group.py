"""A process group with NCCL's rules on late devices, registered with torch.distributed as the backend `late`.

Ranks are threads of one process, each a host in `Hosts` (csrc/hosts.h), with a `SharedStore` between them. Kernels of
sends, receives and collectives meet on the devices. The rules, with their places in
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:

- A communicator is made with the first operation that needs it, and its ranks' hosts wait for each other
(`initNCCLComm`).
  A batch of messages uses the group's own, with all ranks; a single message one of the two ranks (`pointToPoint`: "For
  single P2P").
- Every communicator has its own stream on each device. An operation starts after what the current stream was given
  (`syncStream`), and `wait` makes the current stream wait for its end, not the host (`WorkNCCL::synchronize`).
- A batch is one kernel, which ends when all its messages are done (`endCoalescing`).
- The tensors of an operation are kept alive until it was waited for (`stashed_for_allocator_safety_`).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from bpipe.transport.streams import current
from tests.late.devices import TYPE, extension

DTYPES = {torch.float32: "f", torch.float64: "d", torch.int64: "q", torch.int32: "i", torch.uint8: "B", torch.bool: "?"}
KINDS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}
# The peer's rank in the group, whether this rank sends, and the tensor.
Message = tuple[int, bool, torch.Tensor]

# By communicator, the ranks that have reached its creation. Shared by all threads.
_born: dict[str, set[int]] = defaultdict(set)
_stored: dict[str, bytes] = {}


class SharedStore(dist.Store):
    """What ranks exchange while they make groups. A wait lets another host run."""

    def set(self, key: str, value: Any) -> None:
        _stored[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return _stored[key]

    def add(self, key: str, amount: int) -> int:
        number = int(_stored.get(key, b"0")) + amount
        _stored[key] = str(number).encode()
        return number

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in _stored for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        extension().wait_until(lambda: self.check(keys), f"a host waits for {', '.join(keys)}")

    def deleteKey(self, key: str) -> bool:
        return _stored.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(_stored)


class LateWork(dist.Work):
    """An operation in progress. `over` is its end on the device."""

    def __init__(self, over: Any, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._over, self.tensors = over, list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        stream = torch.accelerator.current_stream()
        extension().block(stream.device_index, stream.stream_id, self._over)
        self.tensors = []
        return True

    def is_completed(self) -> bool:
        return bool(extension().query(self._over))

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()


class Group(dist.ProcessGroup):
    """One rank's end of a group. Subclasses define how ranks meet: `_make`, `_begin` and `_begin_collective`."""

    supports_coalescing = True
    supports_splitting = False

    def __init__(self, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name, self._rank, self._size = name, rank, size
        self._streams: dict[str, torch.Stream] = {}
        self._batch: list[Message] | None = None

    @property
    def group_name(self) -> str:
        """torch reads this from a group's backend, which this group does not have."""
        return self._name.split("@")[0]

    def getBackendName(self) -> str:
        return TYPE

    def _get_backend(self, device: object) -> Group:
        return self

    # -- communicators
    # -----------------------------------------------------------------------------------------------------------------

    def _make(self, name: str, ranks: Sequence[int]) -> None:
        """Wait until all ranks of a communicator have reached its creation."""
        raise NotImplementedError

    def _communicator(self, ranks: Sequence[int], key: str) -> tuple[str, torch.Stream]:
        """Return a communicator's name and this rank's stream of it; the first time, wait for all its ranks."""
        name = f"{self._name}/{key}"
        if name not in self._streams:
            self._make(name, ranks)
            self._streams[name] = torch.Stream(torch.device(TYPE, torch.accelerator.current_device_index()))
        return name, self._streams[name]

    def _whole(self) -> tuple[str, torch.Stream]:
        return self._communicator(range(self._size), "all")

    def _wait_for_current(self, stream: torch.Stream) -> None:
        stream.wait_event(torch.accelerator.current_stream().record_event())

    # -- messages
    # ------------------------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> LateWork | None:
        return self._message(dst, True, tensors[0])

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> LateWork | None:
        return self._message(src, False, tensors[0])

    def _message(self, peer: int, sends: bool, tensor: torch.Tensor) -> LateWork | None:
        assert tensor.is_contiguous()
        if self._batch is not None:
            self._batch.append((peer, sends, tensor))
            return None
        pair = sorted((peer, self._rank))
        return self._exchange(*self._communicator(pair, ":".join(map(str, pair))), pair, [(peer, sends, tensor)])

    def with_one(self, peer: int, messages: Sequence[tuple[torch.Tensor, bool]]) -> LateWork:
        """Exchange messages with one rank in the communicator of the two; each has a flag whether it is sent."""
        pair = sorted((self._rank, peer))
        batch = [(peer, sends, tensor) for tensor, sends in messages]
        return self._exchange(*self._communicator(pair, ":".join(map(str, pair))), pair, batch)

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> LateWork:
        batch, self._batch = self._batch, None
        assert batch is not None
        return self._exchange(*self._whole(), range(self._size), batch)

    def _exchange(self, name: str, stream: torch.Stream, ranks: Sequence[int], batch: Sequence[Message]) -> LateWork:
        self._wait_for_current(stream)
        label = f"{name} " + ", ".join(
            f"{'send' if sends else 'receive'} {self._channel(peer, sends)}" for peer, sends, _ in batch[:2]
        )
        over = self._begin(name, stream, ranks, batch, label)
        return LateWork(over, [tensor for _, _, tensor in batch])

    def _channel(self, peer: int, sends: bool) -> str:
        return f"{self._rank}>{peer}" if sends else f"{peer}>{self._rank}"

    def _begin(
        self, name: str, stream: torch.Stream, ranks: Sequence[int], batch: Sequence[Message], label: str
    ) -> Any:
        """Issue the kernel of a batch, and return its end."""
        raise NotImplementedError

    # -- collectives
    # ------------------------------------------------------------------------------------------------------------------

    def _collective(self, kind: str, source: torch.Tensor, target: torch.Tensor, root: int = -1) -> LateWork:
        assert source.is_contiguous()
        assert target.is_contiguous()
        name, stream = self._whole()
        self._wait_for_current(stream)
        dtype = DTYPES.get(source.dtype, "-")
        numbers = dtype, source.data_ptr(), target.data_ptr(), source.nbytes
        return LateWork(self._begin_collective(name, stream, kind, root, numbers), [source, target])

    def _begin_collective(
        self, name: str, stream: torch.Stream, kind: str, root: int, numbers: tuple[str, int, int, int]
    ) -> Any:
        """Issue the kernel of a collective, and return its end."""
        raise NotImplementedError

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> LateWork | None:
        """In a batch, send messages from the root, so that the whole batch is one kernel."""
        if self._batch is not None:
            (tensor,), root = tensors, opts.rootRank
            others = [rank for rank in range(self._size) if rank != root]
            self._batch += [(rank, True, tensor) for rank in others] if self._rank == root else [(root, False, tensor)]
            return None
        return self._collective("broadcast", tensors[0], tensors[0], opts.rootRank)

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> LateWork:
        return self._collective(KINDS[opts.reduceOp.op], tensors[0], tensors[0], opts.rootRank)

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> LateWork:
        return self._collective("sum" if opts is None else KINDS[opts.reduceOp.op], tensors[0], tensors[0])

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> LateWork:
        """Reduce one after the other. NCCL's are one kernel, which ends when all are done."""
        works = [
            self._collective("sum" if opts is None else KINDS[opts.reduceOp.op], tensor, tensor) for tensor in tensors
        ]
        stream = self._whole()[1]
        return LateWork(
            extension().mark(stream.device_index, stream.stream_id),
            [tensor for work in works for tensor in work.tensors],
        )

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> LateWork:
        return self._collective("gather", source, output)

    all_gather_single = _allgather_base

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], sources: Sequence[torch.Tensor], opts: Any = None
    ) -> LateWork:
        """Gather into one tensor, which is then copied: ProcessGroupNCCL::allgather, newLikeFlat."""
        ((source,), (into,)) = sources, outputs
        whole = source.new_empty((self._size, *source.shape))
        work = self._collective("gather", source, whole)
        _, stream = self._whole()
        with current(stream):
            for rank, tensor in enumerate(into):
                tensor.copy_(whole[rank], non_blocking=True)
        return LateWork(extension().mark(stream.device_index, stream.stream_id), [*work.tensors, *into])

    def scatter(
        self, outputs: Sequence[torch.Tensor], sources: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> LateWork:
        """Send messages in one batch, including the root's own: torch/csrc/cuda/nccl.cpp, scatter."""
        root = opts.rootRank
        batch: list[Message] = [(root, False, outputs[0])]
        if self._rank == root:
            batch = [*((rank, True, part) for rank, part in enumerate(sources[0])), *batch]
        return self._exchange(*self._whole(), range(self._size), batch)

    def gather(
        self, outputs: Sequence[Sequence[torch.Tensor]], sources: Sequence[torch.Tensor], opts: Any = None
    ) -> LateWork:
        """Send messages in one batch, including the root's own: torch/csrc/cuda/nccl.cpp, gather."""
        root = opts.rootRank
        batch: list[Message] = [(root, True, sources[0])]
        if self._rank == root:
            batch += [(rank, False, part) for rank, part in enumerate(outputs[0])]
        return self._exchange(*self._whole(), range(self._size), batch)

    def barrier(self, opts: Any = None) -> LateWork:
        tensor = torch.zeros(1, device=TYPE)
        return self._collective("sum", tensor, tensor)

    def abort(self) -> None:
        """End all operations in progress."""
        raise NotImplementedError

    def shutdown(self) -> None:
        self.abort()


class LateGroup(Group):
    """A group whose ranks are threads of one process."""

    def _make(self, name: str, ranks: Sequence[int]) -> None:
        _born[name].add(self._rank)
        operand = f"a host waits for the communicator {name} of ranks {', '.join(map(str, ranks))} to be made"
        extension().wait_until(lambda: len(_born[name]) == len(ranks), operand)

    def _begin(
        self, name: str, stream: torch.Stream, ranks: Sequence[int], batch: Sequence[Message], label: str
    ) -> Any:
        messages = [
            (f"{name}:{self._channel(peer, sends)}", sends, tensor.data_ptr(), tensor.nbytes)
            for peer, sends, tensor in batch
        ]
        return extension().exchange(stream.device_index, stream.stream_id, messages, label)

    def _begin_collective(
        self, name: str, stream: torch.Stream, kind: str, root: int, numbers: tuple[str, int, int, int]
    ) -> Any:
        stream_numbers = stream.device_index, stream.stream_id
        return extension().collective(
            *stream_numbers, name, self._rank, self._size, kind, root, *numbers, f"{name} {kind}"
        )

    def abort(self) -> None:
        for name in self._streams:
            extension().abort(name)


def join(rank: int, size: int) -> None:
    """Join the world in a rank's own thread, during its turn, and select its device."""
    torch.accelerator.set_device_index(rank)
    dist.init_process_group(TYPE, store=SharedStore(), rank=rank, world_size=size, timeout=timedelta(seconds=60))


@contextlib.contextmanager
def world_of_threads() -> Iterator[None]:
    """Make each thread a rank with its own world in torch.distributed, without communicators."""
    if TYPE.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(TYPE, _make, extended_api=True, devices=[TYPE])
    _born.clear()
    _stored.clear()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    before = dist.distributed_c10d._world
    dist.distributed_c10d._world = multi_threaded_pg.ThreadLocalWorld()  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.distributed_c10d._world = before
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


def _make(options: Any, backend_options: Any) -> LateGroup:
    return LateGroup(
        f"{options.group_id}@{'.'.join(map(str, options.global_ranks_in_group))}",
        options.group_rank,
        options.group_size,
    )
