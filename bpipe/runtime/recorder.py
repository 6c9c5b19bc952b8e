"""Record what an engine did in one iteration: every action with its times, bytes and waits; and ranges for profilers.

A computation is marked when it begins and ends. A transfer begins when it is issued and has ended at the latest when
somebody waited for it; a one-sided copy knows its real times. `wait_s` is how long a wait delayed the computation,
`live_bytes` the most that was held during a computation, and `left_bytes` what was held at its end.

`torch.profiler` records ranges such as `bpipe forward stage 0 micro-batch 3`, and `torch.autograd.profiler.emit_nvtx` passes
them on to NVTX (Megatron's `--profile` enters one of the two). Without a profiler there are no ranges, because each would
take about 30 us.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.profiler import record_function

from bpipe.record.format import Row
from bpipe.schedule.action import SHARDS, TRANSFER, Action, Key, Kind
from bpipe.transport.streams import Clock, Mark, Pending, span_s


@dataclass
class _Noted:
    action: Action
    start: Mark
    host_buffer: int | None = None
    end: Mark | None = None
    waited: tuple[Mark, Mark] | None = None
    pending: Pending | None = None
    live_bytes: int | None = None
    left_bytes: int | None = None


class Recorder:
    """The rows of the iteration under way."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begin: Mark | None = None
        self._rows: list[_Noted] = []
        self._computing: list[_Noted] = []
        self._transfers: dict[Action, _Noted] = {}

    def begin(self) -> None:
        """Begin the record of an iteration."""
        self._rows, self._computing, self._transfers = [], [], {}
        self._begin = self._clock.mark()

    def started(self, action: Action, host_buffer: int | None = None, live_bytes: int | None = None) -> None:
        """Note that a computation begins, or that a transfer has just been issued."""
        row = _Noted(action, self._clock.mark(), host_buffer, live_bytes=live_bytes)
        self._rows.append(row)
        if host_buffer is not None:
            self._transfers[action] = row
        else:
            self._computing.append(row)

    def computed(self, live_bytes: int | None, most_bytes: int | None = None) -> None:
        """Note that the computation that began last has ended, or both that began together.

        `most_bytes`: the most that was held during them, if that is known.
        """
        for row in self._computing:
            row.end = self._clock.mark()
            if live_bytes is not None:
                row.live_bytes = max(live_bytes, row.live_bytes or 0, most_bytes or 0)
                row.left_bytes = live_bytes
        self._computing.clear()

    def mark(self) -> Mark:
        """Return a mark of the present time."""
        return self._clock.mark()

    def waited(self, action: Action, since: Mark, pending: Pending) -> None:
        """Note that the transfer was waited for from `since` until now, or only its end if no computation waited."""
        row = self._transfers.get(action)
        if row is not None:
            row.end = self._clock.mark()
            row.waited = None if self._clock.beside() else (since, row.end)
            row.pending = pending

    def rows(
        self,
        saved_bytes: Mapping[int, int],
        moved_bytes: Mapping[int, int],
        saved_each: Mapping[Key, int] | None = None,
        moved_each: Mapping[Key, int] | None = None,
    ) -> tuple[tuple[Row, ...], float]:
        """Return all rows, by their start, and the seconds of the iteration until now. Waits for the device.

        Bytes of forwards and of transfers are by stage, and if they differ, by stage and micro-batch.
        """
        assert self._begin is not None
        elapsed_s = self._clock.mark().since(self._begin)
        rows = []
        for row in self._rows:
            action, nbytes = row.action, None
            if action.kind is Kind.FORWARD:
                nbytes = (saved_each or {}).get(action.key, saved_bytes.get(action.stage))
            elif action.kind in TRANSFER:
                nbytes = (moved_each or {}).get(action.key, moved_bytes.get(action.stage))
            # A transfer of a stage of which nothing can move did not take place.
            if row.host_buffer is None or nbytes != 0:
                rows.append(self._row(row, self._begin, nbytes))
        return tuple(sorted(rows, key=lambda row: row.start_s)), elapsed_s

    def _row(self, row: _Noted, base: Mark, nbytes: int | None) -> Row:
        assert row.end is not None, f"{row.action} was never waited for"
        start_s, end_s = row.start.since(base), row.end.since(base)
        exact = span_s(row.pending, base) if row.pending is not None else None
        if exact is not None:
            start_s, end_s = exact
        wait_s = row.waited[1].since(row.waited[0]) if row.waited else 0.0
        return Row(
            row.action,
            start_s=round(start_s, 9),
            end_s=round(end_s, 9),
            wait_s=round(wait_s, 9),
            host_start_s=round(row.start.host_s - base.host_s, 9),
            host_end_s=round(row.end.host_s - base.host_s, 9),
            bytes=nbytes,
            slot=row.host_buffer,
            live_bytes=row.live_bytes,
            left_bytes=row.left_bytes,
        )


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
