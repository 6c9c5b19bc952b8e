"""Chrome traces of what ran, or what was simulated, for ui.perfetto.dev.

A process is a rank. Its threads show what it computes, evicts and loads, each host buffer and, if given, its host code.
Computations have the names of Megatron's timers, transfers those of their actions. An arrow leads from an eviction to
the host buffer and on to the load. Slices of one thread must not overlap, so one that does gets a second thread of the
same name. Times are in microseconds.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bpipe.schedule.action import COMPUTE, Action, Kind
from bpipe.simulate.report import Simulation, with_host_buffers

# Names of Megatron's timers of the same spans; it has none for halves of a backward and for transfers.
NAMES = {Kind.FORWARD: "forward-compute", Kind.BACKWARD: "backward-compute"}
LOOP = "forward-backward"

# A host buffer's threads come after the three that every rank has, the host code's last.
_THREADS = ("compute", "evict", "load")
_FIRST_BUFFER = len(_THREADS)
_HOST_CODE = 9_999
_MOST_THREADS = 10_000


class Slice(NamedTuple):
    """An action on the device.

    `extra` is shown with it; host buffer and iteration tell stays of one micro-batch apart.
    """

    action: Action
    start_s: float
    end_s: float
    host_buffer: int | None = None
    iteration: int = 0
    extra: dict[str, Any] | None = None


class Span(NamedTuple):
    """Interval of host code; spans of one rank must nest."""

    name: str
    start_s: float
    end_s: float
    extra: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Track:
    """One rank: its slices in order of start, its host code, and the bytes of activations that it holds over time."""

    rank: int
    label: str
    slices: Sequence[Slice]
    host: Sequence[Span] = ()
    levels: Sequence[tuple[float, int]] = ()


def write_trace(simulation: Simulation) -> str:
    """Return the trace of a simulation as JSON."""
    tracks = []
    for rank in range(simulation.schedule.num_ranks):
        computed = ((timed, None) for timed in simulation.computations[rank])
        slices = [
            Slice(timed.action, float(timed.start_s), float(timed.end_s), buffer)
            for timed, buffer in (*computed, *with_host_buffers(simulation, rank))
        ]
        levels = [(float(level.start_s), level.held_bytes) for level in simulation.levels(rank)]
        tracks.append(Track(rank, f"rank {rank}", sorted(slices, key=lambda part: part.start_s), levels=levels))
    return write_tracks(tracks)


def write_tracks(tracks: Iterable[Track]) -> str:
    """Return tracks as JSON: metadata, then events by time, a slice before what it contains and before its arrows."""
    metadata: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    flows: dict[tuple[int, ...], dict[str, dict[str, Any]]] = {}
    for track in tracks:
        rank = _Rank(track)
        rank.place(flows)
        metadata += rank.metadata()
        events += rank.events
    events += _arrows(flows)
    events.sort(key=lambda event: (event["ts"], _ORDER[event["ph"]], -event.get("dur", 0)))
    return json.dumps({"traceEvents": metadata + events, "displayTimeUnit": "ms"}) + "\n"


_ORDER = {"X": 0, "C": 1, "s": 2, "t": 3, "f": 4}


@dataclass
class _Rank:
    """The events of one rank, and the thread of each slice."""

    track: Track
    events: list[dict[str, Any]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=lambda: dict(enumerate(_THREADS)))
    # By thread's name and number: the threads of that name and when each is free again.
    free: dict[tuple[str, int], dict[int, float]] = field(default_factory=dict)

    def place(self, flows: dict[tuple[int, ...], dict[str, dict[str, Any]]]) -> None:
        residencies: Counter[tuple[int, int, int]] = Counter()
        hosting: dict[tuple[int, int, int], Slice] = {}
        for part in self.track.slices:
            kind, key = part.action.kind, (part.iteration, *part.action.key)
            if kind in COMPUTE:
                self._slice(0, NAMES.get(kind, str(part.action)), part)
                continue
            residencies[key] += kind in (Kind.EVICT, Kind.HOST)
            residency = (*key, residencies[key])
            if kind is Kind.HOST:
                hosting[key] = part
            elif kind is Kind.RETURN and key in hosting:
                flows.setdefault(residency, {})["t"] = self._stay(hosting.pop(key), part)
            elif kind in (Kind.EVICT, Kind.LOAD):
                name, phase = ("evict", "s") if kind is Kind.EVICT else ("load", "f")
                thread = self._thread(name, _THREADS.index(name), part.start_s, part.end_s)
                flows.setdefault(residency, {})[phase] = self._slice(thread, str(part.action), part)
        for span in self.track.host:
            self.names[_HOST_CODE] = "host code"
            self._event(_HOST_CODE, span.name, "host", span.start_s, span.end_s, span.extra or {})
        for time, held in self.track.levels:
            level = {"ph": "C", "pid": self.track.rank, "name": "activations", "ts": _microseconds(time)}
            self.events.append({**level, "args": {"bytes": held}})

    def _stay(self, host: Slice, returned: Slice) -> dict[str, Any]:
        """Add the interval in which the buffer is taken, with both transfers inside it."""
        buffer, end_s = host.host_buffer or 0, max(host.end_s, returned.end_s)
        thread = self._thread(f"host buffer {buffer}", _FIRST_BUFFER + buffer, host.start_s, end_s)
        action = host.action
        args = {"stage": action.stage, "microbatch": action.microbatch, "slot": buffer}
        event = self._event(thread, f"{action.stage}F{action.microbatch} hosted", "hosted", host.start_s, end_s, args)
        begins = max(host.start_s, min(returned.start_s, end_s))
        self._slice(thread, str(action), host._replace(end_s=min(host.end_s, begins)))
        self._slice(thread, str(returned.action), returned._replace(start_s=begins))
        return event

    def _thread(self, name: str, first: int, start_s: float, end_s: float) -> int:
        """Return a thread of this name that is free at `start_s`, if necessary a new one."""
        threads = self.free.setdefault((name, first), {first: float("-inf")})
        thread = next((number for number, free_s in threads.items() if free_s <= start_s), None)
        if thread is None:
            thread = first + 100 * len(threads)
        threads[thread] = end_s
        self.names[thread] = name
        return thread

    def _slice(self, thread: int, name: str, part: Slice) -> dict[str, Any]:
        action = part.action
        args = {"action": str(action), "stage": action.stage, "microbatch": action.microbatch, **(part.extra or {})}
        if part.host_buffer is not None:
            args["slot"] = part.host_buffer
        return self._event(thread, name, action.kind.name.lower(), part.start_s, part.end_s, args)

    def _event(
        self, thread: int, name: str, category: str, start_s: float, end_s: float, args: dict[str, Any]
    ) -> dict[str, Any]:
        start, place = _microseconds(start_s), {"pid": self.track.rank, "tid": self._tid(thread)}
        event = {"ph": "X", **place, "name": name, "cat": category, "ts": start, "args": args}
        event["dur"] = _microseconds(end_s) - start
        self.events.append(event)
        return event

    def _tid(self, thread: int) -> int:
        """Return a number that no other thread of the trace has.

        Perfetto takes thread 0, and the one numbered as its process, for the main thread. It would show what rank 3
        computes and its thread 3 as one, and drop what overlaps.
        """
        return _MOST_THREADS * (self.track.rank + 1) + thread

    def metadata(self) -> list[dict[str, Any]]:
        pid = self.track.rank
        metadata: list[dict[str, Any]] = [
            {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": self.track.label}},
            {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}},
        ]
        for thread, name in sorted(self.names.items()):
            of_thread = {"ph": "M", "pid": pid, "tid": self._tid(thread)}
            metadata.append({**of_thread, "name": "thread_name", "args": {"name": name}})
            metadata.append({**of_thread, "name": "thread_sort_index", "args": {"sort_index": thread}})
        return metadata


def _arrows(flows: dict[tuple[int, ...], dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return arrows from the start of each eviction over that of its residency to that of its load, if recorded."""
    arrows = []
    for number, ends in enumerate(flows.values(), 1):
        if not {"s", "f"} <= ends.keys():
            continue
        time = 0.0
        for phase in ("s", "t", "f"):
            if phase in ends:
                event = ends[phase]
                # A host buffer may be waiting for the eviction before it starts: the arrow must not go back in time.
                time = min(max(time, event["ts"]), event["ts"] + event["dur"])
                place = {"pid": event["pid"], "tid": event["tid"], "ts": time}
                arrow = {"ph": phase, "id": number, "cat": "activations", "name": "activations", **place}
                arrows.append(arrow | ({"bp": "e"} if phase == "f" else {}))
    return arrows


def _microseconds(seconds: float) -> float:
    """Round to eighths: whole nanoseconds without rounding errors, so two slices that meet do so in every reader."""
    return round(seconds * 8e6) / 8
