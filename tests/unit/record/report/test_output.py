"""Outputs of a report: text, JSON, the page and the trace."""

import json
import re
import shutil
from collections import defaultdict
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from bpipe.record.report.findings import answers, seconds_text
from bpipe.record.report.output.page import NOTHING, TICK_S, render, view
from bpipe.record.report.output.table import document, facts, table
from bpipe.record.report.output.trace import write_trace
from bpipe.record.report.report import Report, report_of
from bpipe.schedule.action import Kind
from bpipe.schedule.files.text import read_action
from tests.browser.sample import make_view
from tests.unit.record.report.recorded import MOVED, documented, edit_rows, write_run


def report(folder: Path, **changes: Any) -> Report:
    return report_of(write_run(folder, **changes))


def test_the_answers_of_a_balanced_run(tmp_path: Path) -> None:
    balancing, bottleneck = answers(report(tmp_path, speed=0.4e9))
    assert bottleneck == (
        "Stage 0 (rank 0) is the memory bottleneck: 53.9 MiB of activations (exactly its bound) and 28.6 MiB of "
        "weights, gradients and optimizer state."
    )
    bought, cost = balancing.split("; ")
    assert bought == "With balancing the fullest stage holds 53.9 MiB of activations instead of 84.0 MiB, 35.8 % less"
    share = re.fullmatch(
        r"balancing cost (\d+\.\d) % of an iteration's pipeline time: stage 0 waited for transfers\.", cost
    )
    assert share is not None
    assert float(share.group(1)) > 5


@pytest.mark.parametrize("speed", [None, 0.4e9], ids=["hidden", "exposed"])
def test_where_ranks_outnumber_cores_no_time_is_judged(speed: float | None, tmp_path: Path) -> None:
    """On two cores B took 1.252 times as long as A, yet balancing was said to cost no time."""
    changes = {} if speed is None else {"speed": speed}
    cost = answers(report(tmp_path, cores=2, **changes))[0].split("; ")[1]
    assert cost == (
        "the time it cost cannot be measured here: 8 ranks share 2 cores on node-0, so transfers take time "
        "from computations."
    )


def test_the_bottleneck_is_nearest_to_its_limit(tmp_path: Path) -> None:
    fits = answers(report(tmp_path / "a", limit_bytes=100_000_000))[1]
    assert fits.endswith("optimizer state, together 82.5 MiB of 95.4 MiB: 12.8 MiB free.")
    over = answers(report(tmp_path / "b", limit_bytes=100_000_000, extra_bytes={2: 30_000_000}))[1]
    assert over.startswith(
        "Stage 2 (rank 2) is the memory bottleneck: 81.6 MiB of activations (28.6 MiB above its bound of 53.0 MiB)"
    )
    assert over.endswith("together 110.2 MiB of 95.4 MiB: 14.8 MiB over.")
    assert "weights not recorded" in answers(report(tmp_path / "d", weights_bytes=None))[1]


def test_a_run_in_which_nothing_moved_is_said_to_be_one(tmp_path: Path) -> None:
    """All storages of a small model were below 64 KiB, and the report said that micro-batches were kept elsewhere."""
    assert answers(report(tmp_path, moved_bytes=0))[0].startswith("Nothing moved: ")


