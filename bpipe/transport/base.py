"""A transfer under way.

A **two-sided** transport (`distributed`) carries bytes between this rank and its partner, and both take part: what the
evictor puts, the acceptor must host; what the evictor gets, the acceptor must give back. With a **one-sided** transport
(`one_sided`) the evictor reaches into the host buffers by itself; a partner that lends their memory does so once, and
HOST and RETURN in its program move nothing. Neither end asks for a transfer of a stage whose list of sizes is empty.
"""

from typing import Protocol


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
