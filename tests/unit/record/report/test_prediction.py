"""What a recorded run is predicted to take and hold, and what a run that ended early would have needed."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.cli import main
from bpipe.record.read import read_held, read_run
from bpipe.record.report import findings
from bpipe.record.report.memory import own_peak, peak_of_rule, rule_by_slice, whole_peaks
from bpipe.record.report.replay import replay
from bpipe.record.report.report import report_of
from bpipe.record.report.selection import Measured, choose
from bpipe.record.report.shortage import shortage_of, text
from bpipe.schedule.memory import StageMemory
from tests.unit.record.report.recorded import edit_rows, write_run


def measured_of(folder: Path, **changes: Any) -> Measured:
    return choose(read_run(write_run(folder, **changes)))


def same_times(measured: Measured) -> None:
    """Check that every action of the prediction begins and ends when it did in the run."""
    report = replay(measured).report
    for place, lane in enumerate(measured.timelines[0].lanes):
        assert lane is not None
        assert [row.action for row in lane.computations] == [timed.action for timed in report.computations[place]]
        for row, timed in zip(lane.computations, report.computations[place], strict=True):
            assert (row.start_s, row.end_s) == pytest.approx((timed.start_s, timed.end_s), abs=1e-8)
        # Whether a message or a transfer takes a port first may depend on the last bit of a time.
        for row, timed in zip(
            *(
                sorted(rows, key=lambda row: (str(row.action), row.start_s))
                for rows in (lane.transfers, report.transfers[place])
            ),
            strict=True,
        ):
            assert row.action == timed.action
            assert row.end_s == pytest.approx(timed.end_s, abs=2e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"message_s": 0.0007},
        {"seconds": {"0F": 0.013, "5B": 0.031}, "message_s": 0.001},
        {"speed": 0.7e9, "probe": 0.7e9},
        {"speed": 0.7e9, "probe": None},
        {"balance": "none"},
        {"synchronous": True},
        {"num_stages": 4, "num_microbatches": 8, "vocabulary": "1", "seconds": {"2S": 0.003, "1T": 0.004}},
        {"num_stages": 4, "num_microbatches": 8, "vocabulary": "interlaced", "balance": "none"},
        {"schedule": "interleaved-1f1b", "num_stages": 4, "num_microbatches": 8, "num_chunks": 2},
        {"schedule": "chimera", "num_microbatches": 8, "message_s": 0.0007, "seconds": {"0F": 0.013, "5B": 0.031}},
        {"schedule": "bitpipe", "num_stages": 4, "num_microbatches": 8, "num_chunks": 2, "balance": "none"},
    ],
)
def test_an_undisturbed_run_is_predicted_to_the_instant(tmp_path: Path, changes: dict[str, Any]) -> None:
    same_times(measured_of(tmp_path, iterations=(5,), **changes))


def test_the_pipeline_that_left_most_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path, num_stages=4, num_pipelines=2)
    (tmp_path / "record_00001.jsonl").unlink()
    measured = choose(read_run(tmp_path))
    assert measured.pipeline == 1
    assert measured.ranks == (4, 5, 6, 7)
    assert any(note.startswith("pipeline 1 is shown") for note in measured.notes)
    assert len(measured.others(1)) == 3
    assert len(measured.others(0)) == 6


def test_one_program_at_a_time(tmp_path: Path) -> None:
    """A growing batch changes the program: the last one is reported."""
    write_run(tmp_path, num_microbatches=8, iterations=(3, 4))
    small = {path.name: path.read_text().splitlines()[1:] for path in tmp_path.glob("record_*")}
    write_run(tmp_path, num_microbatches=16, iterations=(5, 6))
    for name, lines in small.items():
        head, *rest = (tmp_path / name).read_text().splitlines()
        (tmp_path / name).write_text("\n".join([head, *lines, *rest]) + "\n")
    run = read_run(tmp_path)
    assert [timeline.iteration for timeline in choose(run).timelines] == [5, 6]
    assert "left out iterations 3, 4" in choose(run).notes[0]


def test_rows_must_be_those_of_the_program(tmp_path: Path) -> None:
    write_run(tmp_path, num_stages=4, num_microbatches=4, iterations=(5,))
    path = tmp_path / "record_00002.jsonl"
    head, line = (json.loads(text) for text in path.read_text().splitlines())
    line["actions"] = line["actions"][:-1]
    path.write_text(json.dumps(head) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="computation 7 of stage 2 is nothing, but its program says 2B3"):
        choose(read_run(tmp_path))


def test_an_iteration_that_one_rank_did_not_finish(tmp_path: Path) -> None:
    write_run(tmp_path, num_stages=4, num_microbatches=4, iterations=(5, 6))
    path = tmp_path / "record_00003.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    measured = choose(read_run(tmp_path))
    assert measured.timelines[1].lanes[3] is None
    assert measured.notes == ("rank 3 did not record iteration 6: was the run killed?",)


BALANCED = build(ScheduleConfig("1f1b", 8, 16, balance=BalanceConfig()))


def test_whole_peaks_need_every_size() -> None:
    assert whole_peaks(BALANCED, dict.fromkeys(range(8), 10), {}) == (50, 50, 50, 50, 40, 50, 50, 50)
    assert whole_peaks(BALANCED, dict.fromkeys(range(7), 10), {}) is None


def test_slices_that_differ_in_size_are_each_counted_as_it_is() -> None:
    """Slices of 1 and 10 bytes were all counted as the largest: 40 bytes instead of 22."""
    schedule = build(ScheduleConfig("gpipe", 2, 2, slices=2))
    saved = {(0, number): 10 if number % 2 else 1 for number in range(4)}
    assert peak_of_rule(schedule, 0, rule_by_slice(schedule, saved, {}, {}), 0) == 22
    assert own_peak(schedule, 0, {0: 10}, {}, 0, {}) == 40
    # Split backwards: the last slices keep what W needs while the first ones wait for I.
    split = build(ScheduleConfig("zb-h1", 2, 2, slices=2))
    after = dict.fromkeys(saved, 3)
    rule = rule_by_slice(split, saved, {}, after)
    assert rule.stages[:2] == (StageMemory(1, 0, 3), StageMemory(10, 0, 3))
    assert rule.stages[2:] == (StageMemory(0, 0, 0),) * 2


def differences(folder: Path) -> dict[str, findings.Difference]:
    return {difference.kind: difference for difference in findings.differences(report_of(folder))}


def test_one_slow_micro_batch(tmp_path: Path) -> None:
    """It shows in the iteration, and in its stage's mean."""
    changes = differences(write_run(tmp_path, slow={(6, "3B7"): 0.06}, iterations=(6,)))
    assert set(changes) == {"iteration", "backward"}
    assert changes["backward"].what == "stage 3, backward (mean)"
    assert changes["backward"].beside == ("the slowest of 16, 3B7 in iteration 6, took 80 ms",)


