"""Send small messages between the two ranks of a pair, outside the step: sizes, handles, what a probe found.

In: JSON values, or tensors, and what they are about. Out: the same on the other rank. Over gloo on every machine, so
that no device has to wait. Unlike the transfers, messages carry a tag: they are few, and which of two comes first
depends on how far each rank is.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bpipe.transport.shapes import empty


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


class SentMessage:
    """A message under way; keeps what is being sent alive."""

    def __init__(self, works: list[Any], tensors: list[torch.Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._tensors = [], []


class Control:
    """Messages to and from one partner (a global rank), through a gloo group of the two.

    A wait ends with the group's time-out.
    """

    def __init__(self, partner: int, group: dist.ProcessGroup) -> None:
        self._partner = partner
        self._group = group

    def send(self, about: Subject, value: Any) -> SentMessage:
        body = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        tensors = [torch.tensor([len(body)]), body]
        return SentMessage([dist.isend(tensor, self._partner, self._group, tag=about) for tensor in tensors], tensors)

    def receive(self, about: Subject) -> Any:
        """Return the partner's next message about this. Blocks until it is there."""
        length = torch.zeros(1, dtype=torch.int64)
        self._take(length, about)
        body = torch.empty(int(length), dtype=torch.uint8)
        self._take(body, about)
        return json.loads(bytes(body.tolist()))

    def send_tensors(self, about: Subject, tensors: Sequence[torch.Tensor]) -> SentMessage:
        """Send tensors by way of both hosts, types and shapes in front.

        The host waits until its device has made them.
        """
        told = self.send(about, [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors])
        bodies = [_bytes_of(tensor.detach().cpu().contiguous()) for tensor in tensors if tensor.numel()]
        works = [dist.isend(body, self._partner, self._group, tag=about) for body in bodies]
        return SentMessage([*told._works, *works], [*told._tensors, *bodies])

    def receive_tensors(self, about: Subject) -> tuple[torch.Tensor, ...]:
        """Return the partner's next tensors about this, on the host. Blocks until they are there."""
        shapes = tuple((getattr(torch, dtype), tuple(shape)) for dtype, shape in self.receive(about))
        tensors = empty(shapes, torch.device("cpu"))
        for tensor in tensors:
            if tensor.numel():
                self._take(_bytes_of(tensor), about)
        return tensors

    def _take(self, tensor: torch.Tensor, about: Subject) -> None:
        work = dist.irecv(tensor, self._partner, self._group, tag=about)
        assert work is not None
        work.wait()

    def exchange(self, about: Subject, value: Any) -> Any:
        """Tell the partner and hear what it tells; both call this."""
        sent = self.send(about, value)
        heard = self.receive(about)
        sent.wait()
        return heard

    def destroy(self) -> None:
        """Destroy the group, after the last message on both ranks."""
        dist.destroy_process_group(self._group)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
