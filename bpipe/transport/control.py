"""Small messages between the hosts of two ranks, outside the step: sizes, handles, what a probe found.

They pass over gloo on every machine, so no device has to wait. Unlike transfers they carry a tag: they are few, and
which of two comes first depends on how far each rank is.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bpipe.transport.cuda_runtime import is_capturing

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
