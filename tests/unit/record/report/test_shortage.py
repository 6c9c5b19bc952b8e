"""What a run that ran out of memory left says which stage, how much of what, and what would have fitted."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.record.read import read_held
from bpipe.record.report.shortage import shortage_of, text

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
    """28 GiB beside activations, 2 GiB of others, 6 GiB per micro-batch: 8 need 78, 5 balanced 60."""
    found = shortage_of(held(write(tmp_path / "run", 70)))
    assert found.stages[0].need_bytes == (8 + 8 + 12 + 2 + 8 * 6) * GIB
    assert found.stages[0].other_bytes == 2 * GIB
    ways = {way.name: (way.need_bytes // GIB, way.fits) for way in found.ways}
    assert ways == {
        "as it was run": (78, False),
        "with --bpipe": (60, True),
        "with --micro-batch-size 1": (28 + 1 + 8 * 3, True),
        "with --micro-batch-size 1 and --bpipe": (28 + 1 + 5 * 3, True),
    }
    said = text(held(tmp_path / "run"))
    assert (
        "Rank 0 (stage 0 of pipeline 0, node1) ran out of memory: OutOfMemoryError: CUDA out of memory (rank 0)."
        in said
    )
    assert "7 of 8 42.0 GiB" in " ".join(said.split())
    page = (Path(__file__).resolve().parents[4] / "docs" / "report.md").read_text()
    (shown,) = re.findall(r"^```\n( +held  activa-.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert set(shown.splitlines()) - {"..."} <= set(said.splitlines())
    assert "What fits: with --bpipe; with --micro-batch-size 1; with --micro-batch-size 1 and --bpipe." in said
    assert "note: no forward ran on stage 6, 7:" in said
    assert all(len(line) <= 120 for line in said.splitlines())


def test_a_rank_that_ran_no_forward_hosts_too(tmp_path: Path) -> None:
    """`with --bpipe: fits` was said of what only the stages that had begun need: stage 7 hosts what stage 0 evicts."""
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
    found = shortage_of(held(folder))
    assert [stage.peak_microbatches for stage in found.stages] == [5, 6, 7, 8, 8, 7, 6, 5]
    assert [stage.need_bytes // GIB for stage in found.stages] == [28 + 6 * peak for peak in (5, 6, 7, 8, 8, 7, 6, 5)]
    assert "with --bpipe" in {way.name for way in found.ways}


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
    """28 GiB beside activations, 2 of others, 6 micro-batches of 6, and a shard's part of one."""
    found = shortage_of(held(sharded(tmp_path / "run")))
    assert found.stages[0].held_bytes == (5 * 6 + 3) * GIB
    assert found.stages[0].other_bytes == 2 * GIB
    assert found.stages[0].need_bytes == (28 + 2 + 6 * 6 + 3) * GIB
    ways = {way.name: way.need_bytes for way in found.ways}
    assert ways["as it was run"] == (28 + 2 + 6 * 6 + 3) * GIB
    assert ways["with --micro-batch-size 1"] == (28 + 1 + 6 * 3) * GIB + 3 * GIB // 2
    said = text(held(tmp_path / "run"))
    in_one_line = " ".join(said.split())
    assert "Its shard of the output layer holds 3.0 GiB of a micro-batch between its passes" in in_one_line
    assert "balance none; vocabulary 1; memory held up to" in in_one_line
    assert "S to T" in said
    assert "not counted" not in said
    assert all(len(line) <= 120 for line in said.splitlines())


def test_shards_that_no_rank_had_computed_are_said_not_to_count(tmp_path: Path) -> None:
    found = shortage_of(held(sharded(tmp_path / "run", shard_gib=0)))
    assert found.stages[0].need_bytes == (28 + 2 + 6 * 6) * GIB
    assert (
        found.notes[-1]
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
    found = read_held(folder)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"iteration": None}, "line 9: 'iteration' is missing"),
        ({"saved_bytes": [1]}, "line 9: saved_bytes is [1], but must be an object"),
        ({"microbatches": [[0, 0]]}, "line 9: [0, 0] is not a stage, a micro-batch and bytes"),
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
    said = capsys.readouterr().out
    assert "is the memory bottleneck" in said
    assert "Rank 0 (stage 0 of pipeline 0, node1) failed first: OutOfMemoryError: CUDA out of memory." in said