def smaller(row: dict[str, Any]) -> None:
    if row["action"] in ("4F5", "4F6"):
        row["bytes"] = 8_000_000


def kept(row: dict[str, Any]) -> None:
    """Recomputed experts keep the input of their last recomputation."""
    if row["action"] == "4B15":
        row["left_bytes"] += 3_000_000


@pytest.mark.parametrize(
    ("change", "changes", "fact"),
    [
        (smaller, {"extra_bytes": {4: -3_000_000}}, "micro-batches of 7.6 MiB to 10.5 MiB"),
        (
            kept,
            {"extra_bytes": {4: 2_500_000}},
            "2.9 MiB of saved activations still in memory after the last backward",
        ),
    ],
    ids=["smaller", "kept"],
)
def test_what_was_measured_beside_a_difference(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], changes: dict[str, Any], fact: str
) -> None:
    edit_rows(write_run(tmp_path, **changes), 4, change)
    assert differences(tmp_path)["peak"].beside[-1] == fact


GIB = 2**30
PROGRAM = {"schedule": "1f1b", "num_stages": 8, "num_microbatches": 16, "num_chunks": 1, "balance": "none"}


def mark(place: int, microbatches: int, **more: Any) -> dict[str, Any]:
    return {
        "iteration": 1,
        "action": f"{place}F{microbatches - 1}",
        "program": PROGRAM,
        "microbatches": [[place, number, 6 * GIB] for number in range(microbatches)],
        "saved_bytes": {str(place): 6 * GIB},
        "logits_bytes": GIB if place == 7 else 0,
        "allocated_bytes": (22 + 6 * microbatches) * GIB,
        **more,
    }