def test_where_much_stays_the_answers_say_so(tmp_path: Path) -> None:
    """Reports did not say what part of a micro-batch moves, so a run that freed nothing looked like one that had."""
    result = report(tmp_path / "a", kept_bytes=2 * MOVED)
    assert [row.moved_fraction for row in result.stages][:1] == [0.5]
    assert result.stages[-1].moved_fraction is None
    assert "moves only a part of what a forward keeps for its backward (stage 0 50.0 %" in answers(result)[-1]
    lines = table(result).splitlines()
    assert any(" moved " in line for line in lines)
    assert max(map(len, lines)) <= 120
    assert len(answers(report(tmp_path / "b", kept_bytes=MOVED * 10 // 9))) == 2
    unknown = report(tmp_path / "c", kept_bytes=0)
    assert unknown.stages[0].moved_fraction is None


def test_the_answers_say_what_found_too_little_room(tmp_path: Path) -> None:
    """A peak above the bound would look like an error in the schedule."""
    write_run(tmp_path)
    path = tmp_path / "record_00000.jsonl"
    head, *lines = map(json.loads, path.read_text().splitlines())
    lines[1] |= {"stayed_microbatches": 3, "stayed_bytes": 3 << 20, "passed_microbatches": 2, "passed_bytes": 2 << 20}
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))
    assert answers(report_of(tmp_path))[-1] == (
        "Micro-batches differ in size: 3 were too large for their host buffers and were not evicted; the bound was "
        f"exceeded by at most 2.0 MiB, on stage 0 in iteration {lines[1]['iteration']}. The prediction assumes that each "
        f"is as large as the largest."
    )


def test_the_answers_of_a_run_without_balancing(tmp_path: Path) -> None:
    first, second = answers(report(tmp_path / "a", balance="none"))
    assert second.startswith("Stage 0 (rank 0) is the memory bottleneck: 84.0 MiB of activations")
    assert first == (
        "Balancing was off: with --bpipe the fullest stage would hold about 52.5 MiB of activations instead of 84.0 "
        "MiB."
    )
    small = answers(report(tmp_path / "b", balance="none", num_stages=2))[0]
    assert small == "Balancing was off, and with 2 stages there is nothing to balance."


@pytest.mark.parametrize(
    "changes",
    [
        {"warm_up": 5, "noise": 0.3, "speed": 0.4e9},
        {"num_stages": 64, "num_microbatches": 64, "iterations": (5,)},
        {"balance": "none"},
        {"num_stages": 4, "num_microbatches": 8, "vocabulary": "1", "noise": 0.3},
        {"num_pipelines": 2, "num_stages": 4},
        {"iterations": tuple(range(100, 130)), "num_stages": 4, "num_microbatches": 4},
    ],
)
def test_the_table_fits_a_terminal_and_lines_up(tmp_path: Path, changes: dict[str, Any]) -> None:
    lines = table(report(tmp_path, **changes)).splitlines()
    assert max(map(len, lines)) <= 120
    head = next(index for index, line in enumerate(lines) if line.startswith("stage rank"))
    rows = [line for line in lines[head + 1 :] if re.match(r" *\d+ +\d+ ", line)]
    assert len(rows) == changes.get("num_stages", 8)
    # Every column ends where its title does.
    ends = {match.end() for match in re.finditer(r"stage|rank|bound|balancing|/load", lines[head])}
    assert all(row[end - 1] != " " and row[end : end + 1] in ("", " ") for row in rows for end in ends)


def test_table_and_page_say_which_run_this_is(tmp_path: Path) -> None:
    """Two open pages were both called "bpipe report", and neither said of which day, machine or version it was."""
    run = write_run(tmp_path / "lr_3e-4")
    head = " ".join(table(report_of(run)).split("\n\n")[0].split())
    assert head.startswith("run lr_3e-4; started 2025-11-21T10:40:00+00:00; host node-0; ")
    assert "torch 2.15.0; megatron-core 0.19.2" in head
    assert view(report_of(run))["title"] == "bpipe report: lr_3e-4, 2025-11-21, node-0"
    (run / "run.json").unlink()
    assert view(report_of(run))["title"] == "bpipe report: lr_3e-4, node-0"


def test_two_pipes_are_reported(tmp_path: Path) -> None:
    """Reports were refused because a stage was looked for on one rank. The slow replica is named."""
    sizes = {"schedule": "chimera", "num_microbatches": 8, "probe": None}
    slow = {(iteration, f"2B{microbatch}"): 0.004 for iteration in (5, 6, 7) for microbatch in (1, 3, 5)}
    result = report(tmp_path, slow=slow, **sizes)
    assert [row.evictions for row in result.stages] == [0, 0, 0, 1, 1, 0, 0, 0]
    assert [row.measured_bytes for row in result.stages] == [row.predicted_bytes for row in result.stages]
    text = table(result)
    assert "pipes 2, rows in the order of the first pipe's stages" in text
    assert "stage 2 of pipe 1, backward (mean): measured 23 ms, predicted 20 ms" in text
    assert "pipes" not in table(report(tmp_path / "one"))
    render(view(result))


def test_machines_are_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for path in sorted(run.glob("record_*.jsonl"))[2:]:
        path.write_text(path.read_text().replace('"node-0"', '"node-1"'))
    assert dict(facts(report_of(run)))["host"] == "node-0 (2 ranks), node-1 (6 ranks)"


def test_replays_of_a_graph_are_said_to_have_no_records(tmp_path: Path) -> None:
    path = write_run(tmp_path) / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"captured": 9}))
    sentence = dict(facts(report_of(tmp_path)))["CUDA graph"]
    assert sentence == "replays iterations from 9 on, of which losses and seconds are recorded"


