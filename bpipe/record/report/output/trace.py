"""Write a recorded run as a Chrome trace.

In: a `Measured`. Out: JSON text for ui.perfetto.dev, all iterations shown after each other.

Device times; where the host's differ (on a GPU the host runs ahead), its own beside them. Knows no prediction.
"""

from __future__ import annotations

from bpipe.record.format import Row
from bpipe.record.report.selection import Lane, Measured, Timeline, lanes_of
from bpipe.simulate.trace import LOOP, NAMES, Slice, Span, Track, write_tracks


def write_trace(measured: Measured) -> str:
    """Write a trace with a process for each rank; unknown ranks are numbered after all others."""
    first = min(_begin_s(timeline) for timeline in measured.shown)
    unknown = 1 + max(rank for rank in measured.ranks if rank is not None)
    tracks = []
    for place, rank in enumerate(measured.ranks):
        slices: list[Slice] = []
        host: list[Span] = []
        levels: list[tuple[float, int]] = []
        for timeline, lane in lanes_of(measured.shown, place):
            offset = _begin_s(timeline) - first
            slices += _slices(lane, timeline.iteration, offset)
            host += _host(lane, timeline, offset)
            levels += [(time_s + offset, held) for time_s, held in lane.levels]
        label = f"stage {place} (no record)" if rank is None else f"rank {rank} (stage {place})"
        tracks.append(Track(unknown + place if rank is None else rank, label, slices, host, levels))
    return write_tracks(tracks)


def _begin_s(timeline: Timeline) -> float:
    return min(lane.source.begin_s for lane in timeline.present)


def _slices(lane: Lane, iteration: int, offset: float) -> list[Slice]:
    rows = sorted((*lane.computations, *lane.transfers), key=lambda row: row.start_s)
    return [
        Slice(
            row.action,
            row.start_s + offset,
            row.end_s + offset,
            row.slot,
            iteration,
            {"iteration": iteration, **_extra(row)},
        )
        for row in rows
    ]


def _extra(row: Row) -> dict[str, int | float]:
    values = {"bytes": row.bytes, "live_bytes": row.live_bytes, "wait_ms": 1e3 * row.wait_s if row.wait_s else None}
    return {name: value for name, value in values.items() if value is not None}


def _host(lane: Lane, timeline: Timeline, offset: float) -> list[Span]:
    """Return spans of the loop, and inside it of what the host did for every computation where the device did
    something else."""
    begin = lane.source.begin_s - _begin_s(timeline) + offset
    end = begin + lane.source.elapsed_s
    spans = [Span(LOOP, begin, end, {"iteration": timeline.iteration})]
    for row in lane.computations:
        if row.host_start_s is None or row.host_end_s is None:
            continue
        if (row.host_start_s, row.host_end_s) != (row.start_s, row.end_s):
            name = NAMES.get(row.action.kind, str(row.action))
            start, stop = (min(max(time + offset, begin), end) for time in (row.host_start_s, row.host_end_s))
            spans.append(Span(name, start, stop, {"action": str(row.action)}))
    return spans
