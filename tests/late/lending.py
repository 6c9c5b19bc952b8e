"""A rank that cannot make the memory it is to lend, on late devices: its partner says why at once.

In: a draw. Out: what the partner did not say.
"""

from __future__ import annotations

from unittest.mock import patch

from bpipe.transport.memory import DeviceMemory
from tests.late.cases import SCHEDULES
from tests.late.devices import Draw
from tests.late.pipeline import LatePipeline

SAID = "the partner could not allocate the host buffers that it lends"


def fails_to_lend(draw: Draw) -> str:
    """Return what was said instead, or nothing."""

    def make(self: DeviceMemory, nbytes: int) -> None:
        raise MemoryError(f"no {nbytes} bytes")

    pipeline = LatePipeline(SCHEDULES["1f1b"](), "peer")
    with patch.object(DeviceMemory, "make", make):
        try:
            pipeline.run(draw, 1)
        except Exception as error:
            said = str(error)
            return "" if SAID in said else said
    return "nobody failed"
