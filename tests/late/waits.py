"""For each wait of the protocol, how to remove it, and cases (a schedule and a transport) in which it matters.

The numbers are those of `bpipe/runtime/evictor.py`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from bpipe.runtime.evictor import ActivationsState
from bpipe.transport import edges
from bpipe.transport.distributed import Works, batched
from tests.gpu.waits import without_compute, without_the_end_of, without_the_last_copy, without_the_last_transfer


class _Unwaited(Works):
    def wait(self) -> None:
        """Do not wait; the work continues."""


def _unwaited(operation: Any, tensors: Any, *rest: Any) -> Works:
    works = batched(operation, tensors, *rest)
    if not tensors[0].is_floating_point():
        # The host reads the message with the shapes at once.
        return works
    return _Unwaited(works._works, works._tensors)


@dataclass(frozen=True)
class Wait:
    """A wait, with the `schedule` and `kind` of a case that needs it."""

    taken_out: Callable[[], AbstractContextManager[Any]]
    schedule: str
    kind: str


def _cases(taken_out: Callable[[], AbstractContextManager[Any]], *cases: tuple[str, str]) -> list[Wait]:
    return [Wait(taken_out, *case) for case in cases]


ONE_SIDED = (("1f1b of 6", "peer"), ("1f1b of 6", "host"))
BOTH = (*ONE_SIDED, ("1f1b of 6", "two-sided"))
WAITS: dict[str, list[Wait]] = {
    "[1] a put behind the forward": _cases(lambda: without_compute("outbound"), *BOTH),
    "[3] memory freed behind the put": _cases(lambda: without_the_end_of(ActivationsState.AWAY), *BOTH),
    "[5] a get behind what compute did with its memory": _cases(lambda: without_compute("inbound"), *BOTH),
    "[7] a backward behind its get": _cases(lambda: without_the_end_of(ActivationsState.HERE), *BOTH),
    "[8] a host buffer used again behind its last copy": _cases(
        without_the_last_copy, ("1f1b of 8", "peer"), ("1f1b of 8", "host")
    ),
    "[8] a host buffer used again behind its last transfer": _cases(
        without_the_last_transfer, ("1f1b of 6", "two-sided")
    ),
    "a computation behind its message": _cases(lambda: patch.object(edges, "batched", _unwaited), ("1f1b", "host")),
}
