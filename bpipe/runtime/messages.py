"""What the executor asks of whoever carries messages between stages.

In: messages of a Program, in its order. Out: the tensors that they carry. Knows no schedule and no model.
"""

from __future__ import annotations

from typing import Protocol

from bpipe.runtime.stage import Tensors
from bpipe.schedule.program import Message


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
