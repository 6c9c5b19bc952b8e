"""The two-sided transport: `torch.distributed` point-to-point operations, NCCL and gloo by the same calls.

A pair has two process groups for the transfers, one per direction of the data, made eagerly by all ranks in one order
and used once before the first step. A communicator runs its operations in issue order, and both ends issue from one
program, so within a direction they match by order alone. There are no tags, which would hide an order that differs. Two
directions in one communicator would wait for each other.

`Control` carries small messages between the hosts of two ranks, outside the step: sizes, handles, what a probe found. They
pass over gloo on every machine, so no device has to wait, and do carry a tag: they are few, and which of two comes first
depends on how far each rank is.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from bpipe.transport.cuda_runtime import is_capturing
from bpipe.transport.memory import Sizes, offsets

Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


class Subject(enum.IntEnum):
    """Subject of a control message; two ranks' messages about one subject keep their order."""

    FACTS = 1
    SIZES = 2
    MEMORY = 3
    PROBE = 4
    LENGTHS = 5
    # The first message of a sort: over an edge, or for all ranks, by what makes it.
    FIRST = 6
    FIRST_OUTPUT = 7
    FIRST_GRADIENT = 8
    FIRST_SPLIT_GRADIENT = 9
    # Nothing follows.
    END = 10


class Works:
    """The operations of one transfer. `tensors` keeps what they read or write alive until they are waited for."""

    def __init__(self, works: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        self._works = list(works)
        self._tensors = list(tensors)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._tensors = [], []

    def again(self) -> Works:
        """Return works for another waiter, on a device for another stream."""
        return Works(self._works, self._tensors)

    @property
    def completed(self) -> bool:
        """Whether the transfer is over. Gloo does not know before it was waited for."""
        # In a capture nothing is over, and no event may be asked.
        in_capture = bool(self._tensors) and is_capturing(self._tensors[0].device)
        return not in_capture and all(work.is_completed() for work in self._works)


class Control:
    """Messages to and from one partner (a global rank), through a gloo group of the two.

    A wait ends with the group's time-out.
    """

    def __init__(self, partner: int, group: dist.ProcessGroup) -> None:
        self._partner = partner
        self._group = group

    def send(self, about: Subject, value: Any) -> Works:
        """Send a JSON value."""
        body = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        tensors = [torch.tensor([len(body)]), body]
        return Works([dist.isend(tensor, self._partner, self._group, tag=about) for tensor in tensors], tensors)

    def receive(self, about: Subject) -> Any:
        """Return the partner's next message about this. Blocks until it is there."""
        length = torch.zeros(1, dtype=torch.int64)
        self._receive_into(length, about)
        body = torch.empty(int(length), dtype=torch.uint8)
        self._receive_into(body, about)
        return json.loads(bytes(body.tolist()))

    def send_tensors(self, about: Subject, tensors: Sequence[torch.Tensor]) -> Works:
        """Send tensors by way of both hosts, types and shapes in front.

        The host waits until its device has made them.
        """
        header = self.send(
            about, [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
        )
        bodies = [_bytes_of(tensor.detach().cpu().contiguous()) for tensor in tensors if tensor.numel()]
        works = [dist.isend(body, self._partner, self._group, tag=about) for body in bodies]
        return Works([*header._works, *works], [*header._tensors, *bodies])

    def receive_tensors(self, about: Subject) -> tuple[torch.Tensor, ...]:
        """Return the partner's next tensors about this, on the host. Blocks until they are there."""
        shapes = tuple((getattr(torch, dtype), tuple(shape)) for dtype, shape in self.receive(about))
        tensors = empty(shapes, torch.device("cpu"))
        for tensor in tensors:
            if tensor.numel():
                self._receive_into(_bytes_of(tensor), about)
        return tensors

    def _receive_into(self, tensor: torch.Tensor, about: Subject) -> None:
        work = dist.irecv(tensor, self._partner, self._group, tag=about)
        assert work is not None
        work.wait()

    def exchange(self, about: Subject, value: Any) -> Any:
        """Send a value to the partner and return what it sends. Both call this."""
        sent = self.send(about, value)
        received = self.receive(about)
        sent.wait()
        return received

    def destroy(self) -> None:
        """Destroy the group, after the last message on both ranks."""
        dist.destroy_process_group(self._group)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def shapes_of(tensors: Iterable[torch.Tensor]) -> Shapes:
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


def empty(shapes: Shapes, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return new, uninitialized tensors of these shapes."""
    return tuple(torch.empty(shape, dtype=dtype, device=device) for dtype, shape in shapes)


def check_alike(rank: int, message: object, shapes: Shapes, first: Shapes) -> None:
    """Raise ValueError if a message carries other shapes than the first of its sort.

    What a stage makes has the same shape for every micro-batch, so the first message tells the shapes of all others.
    """
    if shapes != first:
        raise ValueError(
            f"rank {rank}: {message} carries {_words(shapes)}, but the first such message carried {_words(first)}: "
            "micro-batches of different sizes are not supported here; pad them to one length"
        )


def _words(shapes: Shapes) -> str:
    return " and ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in shapes) or "nothing"


# NCCL opens at most this many point-to-point operations in one group call; more must be split, on both ends alike.
MAX_BATCHED_OPERATIONS = 512
# Blocks that NCCL may run for a transfer, each on a compute unit that the computation goes without; by default up to 32
# of an H100's 132. NCCL starts two for each NVLink to fill all of them, 36 for 450 GB/s, so one carries some 12 to 25
# GB/s. A pair needs a part of that: the paper's GPT-3 96B asks for 16 GB/s on A100s, three times as much on H100s. A
# power of two, as NCCL rounds up.
MAX_CTAS = 4

# Gathers every rank's part into one tensor. torch 2.14 renamed `all_gather_into_tensor` and warns of the old name.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gathered(value: object, group: Any = None) -> list[Any]:
    """Return the values of all ranks of a group, by default the world, by rank. Collective over the group."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


@dataclass(frozen=True)
class PairGroups:
    """This rank's two groups with its partner (a global rank). What waits in them fails after `timeout_s`."""

    partner: int
    sending: dist.ProcessGroup
    receiving: dist.ProcessGroup
    timeout_s: float | None = None


def new_group(
    ranks: Sequence[int], backend: str, timeout_s: float, name: str, few_units: bool = True
) -> dist.ProcessGroup:
    """Return a group of these ranks, or a constant on ranks outside it.

    Collective over the world: every rank calls it, in the same order.

    Args:
        ranks: Global ranks.
        backend: As `torch.distributed` names it.
        timeout_s: Seconds after which what waits in the group fails.
        name: For logs.
        few_units: Whether NCCL leaves the computation most compute units. False for messages that a computation waits
            for.
    """
    timeout = timedelta(seconds=timeout_s)
    options = nccl_options(timeout, few_units) if backend == "nccl" else None
    group = dist.new_group(
        list(ranks), timeout=timeout, backend=backend, pg_options=options, group_desc=f"BPIPE_{name}"
    )
    return cast(dist.ProcessGroup, group)


def nccl_options(timeout: timedelta, few_units: bool = True) -> Any:
    """Return NCCL's options: high priority, and for transfers few compute units.

    Messages between stages are small and a computation waits for them, so NCCL chooses their units. For messages this
    was never run on GPUs.
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    # Otherwise torch complains that it differs from the group's.
    options._timeout = timeout
    # The few blocks of a transfer must not queue behind those of a whole layer.
    options.is_high_priority_stream = True
    if few_units:
        options.config.max_ctas = MAX_CTAS
    return options


def destroy_groups(groups: PairGroups) -> None:
    """Destroy a pair's groups. Both ranks call it, with nothing under way in them."""
    upward_first = dist.get_rank() < groups.partner
    for group in (groups.sending, groups.receiving) if upward_first else (groups.receiving, groups.sending):
        dist.destroy_process_group(group)


def part(control: Control, groups: Iterable[PairGroups]) -> None:
    """Destroy the groups that two ranks have together, once both have come here.

    Both ranks call it when their devices are idle: destroying a communicator ends what is still running in it. Raises
    what the control group raises if the partner does not come within the time-out.
    """
    control.exchange(Subject.END, None)
    for pair in groups:
        destroy_groups(pair)
    control.destroy()


def abort_groups(groups: PairGroups) -> None:
    """Abort a pair's groups and whatever is under way in them, so that what waits on the device goes on."""
    for group in (groups.sending, groups.receiving):
        group.abort()


def pair_groups(
    low: int, high: int, backend: str, timeout_s: float, purpose: str = "", few_units: bool = True
) -> PairGroups | None:
    """Return the pair's groups, one per direction; None on any other rank.

    Collective over the world; arguments as of `new_group`.
    """
    names = (f"{purpose}{direction}_{low}_{high}" for direction in ("UP", "DOWN"))
    upward, downward = (new_group([low, high], backend, timeout_s, name, few_units) for name in names)
    rank = dist.get_rank()
    if rank not in (low, high):
        return None
    partner, sending, receiving = (high, upward, downward) if rank == low else (low, downward, upward)
    return PairGroups(partner, sending, receiving, timeout_s)


def pair_control(low: int, high: int, timeout_s: float, purpose: str = "") -> Control | None:
    """Return this rank's end of the pair's control group, None on any other rank. Collective over the world."""
    group = new_group([low, high], "gloo", timeout_s, f"{purpose}CONTROL_{low}_{high}")
    rank = dist.get_rank()
    return Control(high if rank == low else low, group) if rank in (low, high) else None


def try_out(groups: PairGroups, device: torch.device) -> None:
    """Exchange one byte in each direction, so that a network that does not connect fails here and not in the middle
    of a step."""
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    send, receive = (dist.isend, byte, groups.sending), (dist.irecv, torch.empty_like(byte), groups.receiving)
    for operation, tensor, group in (send, receive) if dist.get_rank() < groups.partner else (receive, send):
        batched(operation, [tensor], groups.partner, group).wait()


def batched(operation: Any, tensors: Sequence[torch.Tensor], partner: int, group: dist.ProcessGroup) -> Works:
    """Start one operation per tensor, in order, in as few group calls as NCCL allows."""
    works: list[Any] = []
    for start in range(0, len(tensors), MAX_BATCHED_OPERATIONS):
        works.extend(issue(operation, tensors[start : start + MAX_BATCHED_OPERATIONS], partner, group))
    return Works(works, tensors)


def issue(operation: Any, tensors: Sequence[torch.Tensor], partner: int, group: dist.ProcessGroup) -> list[Any]:
    """Start one operation per tensor in one group call, as `batch_isend_irecv` does.

    Torch's function makes and checks an object for each tensor, which takes 4.4 microseconds of the main thread instead
    of 1.4.
    """
    start = group.send if operation is dist.isend else group.recv
    other = dist.get_group_rank(group, partner)
    return in_one_call(group, tensors, lambda tensor: start([tensor], other, 0))


def in_one_call(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], start: Callable[[torch.Tensor], Any]
) -> list[Any]:
    """Start an operation for each tensor: one kernel, if the backend has kernels.

    Of several kernels the second waits in a hardware queue until the first is over, and so does whatever was issued
    after it. `_coalescing_manager` makes one call of several operations, as in Megatron's and torch's sharded data
    parallelism.
    """
    device = tensors[0].device
    if not getattr(group._get_backend(device), "supports_coalescing", False):
        return [start(tensor) for tensor in tensors]
    # Not public, so not typed.
    torch_distributed: Any = dist
    with torch_distributed._coalescing_manager(group, device, async_ops=True) as call:
        for tensor in tensors:
            start(tensor)
    return list(call.works)


@contextmanager
def name_timeout(timeout_s: float | None) -> Iterator[None]:
    """Add the time-out, if it is known, to an error of a group. Raises ConnectionError from it."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if timeout_s is None:
            raise
        raise ConnectionError(f"the time-out is {timeout_s:g} s, --bpipe-timeout: {error}") from error


class Distributed:
    """The two-sided transport: what one end puts, the other must host. Both know how large it is."""

    one_sided: Literal[False] = False

    def __init__(self, control: Control, groups: PairGroups) -> None:
        self._control = control
        self._groups = groups

    def announce(self, sizes: Sizes) -> Works:
        """Announce the lengths of a micro-batch's tensors, on the evictor, once for each stage before its first put."""
        return self._control.send(Subject.SIZES, [[stage, list(lengths)] for stage, lengths in sizes.items()])

    def learn(self) -> dict[int, tuple[int, ...]]:
        """Return the evictor's next announcement, on the acceptor. Blocks until it is there."""
        return {stage: tuple(lengths) for stage, lengths in self._control.receive(Subject.SIZES)}

    def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Works:
        """Send flat uint8 tensors into the host buffer. They must not change or be freed before the wait."""
        return self._send(tensors)

    def get(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Works:
        """Receive the host buffer into the tensors. They must not be read before the wait."""
        return self._receive(tensors)

    def host(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Works:
        """Receive what the partner puts into this host buffer, whose memory is `tensors`; on the acceptor."""
        return self._receive(tensors)

    def give_back(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Works:
        """Let the partner get this host buffer, on the acceptor. It must not be refilled before the wait."""
        return self._send(tensors)

    def release(self) -> None:
        """Do nothing: the host buffers are the acceptor's."""

    withdraw = abandon = release

    def _send(self, tensors: Sequence[torch.Tensor]) -> Works:
        return batched(dist.isend, tensors, self._groups.partner, self._groups.sending)

    def _receive(self, tensors: Sequence[torch.Tensor]) -> Works:
        return batched(dist.irecv, tensors, self._groups.partner, self._groups.receiving)


class Headed(Distributed):
    """The two-sided transport for micro-batches of differing size: the lengths of its storages go in front of each.

        evictor     lengths --control--> payload --transport-->     what is empty has lengths too, and no payload
        acceptor    lengths, then a receive of each into the room   its host waits for the lengths

    The thread that issues everything else of its rank posts a HOST, too, when the program comes to it, and waits there
    until the evictor has come to its EVICT. Another thread that posted it once the lengths are there would post it after
    what the first one issued in the meantime. In a hardware queue that streams share, it could then wait for a message that
    the evictor sends only once this very transfer has passed. `schedule.check.deadlock` takes this wait into account.
    """

    def __init__(self, control: Control, groups: PairGroups) -> None:
        super().__init__(control, groups)
        # By host buffer: the parts of its room that hold a micro-batch.
        self._parts: dict[int, list[torch.Tensor]] = {}

    def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Works:
        lengths = self._control.send(Subject.LENGTHS, [tensor.numel() for tensor in tensors])
        return Works([lengths, self._send(tensors)], ())

    def host(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Works:
        """Wait for the lengths, and post their receives. `tensors` is one, all the room there is."""
        (room,) = tensors
        lengths = self._control.receive(Subject.LENGTHS)
        parts = [room.narrow(0, start, nbytes) for start, nbytes in zip(offsets(lengths), lengths, strict=True)]
        self._parts[host_buffer] = parts
        return self._receive(parts)

    def give_back(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Works:
        """Send back what the host buffer holds."""
        return self._send(self._parts.pop(host_buffer))

    def abandon(self) -> None:
        self._parts.clear()
