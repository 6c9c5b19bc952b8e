"""Write a recorded run as a Chrome trace for ui.perfetto.dev, all iterations shown one after the other.

Times are the device's. If the host's differ (on a GPU the host runs ahead), they are shown too.
"""

from bpipe.record.report.selection import Lane, Measured, Timeline, lanes_of
from bpipe.simulate.trace import LOOP, NAMES, Slice, Span, Track, write_tracks


def write_trace(measured: Measured) -> str:
    """Write a trace with a process for each rank; unknown ranks are numbered after all others."""
    first = min(_begin_s(timeline) for timeline in measured.timelines)
    unknown = 1 + max(rank for rank in measured.ranks if rank is not None)
    tracks = []
    for place, rank in enumerate(measured.ranks):
        slices: list[Slice] = []
        host: list[Span] = []
        levels: list[tuple[float, int]] = []
        for timeline, lane in lanes_of(measured.timelines, place):
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
    slices = []
    for row in sorted((*lane.computations, *lane.transfers), key=lambda row: row.start_s):
        wait_ms = 1e3 * row.wait_s if row.wait_s else None
        numbers = {"bytes": row.bytes, "live_bytes": row.live_bytes, "wait_ms": wait_ms}
        extra = {"iteration": iteration, **{name: value for name, value in numbers.items() if value is not None}}
        slices.append(Slice(row.action, row.start_s + offset, row.end_s + offset, row.slot, iteration, extra))
    return slices


def _host(lane: Lane, timeline: Timeline, offset: float) -> list[Span]:
    """Return spans of the loop, and in it those of the host's work for every computation with other times."""
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