def test_three_figures_stand_at_the_head(tmp_path: Path) -> None:
    """Exposed transfers, iteration and bubble, which the page does not repeat."""
    shown = view(report(tmp_path / "run", iterations=(5, 6, 7), speed=0.4e9, slow={(6, "2F3"): 0.1}))
    figures = {label: (value, beside) for label, value, beside in shown["figures"]}
    assert list(figures) == ["exposed transfers", "iteration", "bubble"]
    assert figures["bubble"][1].endswith("% predicted")
    # The same as the table and the sentences say.
    assert figures["exposed transfers"][0] == seconds_text(max(row["exposed_s"] or 0 for row in shown["stages"]))
    assert not {label for label, _ in shown["facts"]} & {"pipeline", "bubble", "training step"}
    plain = view(report_of(write_run(tmp_path / "plain", balance="none")))["figures"]
    assert ["exposed transfers", "none", "nothing is evicted"] in plain


def keys(value: Any, prefix: str = "") -> set[str]:
    """Every key with its path; those of a list once, and those that are data (stages, actions) not at all."""
    names: set[str] = set()
    if isinstance(value, dict):
        for key, inner in value.items():
            if not re.match(r"\d", key):
                names |= {f"{prefix}{key}"} | keys(inner, f"{prefix}{key}.")
    elif isinstance(value, list):
        for inner in value:
            names |= keys(inner, prefix)
    return names


def test_every_key_of_the_json_is_documented(tmp_path: Path) -> None:
    written = document(report(tmp_path, warm_up=5, flops=1.0, peak_flops=1.0))
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    # Nothing of this run was checked.
    assert written["verified"] is None
    verified = {"verified.iterations", "verified.microbatches", "verified.nbytes"}
    assert keys(written) | verified == documented("JSON")


def test_what_was_checked_is_said_where_every_rank_checked(tmp_path: Path) -> None:
    """The rank that checked the fewest iterations counts; if one checked nothing, nothing is said."""
    write_run(tmp_path, num_stages=4)
    for rank, number in enumerate((3, 2, 3, 2)):
        path, summary = tmp_path / f"rank_{rank:05}.json", {"rank": rank, "peak_bytes": 1}
        checked = {"verified_iterations": number, "verified_microbatches": 5, "verified_bytes": 1 << 30}
        path.write_text(json.dumps(summary | checked))
    result = report_of(tmp_path)
    text = "2 iterations: everything evicted came back unchanged (20 micro-batches, 4.0 GiB)"
    assert ("verified", text) in facts(result)
    assert document(result)["verified"] == {"iterations": 2, "microbatches": 20, "nbytes": 4 << 30}
    path.write_text(json.dumps(summary))
    assert document(report_of(tmp_path))["verified"] is None


H200 = Path(__file__).resolve().parents[3] / "data/h200"


