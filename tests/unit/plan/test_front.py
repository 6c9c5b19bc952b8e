"""The front of memory against time: it is that of predicting everything, it says which point wins, and it is drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bpipe.cli import main
from bpipe.plan.front import Front, find_front, not_searched, standing
from bpipe.plan.predict import predict
from bpipe.plan.space import VOCABULARIES, Space
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layout import EVENLY
from bpipe.predict.model import gpt
from bpipe.schedule.hosts import ARRANGEMENTS
from tests.support.predicted import enumerate_setups

# One head, so nothing is tensor parallel, and too many weights for one rank: pairs have something to share.
SPACE = Space(
    gpt("deep", 32, 8192, 1, sequence=4096),
    parse_cluster("a100-80g:8"),
    16,
    4096,
    recompute=("none", "full"),
    schedules=("1f1b", "interleaved-1f1b", "1f1b-split", "v-half", "chimera"),
    max_chunks=2,
    max_micro_batch=2,
)
MODEL = "--num-layers 16 --hidden-size 4096 --num-attention-heads 32 --seq 2048 --vocab-size 50304".split()
FLAGS = ["plan", *MODEL, "--cluster", "a100-80g:4"]
FEW = "--gbs 8 --schedule 1f1b zb-h1 --max-micro-batch 1 --max-chunks 1 --recompute none".split()


@pytest.fixture(scope="module")
def front() -> Front:
    return find_front(SPACE)


def test_it_is_the_front_of_predicting_everything(front: Front) -> None:
    points = []
    for setup in enumerate_setups(SPACE):
        prediction = predict(setup)
        points.append((max(rank.peak_bytes for rank in prediction.memory), prediction.timing.iteration_s))
    points = [point for point in points if point[0] <= front.most_bytes]
    front_points = {
        point
        for point in points
        if not any(rival != point and rival[0] <= point[0] and rival[1] <= point[1] for rival in points)
    }
    assert [(point.peak_bytes, point.iteration_s) for point in front.points] == sorted(front_points)
    assert front.num_simulated < len(points) / 2
    # Both kinds are on it, so that neither could be left out of the search.
    assert {point.setup.balance for point in front.points} == {None, EVENLY}


def test_a_front_names_the_winner_and_its_neighbours(front: Front) -> None:
    peaks = [point.peak_bytes for point in front.points]
    middle = len(peaks) // 2
    between = replace(front, limit_bytes=(peaks[middle] + peaks[middle + 1]) // 2)
    assert between.winner == middle
    assert f"{(peaks[middle + 1] - between.limit_bytes) / 2**30:.1f} GiB more" in standing(between)
    assert replace(front, limit_bytes=peaks[-1]).winner == len(peaks) - 1
    assert replace(front, limit_bytes=1).winner is None
    assert "sequences in slices (--slices 1 2 4 8)" in between.not_searched


def test_a_front_names_what_was_not_searched() -> None:
    """It said that less memory and less time is nowhere to be had, of points that its own search beats where a
    default is lifted."""
    model = gpt("deep", 16, 8192, 64, sequence=4096)
    few = Space(
        model,
        parse_cluster("a100-80g:8"),
        16,
        4096,
        recompute=("none",),
        max_chunks=2,
        max_micro_batch=1,
        vocabulary_parallel=None,
    )
    few = replace(few, schedules=("1f1b", "grouped-interleaved"))
    front, more = find_front(few), find_front(replace(few, max_chunks=4))
    beaten = [
        point
        for point in front.points
        if any(wider.peak_bytes < point.peak_bytes and wider.iteration_s < point.iteration_s for wider in more.points)
    ]
    assert beaten
    assert {
        "more than 2 chunks per rank (--max-chunks)",
        "shards of the vocabulary that save only memory (--vocabulary none 1 2 interlaced)",
        "recomputation selective, full (--recompute)",
        f"other hosts of evicted activations (--hosts {' '.join(ARRANGEMENTS[1:])})",
    } <= set(front.not_searched)
    everything = replace(
        few, max_chunks=32, schedules=("1f1b",), balances=("none",), vocabulary_parallel=VOCABULARIES, contexts=(1, 2)
    )
    assert [
        text
        for text in not_searched(everything)
        if any(flag in text for flag in ("chunks", "shards", "--hosts", "--cp"))
    ] == []


def test_the_command_prints_and_draws_a_front(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "front.html"
    assert main([*FLAGS, *FEW, "--front", "--format", "json", "--html", str(page)]) == 0
    front = json.loads(capsys.readouterr().out)["front"]
    text = page.read_text()
    assert text.count("<tr class=") == len(front["points"])
    assert text.count('<tr class="winner">') == 1
    assert text.count('<polygon class="winner"') == 1
    assert text.count('<polygon class="group-') > len(front["points"])
    assert main([*FLAGS, *FEW, "--front"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if "peak GiB  iteration s" in line) + 1
    marks = [line[0] for line in lines[first : first + len(front["points"])]]
    assert marks == [" "] * (front["winner"] - 1) + ["*"] + ["-"] * (len(marks) - front["winner"])
    flags = front["points"][front["winner"] - 1]["megatron_flags"]
    assert main([*FLAGS, *FEW, "--front", "--emit-args", str(front["winner"])]) == 0
    assert capsys.readouterr().out.split() == flags


def test_what_cannot_be_drawn_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, *FEW, "--html", "front.html"]) == 2
    assert "--html draws a front: give --front, too" in capsys.readouterr().err
