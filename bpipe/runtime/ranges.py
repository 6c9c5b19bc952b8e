"""Name what a rank issues as ranges of torch's profiler, so that any profiler shows the schedule.

In: computations and transfers as they begin and end. Out: ranges such as `bpipe forward stage 0 micro-batch 3`, which
`torch.profiler` records and `torch.autograd.profiler.emit_nvtx` passes on to NVTX (Megatron's `--profile` enters one of
the two). Knows no schedule and no device. Where no profiler runs there are no ranges, for each would cost about 30 us.
"""

from __future__ import annotations

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
    """Return the name of an action's range; of a micro-batch in several slices the action's number is a slice's."""
    place = "rank" if action.kind in SHARDS else "stage"
    microbatch, part = divmod(action.microbatch, slices)
    of_slice = f" slice {part}" if slices > 1 else ""
    return f"bpipe {_NAMES[action.kind]} {place} {action.stage} micro-batch {microbatch}{of_slice}"


class Ranges:
    """The ranges of one rank: transfers, and computations, whose begin and end are told apart."""

    def __init__(self, slices: int) -> None:
        self._slices = slices
        self._open: record_function | None = None

    @contextlib.contextmanager
    def of(self, action: Action) -> Iterator[None]:
        """Name what is issued inside."""
        self.begin(action)
        try:
            yield
        finally:
            self.end()

    def begin(self, action: Action, beside: Action | None = None) -> None:
        """Name what is issued from here to `end`, with what runs beside it; ranges do not stand within each other."""
        if not torch._C._autograd._profiler_enabled():
            return
        names = [name_of(each, self._slices) for each in (action, beside) if each is not None]
        self._open = record_function(" with ".join(names))
        self._open.__enter__()

    def end(self) -> None:
        """End the range that is open, if one is: an error may have come before it began."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
