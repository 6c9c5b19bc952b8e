"""The messages of a rank without neighbours."""

from collections.abc import Callable

from bpipe.runtime.stage import Tensors
from bpipe.schedule.program import Message


class Alone:
    """A rank by itself: what it sends is dropped, and it receives `drawn(message)`, by default nothing."""

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