def test_a_baseline_gives_measured_peaks_and_whether_results_are_identical(tmp_path: Path) -> None:
    """The page of the quickstart compared the balanced run with a prediction, though the other run had been measured."""
    result = report_of(H200 / "balanced", baseline=H200 / "plain")
    peaks = [json.loads(path.read_text())["peak_bytes"] for path in sorted((H200 / "plain").glob("rank_*.json"))]
    assert [row.baseline_bytes for row in result.stages] == peaks
    assert [row["baseline_bytes"] for row in view(result)["stages"]] == peaks
    assert f"instead of {max(peaks) / 2**30:.1f} GiB" in answers(result)[0]
    assert answers(result)[1].startswith("All losses and gradient norms of 3 iterations are identical to the last bit ")
    changed = tmp_path / "other"
    shutil.copytree(H200 / "plain", changed)
    lines = [json.loads(line) for line in (changed / "iterations.jsonl").read_text().splitlines()]
    lines[1]["lm loss"] = (float.fromhex(lines[1]["lm loss"]) * (1 + 2**-50)).hex()
    (changed / "iterations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert answers(report_of(H200 / "balanced", baseline=changed))[0].startswith(
        "Results are NOT identical to those without balancing (other): lm loss of iteration 2: "
    )
    path = changed / "rank_00002.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"balanced": True}))
    with pytest.raises(ValueError, match=r"rank_00002.json: this run was balanced: give the one without balancing"):
        report_of(H200 / "balanced", baseline=changed)
    with pytest.raises(ValueError, match=r"has reports of stages \[\], not of 0 to 3"):
        report_of(H200 / "balanced", baseline=H200 / "balanced")


def test_the_view_is_what_the_page_takes(tmp_path: Path) -> None:
    write_run(tmp_path, iterations=(5, 6))
    (tmp_path / "record_00003.jsonl").unlink()
    shown = view(report_of(tmp_path))
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert render(shown).startswith("<!doctype html>") or render(shown).startswith("<!DOCTYPE html>")
    assert [iteration["iteration"] for iteration in shown["iterations"]] == [5, 6]
    for iteration in shown["iterations"]:
        assert [rank["measured"] is None for rank in iteration["ranks"]] == [place == 3 for place in range(8)]
        for rank in iteration["ranks"]:
            for side in filter(None, (rank["measured"], rank["simulated"])):
                actions = side["actions"]
                assert len(actions) >= 32
                assert all(0 <= start <= end <= iteration["end_s"] + 1e-9 for _, start, end, *_ in actions)
                assert [row[1] for row in actions] == sorted(row[1] for row in actions)
                assert [time for time, _ in side["memory"]] == sorted(time for time, _ in side["memory"])
    acceptor = shown["iterations"][0]["ranks"][7]
    for side in (acceptor["measured"], acceptor["simulated"]):
        hosted = {(row[0], row[5]) for row in side["actions"] if "HOST" in row[0]}
        assert hosted >= {("0HOST3", 0), ("0HOST4", 1)}
        assert side["memory"][-1][1] == 4 * 10_500_000


@pytest.fixture(scope="module")
def drawn() -> dict[str, Any]:
    return make_view(4, 6, missing=(2,))


def test_a_title_cannot_end_the_script_or_become_an_element(drawn: dict[str, Any]) -> None:
    page = render(drawn)
    assert "</script>" in drawn["title"]
    assert data_of(page)["title"] == drawn["title"]
    assert page.count(escape(drawn["title"])) == 2
    assert drawn["title"] not in page


def data_of(page: str) -> Any:
    return json.loads(page.split('<script type="application/json" id="data">')[1].split("</script>")[0])


def test_actions_and_memory_come_back_as_they_were(drawn: dict[str, Any]) -> None:
    data = data_of(render(drawn))
    for written, packed in zip(drawn["iterations"][0]["ranks"], data["iterations"][0]["ranks"], strict=True):
        for side in ("measured", "simulated"):
            if written[side] is None:
                assert packed[side] is None
                continue
            columns = {name: list(accumulate(values)) for name, values in data["tracks"][packed[side]].items()}
            names = ("stage", "kind", "microbatch", "start", "length", "wait", "bytes", "slot")
            actions = [
                [
                    f"{stage}{data['kinds'][kind]}{microbatch}",
                    *(pytest.approx(ticks * TICK_S, abs=TICK_S) for ticks in (start, start + length, wait)),
                    *(None if value == NOTHING else value for value in more),
                ]
                for stage, kind, microbatch, start, length, wait, *more in zip(
                    *(columns[name] for name in names), strict=True
                )
            ]
            assert written[side]["actions"] == actions
            times = (pytest.approx(ticks * TICK_S, abs=TICK_S) for ticks in columns["memory_time"])
            assert written[side]["memory"] == list(map(list, zip(times, columns["memory_held"], strict=True)))


