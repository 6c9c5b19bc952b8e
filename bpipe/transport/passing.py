"""Pass on what comes from a partner into this rank's node's memory, and send it back from there.

In: the two-sided transport with the partner, this rank's own memory, and a lane for each direction. Out: a two-sided transport whose
acceptor keeps nothing on its device but what is under way. Knows no schedule.

    HOST    inbound lane     receive into the tensors, copy them into the slot
    ahead   outbound lane    copy the slot into other tensors
    RETURN  outbound lane    send these

A lane does one thing after another, so of each direction the same tensors serve all that passes: they are taken again when what was in
them has gone on. What fails is not passed on: whatever is behind it in the same slot fails with it.

Both ends of the pair take part in this. Of a one-sided transfer the rank in between would not hear when it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from bpipe.transport.base import Pending, Sizes, TwoSided
from bpipe.transport.lanes import CopyLane
from bpipe.transport.layout import BufferLayout
from bpipe.transport.one_sided import Reaching


class Passing:
    """The two-sided transport whose acceptor's host buffers are slots in its node's memory."""

    one_sided: Literal[False] = False

    def __init__(self, inner: TwoSided, memory: Reaching, inbound: CopyLane, outbound: CopyLane) -> None:
        """`memory` copies into slots by the inbound lane, and out of them by the other."""
        self._inner = inner
        self._memory = memory
        self._inbound = inbound
        self._outbound = outbound
        # By slot: what has been asked back of it, and not been sent yet.
        self._ahead: dict[int, Pending] = {}

    def reach(self, layout: BufferLayout) -> None:
        """Acceptor, once before all: where the slots lie. It grows before the HOST that needs it to."""
        self._memory.reach(layout)

    def announce(self, sizes: Sizes) -> Pending:
        return self._inner.announce(sizes)

    def learn(self) -> dict[int, tuple[int, ...]]:
        return self._inner.learn()

    def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        return self._inner.put(host_buffer, tensors)

    def get(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        return self._inner.get(host_buffer, tensors)

    def host(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        """Acceptor: take what the partner puts, into `tensors`, and pass it on into the slot. Over when it has come."""
        # Memory first: what nobody has room for is not asked for.
        self._memory.grow()
        arrived = self._inbound.run(lambda: self._inner.host(host_buffer, tensors).wait())
        self._memory.put(host_buffer, tensors, after=[arrived])
        return arrived

    def bring(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Acceptor: copy the slot into `tensors`, ahead of its `give_back`. One after the other: each after the `give_back` before it."""
        self._ahead[host_buffer] = self._memory.get(host_buffer, tensors)

    def give_back(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        """Acceptor: let the partner get what was brought into `tensors`."""
        return self._outbound.run(lambda: self._inner.give_back(host_buffer, tensors).wait(), after=[self._ahead.pop(host_buffer)])

    def release(self) -> None:
        self._inner.release()
        self._memory.release()

    def withdraw(self) -> None:
        self._inner.withdraw()
        self._memory.withdraw()

    def abandon(self) -> None:
        self._ahead.clear()
        self._inner.abandon()
        self._memory.abandon()
