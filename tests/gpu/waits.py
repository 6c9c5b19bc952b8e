"""Each wait of the protocol, and context managers that remove it, by its number in `bpipe/runtime/evictor.py`."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from bpipe.runtime.evictor import Activations, ActivationsState, Evictor
from bpipe.runtime.partners import ReceivingAcceptor
from bpipe.transport.streams import Done, Job, Pending, StreamLane, Streams, current


def without_compute(direction: str) -> AbstractContextManager[Any]:
    """Enter a side stream without waiting for compute: [1] `outbound`, [5] `inbound`."""

    @contextlib.contextmanager
    def only_the_stream(self: Streams) -> Iterator[None]:
        with current(getattr(self, f"_{direction}")):
            yield

    return patch.object(Streams, direction, only_the_stream)


def without_the_end_of(state: ActivationsState) -> AbstractContextManager[Any]:
    """Do not wait for the transfer that leads to this state: [3] `AWAY`, [7] `HERE`."""
    finish = Evictor._finish

    def unwaited(self: Evictor, activations: Activations, wanted: ActivationsState) -> None:
        if wanted is state:
            activations.pending = Done()
        finish(self, activations, wanted)

    return patch.object(Evictor, "_finish", unwaited)


def without_the_last_copy() -> AbstractContextManager[Any]:
    """[8] Let a copy not wait for the last one of its host buffer."""
    run = StreamLane.run

    def unordered(self: StreamLane, job: Job, after: Sequence[Pending] = ()) -> Pending:
        return run(self, job)

    return patch.object(StreamLane, "run", unordered)


def without_the_last_transfer() -> AbstractContextManager[Any]:
    """[8] Let a transfer not wait for the last one of its host buffer."""
    return patch.object(ReceivingAcceptor, "_settle", lambda self, buffer: None)


@dataclass(frozen=True)
class Wait:
    """One wait of the protocol. `late_copies`: whether late copies, instead of late forwards, reveal its absence."""

    number: str
    what: str
    taken_out: Callable[[], AbstractContextManager[Any]]
    late_copies: bool


# The waits that a single stage has.
WAITS = (
    Wait("[1]", "a put does not wait for the forward", lambda: without_compute("outbound"), False),
    Wait("[3]", "memory is freed before the put has ended", lambda: without_the_end_of(ActivationsState.AWAY), True),
    Wait("[5]", "a get does not wait for compute", lambda: without_compute("inbound"), False),
    Wait("[7]", "a backward does not wait for the get", lambda: without_the_end_of(ActivationsState.HERE), True),
)
