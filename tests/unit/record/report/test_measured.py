"""Choosing what a report is about: one pipeline, one clock, one program, and both ends of every transfer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bpipe.record.read import read_run
from bpipe.record.report.selection import choose, peak_microbatches
from bpipe.schedule.memory import peak_counts
from tests.unit.record.report.recorded import write_run


def test_an_acceptor_without_rows_gets_its_partners(tmp_path: Path) -> None:
    one_sided = choose(read_run(write_run(tmp_path / "peer", transport="peer", iterations=(5,))))
    two_sided = choose(read_run(write_run(tmp_path / "gloo", transport="gloo", iterations=(5,))))
    for lane, other in zip(one_sided.timelines[0].lanes, two_sided.timelines[0].lanes, strict=True):
        assert lane is not None
        assert other is not None
        assert sorted((str(row.action), row.slot) for row in lane.transfers) == sorted(
            (str(row.action), row.slot) for row in other.transfers
        )


def test_times_are_on_one_clock(tmp_path: Path) -> None:
    measured = choose(read_run(write_run(tmp_path, iterations=(5,), clock_error_s={0: 0.5})))
    lanes = measured.timelines[0].present
    assert lanes[0].computations[0].start_s == pytest.approx(0.5)
    assert lanes[0].computations[0].host_start_s == pytest.approx(0.5)
    # The second stage did not begin late, and the first one's HOST rows came from no one.
    assert lanes[1].computations[0].start_s == pytest.approx(0.01)
    assert lanes[7].transfers[0].start_s == lanes[0].transfers[0].start_s


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_microbatches": 3},
        {"balance": "none"},
        {"schedule": "gpipe", "num_stages": 6},
        {"schedule": "interleaved-1f1b", "num_stages": 4, "num_microbatches": 8, "num_chunks": 2},
    ],
)
def test_micro_batches_are_counted_from_the_times(tmp_path: Path, sizes: dict[str, int]) -> None:
    """A count from rows and one from the schedule's grid have nothing in common but the run."""
    measured = choose(read_run(write_run(tmp_path, iterations=(5,), **sizes)))
    lanes = measured.timelines[0].lanes
    counts = tuple(
        peak_microbatches(measured.schedule, place, lane) for place, lane in enumerate(lanes) if lane is not None
    )
    assert counts == peak_counts(measured.schedule)


def test_a_rank_without_a_record_is_called_what_its_partner_calls_it(tmp_path: Path) -> None:
    write_run(tmp_path, num_pipelines=2)
    (tmp_path / "record_00006.jsonl").unlink()
    (tmp_path / "record_00010.jsonl").unlink()
    (tmp_path / "record_00011.jsonl").unlink()
    measured = choose(read_run(tmp_path))
    assert measured.pipeline == 0
    assert measured.ranks == tuple(range(8))
    assert measured.records[6] is None
    assert measured.timelines[0].lanes[6] is None
    assert "no record of ranks 6, 10, 11 (of 16)" in measured.notes


def test_the_only_rank_left_is_the_one_without_a_record(tmp_path: Path) -> None:
    write_run(tmp_path, balance="none", num_stages=4)
    (tmp_path / "record_00002.jsonl").unlink()
    assert choose(read_run(tmp_path)).ranks == (0, 1, 2, 3)


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
    """A batch size that grows changes the number of micro-batches: the last program is reported on, or that of the
    iteration asked for."""
    write_run(tmp_path, num_microbatches=8, iterations=(3, 4))
    small = {path.name: path.read_text().splitlines()[1:] for path in tmp_path.glob("record_*")}
    write_run(tmp_path, num_microbatches=16, iterations=(5, 6))
    for name, lines in small.items():
        head, *rest = (tmp_path / name).read_text().splitlines()
        (tmp_path / name).write_text("\n".join([head, *lines, *rest]) + "\n")
    run = read_run(tmp_path)
    assert [timeline.iteration for timeline in choose(run).timelines] == [5, 6]
    assert "left out iterations 3, 4" in choose(run).notes[0]
    measured = choose(run, 4)
    assert measured.program.num_microbatches == 8
    assert [timeline.iteration for timeline in measured.shown] == [4]
    assert [timeline.iteration for timeline in measured.timelines] == [3, 4]
    with pytest.raises(ValueError, match="iteration 7 is not recorded; recorded are 3, 4, 5, 6"):
        choose(run, 7)


def test_a_warm_up_is_the_first_and_slower_on_most_stages(tmp_path: Path) -> None:
    measured = choose(read_run(write_run(tmp_path / "a", warm_up=5)))
    assert measured.warm_up == 5
    assert [timeline.iteration for timeline in measured.steady] == [6, 7]
    assert choose(read_run(tmp_path / "a"), 5).typical == choose(read_run(tmp_path / "a"), 5).shown
    assert choose(read_run(write_run(tmp_path / "b", warm_up=6))).warm_up is None
    assert choose(read_run(write_run(tmp_path / "c", iterations=(5,), warm_up=5))).warm_up is None


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


def test_peaks_of_iterations_that_are_not_shown_are_noted(tmp_path: Path) -> None:
    write_run(tmp_path, num_stages=4, num_microbatches=4, iterations=(5,))
    (tmp_path / "rank_00001.json").write_text(json.dumps({"rank": 1, "peak_bytes": 99_000_000}))
    (tmp_path / "rank_00002.json").write_text(json.dumps({"rank": 2, "peak_bytes": 1}))
    assert choose(read_run(tmp_path)).notes == ("iterations that are not shown held more: rank 1 99000000 bytes",)


def test_memory_steps_down_where_a_computation_ends(tmp_path: Path) -> None:
    """A backward's memory is gone at its end, and not only when the next computation begins."""
    lane = choose(read_run(write_run(tmp_path, iterations=(5,)))).timelines[0].lanes[0]
    assert lane is not None
    (backward,) = [row for row in lane.computations if str(row.action) == "0B0"]
    assert backward.live_bytes is not None
    assert backward.left_bytes is not None
    assert backward.left_bytes < backward.live_bytes
    at = lane.levels.index((backward.start_s, backward.live_bytes))
    assert lane.levels[at + 1] == (backward.end_s, backward.left_bytes)
    assert lane.levels[-1] == (lane.computations[-1].end_s, lane.source.host_bytes)
