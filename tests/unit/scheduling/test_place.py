"""`place` gives each process another rank before there are process groups, once, and says why if it cannot."""

import os

import pytest
import torch.distributed as dist

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build, config_of_schedule
from bpipe.schedule.action import Kind
from bpipe.schedule.families.unit_grid import place as on_the_grid
from bpipe.schedule.schedule import Schedule
from megatron.scheduling import install, place
from megatron.scheduling.options.arguments import SchedulingConfig


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch like torchrun's second of eight processes on two nodes; the environment is restored."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "BPIPE_PLACED_FROM_RANK": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("BPIPE_PLACED_FROM_RANK")


def eager(schedule: Schedule) -> Schedule:
    """Move all forwards of the first stage to the start, so that its rank holds more than the others."""
    orders = [[action for slot in row for action in slot.computations] for row in schedule.ranks]
    orders[0].sort(key=lambda action: (action.stage, action.kind) != (0, Kind.FORWARD))
    return on_the_grid("eager", schedule.num_microbatches, schedule.layout, orders)


def ranks(monkeypatch: pytest.MonkeyPatch, **sizes: int | bool | SchedulingConfig) -> list[int]:
    """The rank every process takes, in the order of their launch."""
    placed = []
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        placed.append(place(**sizes))  # type: ignore[arg-type]
        assert os.environ["RANK"] == str(placed[-1])
        monkeypatch.delenv("BPIPE_PLACED_FROM_RANK")
    return placed


def test_pairs_are_those_of_the_schedule(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A V counts its positions from the other end, and a schedule that moves nothing has no pairs."""
    pairs = (4, 5, 7, 6, 0, 1, 3, 2)
    for schedule, chunks in (("1f1b-split", 1), ("grouped-interleaved", 2)):
        own = ScheduleConfig(schedule, 8, 16, num_chunks=chunks, balance=BalanceConfig(None, pairs))
        assert ranks(monkeypatch, pipeline=8, config=SchedulingConfig(8, chunks, own=own)) == [0, 4, 1, 5, 2, 7, 3, 6]
    of_a_file = eager(build(ScheduleConfig("v-min", 8, 16, num_chunks=2)))
    own = config_of_schedule(of_a_file, BalanceConfig())
    capsys.readouterr()
    placed = ranks(monkeypatch, pipeline=8, config=SchedulingConfig(8, 2, own=own))
    assert placed[:2] == [0, 7]
    assert "bpipe:   node 0: stages 7 0 " in capsys.readouterr().out
    for config in (
        SchedulingConfig(8, 2, own=ScheduleConfig("v-half", 8, 16, num_chunks=2, balance=BalanceConfig())),
        SchedulingConfig(8, 1),
    ):
        assert ranks(monkeypatch, pipeline=8, config=config) == list(range(8))
    usual = ranks(monkeypatch, pipeline=8)
    assert ranks(monkeypatch, pipeline=8, config=SchedulingConfig(8, 1, BalanceConfig())) == usual
    assert ranks(monkeypatch, pipeline=8, config=SchedulingConfig(8, 2, BalanceConfig())) == usual


def test_two_pipes_are_placed_and_ask_whose_samples_a_chunk_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the last of an odd number of chunks would get labels of other samples."""
    config = SchedulingConfig(8, 1, own=ScheduleConfig("chimera", 8, 8, balance=BalanceConfig()))
    with pytest.raises(ValueError, match=r"samples of the data-parallel replica samples_of\(config, c\), and call"):
        install(config)
    # Mirror images are neighbours, like Megatron's replicas 0 and 1; partners are in the same half, and each pair of
    # pairs is on one node.
    placed = ranks(monkeypatch, pipeline=8, config=config)
    assert sorted(placed) == list(range(8))
    assert [rank // 2 for rank in placed[::2]] == [rank // 2 for rank in placed[1::2]]
    assert "bpipe:   node 0: stages 3 4 0 7\nbpipe:   node 1: stages 2 5 1 6" in capsys.readouterr().out
    with pytest.raises(ValueError, match="pipeline_before_data separates them: leave it out"):
        place(pipeline=8, config=config, pipeline_before_data=True)


def test_what_is_not_the_configurations_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pipeline 8 differs from num_ranks 4 of the configuration: give place\(\)"):
        place(pipeline=8, config=SchedulingConfig(4, 1, BalanceConfig()))
    assert os.environ["RANK"] == "1"
    with pytest.raises(ValueError, match="num_chunks is 1, but 2 in the schedule given as own: give both the same"):
        SchedulingConfig(8, 1, own=ScheduleConfig("v-half", 8, 16, num_chunks=2, balance=BalanceConfig()))
    with pytest.raises(ValueError, match="own is a schedule with another balance or none: give it in own only"):
        SchedulingConfig(8, 2, BalanceConfig(), own=ScheduleConfig("v-half", 8, 16, num_chunks=2))


def test_sizes_must_divide_the_world() -> None:
    with pytest.raises(ValueError, match=r"tensor 1 times context 1 times pipeline 5 .* the world size of 8 processes"):
        place(pipeline=5)
    with pytest.raises(ValueError, match="context 0"):
        place(pipeline=4, context=0)
    assert os.environ["RANK"] == "1"


def test_a_second_call_would_move_the_rank_again() -> None:
    place(pipeline=8)
    with pytest.raises(RuntimeError, match=r"place\(\) was already called in this process, whose rank was 1: call"):
        place(pipeline=8)
    assert os.environ["RANK"] == "7"


def test_after_the_process_group_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="was called too late: the process group exists"):
        place(pipeline=8)


def test_a_launcher_that_sets_no_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(RuntimeError, match="reads WORLD_SIZE from the environment"):
        place(pipeline=8)
