"""A program that cannot start says so once, and ends with the same status on every rank."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.scheduling import launch
from megatron.scheduling.options.flags import add_arguments
from megatron.scheduling.start import exits


def parser() -> argparse.ArgumentParser:
    made = add_arguments(argparse.ArgumentParser(prog="pretrain.py", allow_abbrev=False))
    made.add_argument("--num-layers", type=int)
    exits.refuse_once(made)
    return made


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--bpip"],
            "pretrain.py: error: unrecognized arguments: --bpip\n  instead of --bpip, did you mean --bpipe?\n",
        ),
        (
            ["--bpipe-reprot=x", "--num-layer", "4"],
            "  instead of --bpipe-reprot, did you mean --bpipe-report?\n  instead of --num-layer, did you mean "
            "--num-layers?\n",
        ),
        (["--qqq"], "pretrain.py: error: unrecognized arguments: --qqq\n"),
        (["--num-layers", "many"], "pretrain.py: error: argument --num-layers: invalid int value: 'many'\n"),
    ],
)
def test_a_flag_that_is_not_known_is_refused_once(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as ended:
            parser().parse_args(flags)
        assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.endswith(said)
    assert error.count("usage: ") == 1
    assert error.count("error: ") == 1


def test_a_folder_that_cannot_be_written_is_named_once_a_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of two processes. On a real file system: a file stands where the folder should be."""
    (tmp_path / "file").write_text("")
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        monkeypatch.setenv("GROUP_RANK", str(rank // 2))
        with pytest.raises(SystemExit) as ended:
            exits.need_folder(str(tmp_path / "file/report"))
        assert ended.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"bpipe: error: --bpipe-report {tmp_path}/file/report: Not a directory"
    assert second.startswith(f"{first} on ")


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    exits.need_folder(str(tmp_path / "runs/mine"))
    assert list((tmp_path / "runs/mine").iterdir()) == []


@pytest.mark.parametrize("flag", ["--sft", "--dataloader-inter-document-masking"])
def test_a_pipeline_takes_one_packed_row_at_a_time(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With stock Megatron, too: the second of two stages got a micro-batch of two rows as one of another shape."""
    packed = {flag.removeprefix("--").replace("-", "_"): True, "pipeline_model_parallel_size": 2}
    for rows in ({"micro_batch_size": 2}, {"micro_batch_size": 1, "eval_micro_batch_size": 2}):
        with pytest.raises(SystemExit) as ended:
            launch.refuse_packed_batches(SimpleNamespace(**packed, **rows))
        assert ended.value.code == 2
        assert f"bpipe: error: {flag}: Megatron joins the 2 packed rows" in capsys.readouterr().err
    launch.refuse_packed_batches(SimpleNamespace(**packed, micro_batch_size=1))
    launch.refuse_packed_batches(SimpleNamespace(sft=True, micro_batch_size=2, pipeline_model_parallel_size=1))
    launch.refuse_packed_batches(SimpleNamespace(sft=False, micro_batch_size=2, pipeline_model_parallel_size=2))
