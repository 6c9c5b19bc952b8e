"""Ranges of torch's profiler for what a rank issues, so that any profiler shows the schedule.

`torch.profiler` records ranges such as `bpipe forward stage 0 micro-batch 3`, and `torch.autograd.profiler.emit_nvtx`
passes them on to NVTX (Megatron's `--profile` enters one of the two). Without a profiler there are no ranges, because
each would take about 30 us.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch.profiler import record_function

from bpipe.schedule.action import SHARDS, Action, Kind

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "dgrad",
    Kind.BACKWARD_WEIGHT: "wgrad",
    Kind.SHARD_FORWARD: "output shard forward",
    Kind.SHARD_BACKWARD: "output shard backward",
    Kind.INPUT_FORWARD: "embedding shard forward",
    Kind.INPUT_BACKWARD: "embedding shard backward",
    Kind.EVICT: "evict",
    Kind.HOST: "host",
    Kind.RETURN: "return",
    Kind.LOAD: "load",
}


def name_of(action: Action, slices: int = 1) -> str:
    """Return the name of an action's range. With several `slices` the action's number is that of a slice."""
    place = "rank" if action.kind in SHARDS else "stage"
    microbatch, part = divmod(action.microbatch, slices)
    of_slice = f" slice {part}" if slices > 1 else ""
    return f"bpipe {_NAMES[action.kind]} {place} {action.stage} micro-batch {microbatch}{of_slice}"


class Ranges:
    """The ranges of one rank, of which one is open at a time."""

    def __init__(self, slices: int) -> None:
        self._slices = slices
        self._open: record_function | None = None

    @contextlib.contextmanager
    def of(self, action: Action) -> Iterator[None]:
        """Open a range around what is issued inside."""
        self.begin(action)
        try:
            yield
        finally:
            self.end()

    def begin(self, action: Action, beside: Action | None = None) -> None:
        """Open a range for an action and what runs together with it."""
        if not torch._C._autograd._profiler_enabled():
            return
        names = [name_of(issued, self._slices) for issued in (action, beside) if issued is not None]
        self._open = record_function(" with ".join(names))
        self._open.__enter__()

    def end(self) -> None:
        """Close the open range, if there is one."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
