"""The interface between the engine and a transport.

A **two-sided** transport carries bytes between this rank and its partner, and both take part: what the evictor puts,
the acceptor must host; what the evictor gets, the acceptor must give back. With a **one-sided** transport the evictor
reaches into the host buffers by itself; a partner that lends their memory does so once, and HOST and RETURN in its
program move nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from bpipe.transport.layout import BufferLayout, Sizes


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Order what this rank does next after the transfer's end (on a GPU the current stream waits, on a CPU the
        caller).

        Raises what the transport raises if it failed or timed out.
        """


class Done:
    """A transfer that has already ended."""

    def wait(self) -> None:
        return None


class Evicting(Protocol):
    """The evictor's half. Tensors are contiguous and of uint8; host buffers have the acceptor's numbers.

    Neither end asks for a transfer of a stage whose list of sizes is empty.
    """

    def announce(self, sizes: Sizes) -> Pending:
        """Announce the lengths of a micro-batch's tensors, once for each stage before its first put."""

    def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        """Copy the tensors into the host buffer. They must not change or be freed before the wait."""

    def get(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        """Copy the host buffer into the tensors. They must not be read before the wait."""

    def learn(self) -> dict[int, tuple[int, ...]]:
        """Return the evictor's next announcement, on an acceptor that owns the host buffers. Blocks until it is there."""

    def release(self) -> None:
        """Give the host buffers back because another program takes over. Both ends call it, with nothing under way."""

    def withdraw(self) -> None:
        """Let go after a trial that failed. Both ends call it, the evictor first, and each knows when the other has."""

    def abandon(self) -> None:
        """Drop every reference after the run, or after a failed transfer.

        It does not wait for the partner or the device, and frees nothing that either may still reach.
        """


class TwoSided(Evicting, Protocol):
    """Both ends take part."""

    one_sided: Literal[False]

    def host(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        """Receive what the partner puts into this host buffer, whose memory is `tensors`; on the acceptor."""

    def give_back(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        """Let the partner get this host buffer, on the acceptor. It must not be refilled before the wait."""


class OneSided(Evicting, Protocol):
    """The evictor reaches into the host buffers by itself."""

    one_sided: Literal[True]

    @property
    def lends(self) -> bool:
        """Whether the host buffers are the acceptor's memory. If they are not, the acceptor does nothing."""

    def reach(self, layout: BufferLayout) -> None:
        """Set the layout of the host buffers, on the evictor and before anything else.

        It grows before the put that needs it to.
        """

    def grow(self) -> None:
        """Follow the layout's growth, on the evictor. An acceptor lends the same whether anything is put or not."""

    def lend(self, nbytes: int) -> None:
        """Make the next piece of the layout, on an acceptor that lends.

        Does not wait for the partner, unless it fails.
        """


Transport = TwoSided | OneSided