def test_a_number_that_is_not_finite_is_refused(drawn: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        render({**drawn, "stages": [{**drawn["stages"][0], "bubble": float("nan")}]})


Event = dict[str, Any]


def check(text: str) -> list[Event]:
    """Check what Perfetto itself (tests/browser) does not: whole nanoseconds in order, threads with names."""
    document = json.loads(text)
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    events: list[Event] = document["traceEvents"]
    # A reader that cuts off the rest of a time finds no overlap where there is none.
    assert all((event.get(key, 0) * 1000).is_integer() for event in events for key in ("ts", "dur"))
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= set(threads(events))
    # Perfetto merges thread 0 with the thread that has its process's number.
    numbers = [tid for _, tid in threads(events)]
    assert len(set(numbers)) == len(numbers)
    assert not set(numbers) & {0, *(event["pid"] for event in events)}
    return events


def threads(events: list[Event]) -> dict[tuple[int, int], str]:
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}


def arrows(events: list[Event]) -> list[list[Event]]:
    """Return the slices that each arrow touches, in order: the innermost slice around each of its ends."""
    ends = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            slices = (
                span
                for span in events
                if span["ph"] == "X" and (span["pid"], span["tid"]) == (event["pid"], event["tid"])
            )
            around = [span for span in slices if span["ts"] <= event["ts"] < span["ts"] + span["dur"]]
            ends[event["id"]].append(min(around, key=lambda span: span["dur"]))
    return list(ends.values())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"noise": 0.4, "speed": 0.4e9, "transport": "gloo"},
        {"schedule": "interleaved-1f1b", "num_stages": 4, "num_microbatches": 8, "num_chunks": 2},
        {"clock_error_s": {0: 0.002, 7: -0.003}},
    ],
)
def test_a_measured_trace(tmp_path: Path, changes: dict[str, Any]) -> None:
    measured = report_of(write_run(tmp_path, **changes)).measured
    events = check(write_trace(measured))
    names = threads(events)
    evictions = [event for event in events if event.get("cat") == "evict"]
    followed = arrows(events)
    assert len(followed) == len(evictions) > 0
    for touched in followed:
        kinds = [read_action(event["args"]["action"]).kind for event in touched]
        assert kinds[0] is Kind.EVICT
        assert kinds[-1] is Kind.LOAD
        assert len({(event["args"]["stage"], event["args"]["microbatch"]) for event in touched}) == 1
        middle = touched[1]
        assert names[middle["pid"], middle["tid"]] == f"host buffer {middle['args']['slot']}"
        assert middle["pid"] == measured.records[(measured.schedule.partners or ())[touched[0]["pid"]]].rank  # type: ignore[union-attr]


def test_host_code_that_runs_ahead_has_slices_of_its_own(tmp_path: Path) -> None:
    """On a GPU the host issues a computation long before the device ends it."""

    def ahead(row: dict[str, Any]) -> None:
        row["host_end_s"] = row["host_start_s"] + 0.001

    write_run(tmp_path, iterations=(5,))
    edit_rows(tmp_path, 0, ahead)
    events = check(write_trace(report_of(tmp_path).measured))
    names = threads(events)
    host = [event for event in events if event["ph"] == "X" and names[event["pid"], event["tid"]] == "host code"]
    assert len([event for event in host if event["name"] == "forward-compute"]) == 16
    assert {event["pid"] for event in host if event["name"] != "forward-backward"} == {0}


def test_a_rank_without_a_record_leaves_out_its_end_of_the_arrow(tmp_path: Path) -> None:
    write_run(tmp_path, transport="gloo", iterations=(5,))
    (tmp_path / "record_00007.jsonl").unlink()
    (tmp_path / "record_00001.jsonl").unlink()
    followed = arrows(check(write_trace(report_of(tmp_path).measured)))
    assert {len(touched) for touched in followed if touched[0]["pid"] == 0} == {2}
    assert {len(touched) for touched in followed if touched[0]["pid"] == 2} == {3}
    assert not any(touched[0]["pid"] == 1 for touched in followed)
