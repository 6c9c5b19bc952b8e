"""What the executor asks of whoever carries messages between stages, and the messages of a rank whose neighbours are
not there.

In: messages of a Program, in its order. Out: the tensors that they carry. Knows no schedule and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from bpipe.ir.program import Message
from bpipe.runtime.stage import Tensors


class Messages(Protocol):
    """One rank's messages. None of the calls waits for a neighbour, except `wait` for a message that comes from one."""

    def post(self, message: Message) -> None:
        """Be ready to receive it. What comes from one rank is posted in the order in which that rank sends it."""

    def send(self, message: Message, tensors: Tensors) -> None:
        """Let it go. The tensors must not change until it was waited for, but whoever made them may let go of them."""

    def wait(self, message: Message) -> Tensors:
        """Wait for a message and return what came.

        Of one that this rank sent it returns nothing, and its tensors are free.
        """


class Alone:
    """A rank by itself: what it sends is dropped, what it would receive is `drawn(message)`, by default nothing."""

    def __init__(self, drawn: Callable[[Message], Tensors] = lambda message: ()) -> None:
        self._drawn = drawn
        self._posted: set[int] = set()

    def post(self, message: Message) -> None:
        self._posted.add(message.value)

    def send(self, message: Message, tensors: Tensors) -> None:
        """Do nothing: there is no other rank."""

    def wait(self, message: Message) -> Tensors:
        if message.value not in self._posted:
            return ()
        self._posted.remove(message.value)
        return self._drawn(message)
