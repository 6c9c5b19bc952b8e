"""`bpipe simulate`: two predictions side by side."""

import json
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.config.launch.capture import write_launches

PLAIN = ["simulate", "--model", "llama3-70b", "--cluster", "h100-80g:8x8", "--gbs", "64", "--tp", "4", "--pp", "8"]
LAUNCH = "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
LAUNCH += " --vocab-size 32000 --pipeline-model-parallel-size 4 --global-batch-size 16 --micro-batch-size 1 --bf16"


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def document(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(said([arguments[0], "--format", "json", *arguments[1:]], capsys))
    return result


def test_each_side_is_the_command_with_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    both = document([*PLAIN, "--compare", "", "--tp 8 --pp 4 --recompute full"], capsys)
    assert both["A"] == document(PLAIN, capsys)
    assert both["B"] == document([*PLAIN, "--tp", "8", "--pp", "4", "--recompute", "full"], capsys)


def test_launches_are_compared_by_their_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, more in (("one", ""), ("two", " --recompute-granularity full --recompute-method uniform")):
        words = f"torchrun --nproc-per-node 4 pretrain_gpt.py {LAUNCH}{more}".split()
        (tmp_path / name).write_text(write_launches([{"words": words}]))
    first, second = (str(tmp_path / name) for name in ("one", "two"))
    command = ["simulate", "--cluster", "a100-80g"]
    both = document([*command, "--compare", first, f"--launch {second}"], capsys)
    assert both["A"] == document([*command, "--launch", first], capsys)
    assert both["B"] == document([*command, "--launch", second], capsys)
    # The launch of the command is laid aside, too.
    assert both == document([*command, "--compare", first, second, "--", *LAUNCH.split()], capsys)


SIMULATE = ["simulate", "--model", "gpt3-13b", "--cluster", "a100-80g:1x8", "--pp", "4", "--gbs", "16"]


def test_two_predictions_are_not_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATE, "--compare", "", "--tp 2", "--trace", "run.json"]) == 2
    assert "leave one of the two out" in capsys.readouterr().err
