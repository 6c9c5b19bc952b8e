"""Each wait of the protocol, and the same code without it.

In: nothing. Out: by name, how to take a wait out, and where it matters.

The numbers are those of `bpipe/runtime/evictor.py`. A case is a schedule and a kind of transport in which the wait has
something to hold apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from bpipe.runtime import streams
from bpipe.runtime.acceptor import ReceivingAcceptor
from bpipe.runtime.evictor import ActivationsState
from bpipe.runtime.streams import StreamLane, Streams
from bpipe.transport import edges
from bpipe.transport.distributed import Works, batched
from tests.unit.runtime.fake_device import without_the_end_of

Breaks = Callable[[pytest.MonkeyPatch], None]


def _without_compute(direction: str) -> Breaks:
    @contextlib.contextmanager
    def only_the_stream(self: Any) -> Iterator[None]:
        with streams.current(getattr(self, f"_{direction}")):
            yield

    return lambda patch: patch.setattr(Streams, direction, only_the_stream)


def _without_the_last_in_the_buffer(patch: pytest.MonkeyPatch) -> None:
    run = StreamLane.run
    patch.setattr(StreamLane, "run", lambda self, job, after=(): run(self, job))


class _Unwaited(Works):
    def wait(self) -> None:
        """What is under way goes on."""


def _unwaited(operation: Any, tensors: Any, *rest: Any) -> Works:
    works = batched(operation, tensors, *rest)
    if not tensors[0].is_floating_point():
        # What tells the shapes is read by the host at once.
        return works
    return _Unwaited(works._works, works._tensors)


@dataclass(frozen=True)
class Wait:
    """`schedule` and `kind`: a case in which it is needed."""

    take_out: Breaks
    schedule: str
    kind: str


def _where(take_out: Breaks, *cases: tuple[str, str]) -> list[Wait]:
    return [Wait(take_out, *case) for case in cases]


ONE_SIDED = (("1f1b of 6", "peer"), ("1f1b of 6", "host"))
BOTH = (*ONE_SIDED, ("1f1b of 6", "two-sided"))
WAITS: dict[str, list[Wait]] = {
    "[1] a put behind the forward": _where(_without_compute("outbound"), *BOTH),
    "[3] memory freed behind the put": _where(lambda patch: without_the_end_of(ActivationsState.AWAY, patch), *BOTH),
    "[5] a get behind what compute did with its memory": _where(_without_compute("inbound"), *BOTH),
    "[7] a backward behind its get": _where(lambda patch: without_the_end_of(ActivationsState.HERE, patch), *BOTH),
    "[8] a host buffer used again behind its last copy": _where(
        _without_the_last_in_the_buffer, ("1f1b of 8", "peer"), ("1f1b of 8", "host")
    ),
    "[8] a host buffer used again behind its last transfer": _where(
        lambda patch: patch.setattr(ReceivingAcceptor, "_settle", lambda self, buffer: None), ("1f1b of 6", "two-sided")
    ),
    "a computation behind its message": _where(
        lambda patch: patch.setattr(edges, "batched", _unwaited), ("1f1b", "host")
    ),
}
