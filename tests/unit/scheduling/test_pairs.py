"""The schedule's pairs decide which ranks share a node, wherever their stages are among Megatron's ranks."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.files.text import write_csv
from bpipe.schedule.memory import moves_anything
from megatron.scheduling.loop.log import describe
from megatron.scheduling.placement import rank_order as placement
from tests.unit.scheduling.test_choosing import args as megatrons


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch on nodes of two GPUs; the environment is restored."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


def args(ranks: int, microbatches: int, rank: int = 0, **more: Any) -> SimpleNamespace:
    """Arguments for one pipeline of `ranks` ranks."""
    sizes = {
        "pipeline_model_parallel_size": ranks,
        "world_size": ranks,
        "global_batch_size": microbatches,
        "micro_batch_size": 1,
    }
    dimensions = {
        "data_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "use_tp_pp_dp_mapping": False,
    }
    # As after validation: tensor parallelism alone decides how many shards a weight has.
    dimensions["tensor_parallel_num_weight_shards"] = 1
    return megatrons(**{"bpipe": True, "bpipe_placement": "adjacent", "rank": rank, **sizes, **dimensions, **more})


def placed(ranks: int, microbatches: int, processes: int | None = None, **more: Any) -> list[int]:
    """The Megatron rank that each process takes."""
    placements = []
    for rank in range(processes or ranks):
        arguments = args(ranks, microbatches, rank, **more)
        placement.apply(arguments)
        assert rank == arguments.rank or os.environ["RANK"] == str(arguments.rank)
        placements.append(arguments.rank)
    assert placements[0] == 0, "rank 0 stays where its store is"
    return placements


def test_a_rank_that_has_no_partner_and_is_the_first_stays_first(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    balanced = build(
        ScheduleConfig("1f1b", 5, 10, num_chunks=1, balance=BalanceConfig((5, 3, 3, 3, 3), (0, 4, 3, 2, 1)))
    )
    file.write_text(write_csv(balanced))
    assert moves_anything(balanced)
    assert placed(5, 10, bpipe_schedule=str(file)) == [0, 1, 4, 2, 3]


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, {}),
        (3, {}),
        (4, {"bpipe_schedule": "v-half", "virtual_pipeline_model_parallel_size": 2}),
        (4, {"bpipe_schedule": "zb-h1"}),
        (4, {"bpipe_bound": (4,)}),
        (4, {"bpipe": False}),
        (4, {"bpipe_placement": "none"}),
        (4, {"bpipe_schedule": "no-such"}),
        (4, {"tensor_parallel_num_weight_shards": 2}),
    ],
)
def test_where_nothing_moves_ranks_stay(ranks: int, more: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert placed(ranks, 8, **more) == list(range(ranks))
    assert capsys.readouterr().out == ""


WHY = [
    (("1f1b", 1, 4, 1), None, "1 stage, 4 micro-batches: a single stage has no other to share with; training as usual"),
    (
        ("1f1b", 3, 8, 1),
        None,
        "pairing stages cannot get all of them below the 3 micro-batches that the fullest stage holds alone; training as usual",
    ),
    (
        ("v-half", 4, 8, 2),
        None,
        "every stage holds 6 micro-batches of a chunk, so there is nothing to share; training as usual",
    ),
    (("1f1b", 4, 8, 1), 4, "no stage holds more than its bound; training as usual"),
    (("interleaved-1f1b", 3, 6, 2), None, "at most 7 held; evicting 0 -> 2 (2 of 6, 2 host buffers)"),
]


@pytest.mark.parametrize(("sizes", "bound", "line"), WHY)
def test_why_nothing_moves_is_said_of_the_schedule_at_hand(sizes: Any, bound: int | None, line: str) -> None:
    *sizes, v = sizes
    config = ScheduleConfig(*sizes, num_chunks=v, balance=BalanceConfig(None if bound is None else (bound,)))
    assert describe(build(config)).endswith(line)
