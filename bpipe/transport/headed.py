"""Carry micro-batches of differing size by a two-sided transport: in front of each goes how long its storages are.

In: a two-sided transport and the pair's control group. Out: a two-sided transport whose acceptor gives all the room of
a host buffer and need not know what comes into it. Knows no schedule.

    evictor     lengths --control--> payload --transport-->     what is empty has lengths too, and no payload
    acceptor    lengths, then a receive of each into the room   its host waits for the lengths

The host that issues everything else of its rank posts a HOST, too, where the program has it, and waits there until the
evictor's host has come to its EVICT. A thread that posted it once the lengths are there would post it behind what the
host issued meanwhile. In a hardware queue that streams share it could stand behind a wait for a message that the
evictor sends only once this very transfer has passed. `schedule.check.deadlock` judges this wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from bpipe.transport.base import Pending, TwoSided
from bpipe.transport.control import Control, Subject
from bpipe.transport.layout import Sizes, offsets


class _Both:
    """Two transfers that are waited for as one."""

    def __init__(self, *parts: Pending) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()


class Headed:
    """The two-sided transport with lengths in front. An empty micro-batch is put, and got, like any other."""

    one_sided: Literal[False] = False

    def __init__(self, inner: TwoSided, control: Control) -> None:
        self._inner = inner
        self._control = control
        # By host buffer: the parts of its room in which what it holds lies.
        self._held: dict[int, list[torch.Tensor]] = {}

    def announce(self, sizes: Sizes) -> Pending:
        return self._inner.announce(sizes)

    def learn(self) -> dict[int, tuple[int, ...]]:
        return self._inner.learn()

    def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        lengths = self._control.send(Subject.LENGTHS, [tensor.numel() for tensor in tensors])
        return _Both(lengths, self._inner.put(host_buffer, tensors))

    def get(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        return self._inner.get(host_buffer, tensors)

    def host(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        """Wait for lengths, and post their receives. `tensors` is one, all the room there is."""
        (room,) = tensors
        lengths = self._control.receive(Subject.LENGTHS)
        parts = [room.narrow(0, start, nbytes) for start, nbytes in zip(offsets(lengths), lengths, strict=True)]
        self._held[host_buffer] = parts
        return self._inner.host(host_buffer, parts)

    def give_back(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        """Send back what the host buffer holds."""
        return self._inner.give_back(host_buffer, self._held.pop(host_buffer))

    def release(self) -> None:
        self._inner.release()

    def withdraw(self) -> None:
        self._inner.withdraw()

    def abandon(self) -> None:
        self._held.clear()
        self._inner.abandon()
