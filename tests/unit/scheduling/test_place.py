"""`place` gives each process another rank before there are process groups, once, and says why where it cannot."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from megatron.scheduling import place


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts the second of eight processes on two nodes; what the test sets is undone."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "BPIPE_PLACED_FROM_RANK": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("BPIPE_PLACED_FROM_RANK")


def ranks(monkeypatch: pytest.MonkeyPatch, **sizes: int | bool) -> list[int]:
    """The rank every process takes, in the order of their launch."""
    found = []
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        found.append(place(**sizes))  # type: ignore[arg-type]
        assert os.environ["RANK"] == str(found[-1])
        monkeypatch.delenv("BPIPE_PLACED_FROM_RANK")
    return found


def test_partners_are_neighbours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ranks(monkeypatch, pipeline=8) == [0, 7, 1, 6, 2, 5, 3, 4]
    said = capsys.readouterr().out
    assert said.count("bpipe: placement adjacent: 8 ranks on nodes of 4") == 1, "the table comes from the first process alone"
    assert "bpipe:   node 0: stages 0 7 1 6" in said


def test_replicas_come_in_either_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pipelines of four stages. Megatron numbers the replicas of a stage first, or one pipeline after the other."""
    assert ranks(monkeypatch, pipeline=4) == [0, 6, 2, 4, 1, 7, 3, 5]
    assert ranks(monkeypatch, pipeline=4, pipeline_before_data=True) == [0, 3, 1, 2, 4, 7, 5, 6]


def test_tensor_parallel_ranks_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks(monkeypatch, pipeline=4, tensor=2) == [0, 1, 6, 7, 2, 3, 4, 5]


def test_without_pairs_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks(monkeypatch, pipeline=2, tensor=4) == list(range(8))


def test_sizes_must_divide_the_world() -> None:
    with pytest.raises(ValueError, match="tensor 1 times context 1 times pipeline 5 does not divide a world of 8 processes"):
        place(pipeline=5)
    with pytest.raises(ValueError, match="context 0"):
        place(pipeline=4, context=0)
    assert os.environ["RANK"] == "1"


def test_a_second_call_would_move_the_rank_again() -> None:
    place(pipeline=8)
    with pytest.raises(RuntimeError, match=r"place\(\) was called before in this process, whose rank was 1: call it once"):
        place(pipeline=8)
    assert os.environ["RANK"] == "7"


def test_after_the_process_group_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="comes too late: the process group exists"):
        place(pipeline=8)


def test_a_launcher_that_sets_no_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(RuntimeError, match="reads WORLD_SIZE from the environment"):
        place(pipeline=8)
