"""Choosing what a report is about: one pipeline, one clock, one program, and both ends of every transfer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bpipe.record.read import read_run
from bpipe.record.report.selection import choose
from tests.unit.record.report.recorded import write_run


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