def header(place: int, limit_gib: int | None = 80) -> dict[str, Any]:
    limit = None if limit_gib is None else limit_gib * GIB
    return {
        "format": "bpipe-memory",
        "version": 1,
        "rank": place,
        "pipeline": 0,
        "place": place,
        "host": "node1",
        "limit_bytes": limit,
        "micro_batch": 2,
        "weights_bytes": 8 * GIB,
        "gradients_bytes": 8 * GIB,
        "optimizer_bytes": 4 * GIB,
        "optimizer_to_come_bytes": 8 * GIB,
    }


def write(folder: Path, limit_gib: int | None = 80, **first: Any) -> Path:
    """Stage 0 ran out of memory in its eighth forward; stages 6 and 7 had not begun."""
    folder.mkdir()
    for place in range(6):
        lines = [header(place, limit_gib), *(mark(place, number) for number in range(1, 8 - place))]
        if place == 0:
            error = {"action": "0F7", "error": "OutOfMemoryError: CUDA out of memory (rank 0)", "out_of_memory": True}
            lines.append(mark(0, 7, **error) | first)
        (folder / f"memory_{place:05d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_it_says_what_would_have_fitted(tmp_path: Path) -> None:
    """28 GiB besides activations, 2 GiB of other memory, 6 GiB per micro-batch: 8 need 78, 5 balanced 60."""
    shortage = shortage_of(held(write(tmp_path / "run", 70)))
    assert shortage.stages[0].need_bytes == (8 + 8 + 12 + 2 + 8 * 6) * GIB
    assert shortage.stages[0].other_bytes == 2 * GIB
    ways = {way.name: (way.need_bytes // GIB, way.fits) for way in shortage.ways}
    assert ways == {"as it was run": (78, False), "with --bpipe": (60, True)}
    printed = text(held(tmp_path / "run"))
    assert (
        "Rank 0 (stage 0 of pipeline 0, node1) ran out of memory: OutOfMemoryError: CUDA out of memory (rank 0)."
        in printed
    )
    assert "7 of 8 42.0 GiB" in " ".join(printed.split())
    page = (Path(__file__).resolve().parents[4] / "docs" / "report.md").read_text()
    (shown,) = re.findall(r"^```\n( +held  activa-.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert set(shown.splitlines()) - {"..."} <= set(printed.splitlines())
    assert "What fits: with --bpipe." in printed
    assert "note: no forward ran on stage 6, 7:" in printed
    assert all(len(line) <= 120 for line in printed.splitlines())


def test_a_rank_that_ran_no_forward_hosts_too(tmp_path: Path) -> None:
    """`with --bpipe: fits` counted only the stages that had begun, although stage 7 hosts what stage 0 evicts."""
    folder = write(tmp_path / "run", 70)
    for place in (6, 7):
        line = json.dumps(header(place, 70) | {"weights_bytes": 30 * GIB * (place == 7)})
        (folder / f"memory_{place:05d}.jsonl").write_text(line + "\n")
    ways = {way.name: (way.stage, way.need_bytes // GIB, way.fits) for way in shortage_of(held(folder)).ways}
    # 8 + 12 GiB of gradients and moments, and 5 micro-batches of 6 GiB as on every stage.
    assert ways["with --bpipe"] == (7, 30 + 20 + 5 * 6, False)
    assert ways["as it was run"] == (0, 78, False)


def test_two_pipes_hold_stages_of_both(tmp_path: Path) -> None:
    """A rank's stages were looked for in one pipe only; Chimera's middle ranks hold 8 micro-batches."""
    two = {"schedule": "chimera", "num_stages": 8, "num_microbatches": 8, "num_chunks": 1, "balance": "none"}
    folder = tmp_path / "run"
    folder.mkdir()
    for place in range(8):
        of_both = {
            "program": two,
            "saved_bytes": {str(place): 6 * GIB, str(7 - place): 5 * GIB},
            "allocated_bytes": None,
        }
        lines = [header(place), mark(place, 1, **of_both)]
        (folder / f"memory_{place:05d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shortage = shortage_of(held(folder))
    assert [stage.peak_microbatches for stage in shortage.stages] == [5, 6, 7, 8, 8, 7, 6, 5]
    assert [stage.need_bytes // GIB for stage in shortage.stages] == [
        28 + 6 * peak for peak in (5, 6, 7, 8, 8, 7, 6, 5)
    ]
    assert "with --bpipe" in {way.name for way in shortage.ways}


def sharded(folder: Path, shard_gib: int = 3) -> Path:
    """4 stages, algorithm 1: rank 0 fails in its sixth forward with one micro-batch in its shard."""
    folder.mkdir()
    program = {**PROGRAM, "num_stages": 4, "vocabulary": "1"}
    for place in range(3):
        here = mark(
            place,
            5 - place,
            program=program,
            shard_bytes=shard_gib * GIB,
            in_shards_bytes=shard_gib * GIB,
            logits_bytes=0,
        )
        here["allocated_bytes"] = (22 + 6 * (5 - place) + shard_gib) * GIB
        lines = [header(place, 70), here]
        if place == 0:
            lines.append(
                here | {"action": "0F5", "error": "OutOfMemoryError: CUDA out of memory", "out_of_memory": True}
            )
        (folder / f"memory_{place:05d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_what_shards_hold_is_needed_too(tmp_path: Path) -> None:
    """28 GiB besides activations, 2 of other memory, 6 micro-batches of 6, and one micro-batch's part in a shard."""
    shortage = shortage_of(held(sharded(tmp_path / "run")))
    assert shortage.stages[0].fullest.activations_bytes == (5 * 6 + 3) * GIB
    assert shortage.stages[0].other_bytes == 2 * GIB
    assert shortage.stages[0].need_bytes == (28 + 2 + 6 * 6 + 3) * GIB
    ways = {way.name: way.need_bytes for way in shortage.ways}
    assert ways["as it was run"] == (28 + 2 + 6 * 6 + 3) * GIB
    printed = text(held(tmp_path / "run"))
    in_one_line = " ".join(printed.split())
    assert "Its shard of the output layer holds 3.0 GiB of a micro-batch between its passes" in in_one_line
    assert "balance none; vocabulary 1; memory held up to" in in_one_line
    assert "S to T" in printed
    assert "not counted" not in printed
    assert all(len(line) <= 120 for line in printed.splitlines())


def test_shards_that_no_rank_had_computed_are_said_not_to_count(tmp_path: Path) -> None:
    shortage = shortage_of(held(sharded(tmp_path / "run", shard_gib=0)))
    assert shortage.stages[0].need_bytes == (28 + 2 + 6 * 6) * GIB
    assert (
        shortage.notes[-1]
        == "no rank had computed its shard of the output layer: the logits that each rank will hold are not counted"
    )


def test_where_nothing_fits_it_says_so(tmp_path: Path) -> None:
    assert shortage_of(held(write(tmp_path / "run", 40))).answers[-1].startswith("None of these fits: recompute more,")


def test_without_a_limit_it_promises_nothing(tmp_path: Path) -> None:
    assert (
        shortage_of(held(write(tmp_path / "run", None))).answers[-1]
        == "Which of these fits is not known: no limit of the device was recorded."
    )


def held(folder: Path) -> Any:
    result = read_held(folder)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"iteration": None}, "line 9: 'iteration' is missing"),
        ({"saved_bytes": [1]}, "line 9: saved_bytes is [1], but must be an object"),
        ({"microbatches": [[0, 0]]}, "line 9: microbatches has [0, 0], but must have 3 values"),
        ({"microbatches": 7}, "line 9: microbatches is 7, but must be a list"),
        (
            {"program": {"schedule": "1f1b", "num_stages": 1e300, "num_microbatches": 8}},
            "line 9: program.num_stages is 1e+300, but",
        ),
        ({"program": "1f1b"}, "line 9: program is '1f1b', but must be an object"),
        ({"saved_bytes": {"0": -5}}, "line 9: saved_bytes of stage 0 is -5, but"),
        ({"allocated_bytes": float("inf")}, "line 9: not JSON (Infinity is not a finite number"),
    ],
)
def test_what_no_run_writes_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "run", **change)
    assert main(["report", str(folder)]) == 2
    error = capsys.readouterr().err
    assert f"memory_00000.jsonl, {message}" in error
    assert error.count("\n") == 1


def test_a_run_that_failed_later_tells_it_below_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.unit.record.report.recorded import write_run

    folder = write_run(tmp_path / "recorded")
    for path in write(tmp_path / "run").iterdir():
        path.rename(folder / path.name)
    (folder / "failure.json").write_text(json.dumps({"rank": 0, "cause": "OutOfMemoryError: CUDA out of memory"}))
    assert main(["report", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "is the memory bottleneck" in printed
    assert "Rank 0 (stage 0 of pipeline 0, node1) failed first: OutOfMemoryError: CUDA out of memory." in printed
