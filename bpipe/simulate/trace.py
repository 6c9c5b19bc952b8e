"""Write a simulation as a Chrome trace. In: a Report. Out: JSON text for ui.perfetto.dev or chrome://tracing. Draws nothing itself.

A process is a rank; its threads are what it computes, what it sends away and what it takes in. Times are in microseconds.
"""

from __future__ import annotations

import json
from typing import Any

from bpipe.ir.action import Kind
from bpipe.simulate.report import Report

_OUTWARD = (Kind.EVICT, Kind.RETURN)
_THREADS = ("compute", "out", "in")


def write_trace(report: Report) -> str:
    events: list[dict[str, Any]] = []
    for rank in range(report.schedule.num_ranks):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events += [
            {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}} for thread, name in enumerate(_THREADS)
        ]
        for timed in (*report.computations[rank], *report.transfers[rank]):
            action = timed.action
            thread = 0 if action.kind.value in "FBIW" else 1 if action.kind in _OUTWARD else 2
            events.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": thread,
                    "name": str(action),
                    "cat": action.kind.name.lower(),
                    "ts": float(timed.start_s) * 1e6,
                    "dur": float(timed.end_s - timed.start_s) * 1e6,
                    "args": {"stage": action.stage, "microbatch": action.microbatch},
                }
            )
        events += [
            {"ph": "C", "pid": rank, "name": "activations", "ts": float(level.start_s) * 1e6, "args": {"bytes": level.held_bytes}}
            for level in report.levels(rank)
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
