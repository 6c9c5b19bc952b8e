"""`bpipe simulate`: two predictions side by side, and the page of a run that has not been."""

import json
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.commands.simulate import page_view
from bpipe.config.launch.capture import write_launches
from bpipe.plan.predict import predict, simulation_of
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.model import PRESETS
from bpipe.record.report.output.page import render

PLAIN = ["simulate", "--model", "llama3-70b", "--cluster", "h100-80g:8x8", "--gbs", "64", "--tp", "4", "--pp", "8"]
LAUNCH = "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
LAUNCH += " --vocab-size 32000 --pipeline-model-parallel-size 4 --global-batch-size 16 --micro-batch-size 1 --bf16"


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def document(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said([arguments[0], "--format", "json", *arguments[1:]], capsys))
    return found


def test_each_side_is_the_command_with_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    both = document([*PLAIN, "--compare", "", "--tp 8 --pp 4 --recompute full"], capsys)
    assert both["A"] == document(PLAIN, capsys)
    assert both["B"] == document([*PLAIN, "--tp", "8", "--pp", "4", "--recompute", "full"], capsys)


def test_launches_are_compared_by_their_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, more in (("one", ""), ("two", " --recompute-granularity full --recompute-method uniform")):
        words = f"torchrun --nproc-per-node 4 pretrain_gpt.py {LAUNCH}{more}".split()
        (tmp_path / name).write_text(write_launches([{"words": words}]))
    one, two = (str(tmp_path / name) for name in ("one", "two"))
    command = ["simulate", "--cluster", "a100-80g"]
    both = document([*command, "--compare", one, f"--launch {two}"], capsys)
    assert both["A"] == document([*command, "--launch", one], capsys)
    assert both["B"] == document([*command, "--launch", two], capsys)
    # The launch of the command is laid aside, too.
    assert both == document([*command, "--compare", one, two, "--", *LAUNCH.split()], capsys)


SIMULATE = ["simulate", "--model", "gpt3-13b", "--cluster", "a100-80g:1x8", "--pp", "4", "--gbs", "16"]


@pytest.mark.parametrize("slices", [1, 2])
def test_a_rank_is_drawn_with_all_that_it_holds_under_its_limit(slices: int) -> None:
    setup = Setup(
        PRESETS["gpt3-13b"],
        parse_cluster("a100-80g:1x8"),
        1,
        4,
        1,
        16,
        2048,
        (10,) * 4,
        "none",
        balance=EVENLY,
        slices=slices,
    )
    simulation = simulation_of(setup)
    prediction = predict(setup, simulation=simulation)
    view = page_view(prediction, simulation)
    assert json.dumps(view)
    for row, stage, lane in zip(prediction.memory, view["stages"], view["iterations"][0]["ranks"], strict=True):
        assert sum(size for _, size in stage["parts"]) == row.peak_bytes
        assert stage["bound_bytes"] == lane["bound_bytes"] == row.limit_bytes
        under = sum(size for _, size in lane["under"])
        assert [name for name, _ in lane["under"]][:3] == ["weights", "gradients", "optimizer"]
        held = [size for _, size in lane["simulated"]["memory"]]
        # In time a rank holds no more than is predicted, whose buffers stay.
        assert under < max(held) <= row.peak_bytes + under - row.state_bytes
        assert held[-1] == under
        assert lane["measured"] is None
    fullest = max(prediction.memory, key=lambda row: row.peak_bytes)
    assert view["bottleneck"] == fullest.rank
    assert view["answers"][0].startswith("It does not fit" if not prediction.fits else "It fits")
    assert '"is_run":false' in render(view)


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.html"
    assert main([*SIMULATE, "--html", str(file)]) == 0
    assert "iteration" in capsys.readouterr().out
    text = file.read_text(encoding="utf-8")
    assert "fillParts" in text
    assert "limit of the device" in text


def test_two_predictions_have_no_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATE, "--compare", "", "--tp 2", "--html", "run.html"]) == 2
    assert "leave one of the two out" in capsys.readouterr().err
