"""What writers are told without a report: MLflow, by a stand-in of its module, as TensorBoard; and nothing where there
are none."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.gloo.conftest import Case, Outcome
from tests.gloo.flags import BPIPE

BATCH = "--stand-in mlflow --global-batch-size 16"


@pytest.fixture(scope="module")
def told(run_cases: Callable[..., Outcome]) -> Outcome:
    flags = f"{BATCH} {BPIPE} --tensorboard-log-interval 1 --tensorboard-dir {{folder}}/board"
    return run_cases(4, [Case("stock", BATCH), Case("told", flags)])


@pytest.mark.timeout(300)
def test_mlflow_is_told_by_one_rank_what_tensorboard_is(told: Outcome) -> None:
    """Ranks 1 and 2 have a run, and rank 2 tells it; Megatron's own writers are rank 3's."""
    board = EventAccumulator(str(told.folder / "board")).Reload()
    lines = [json.loads(line) for line in (told.folder / "told.rank2.mlflow").read_text().splitlines()]
    assert not (told.folder / "told.rank1.mlflow").exists()
    assert [line["step"] for line in lines] == [1, 2, 3]
    names = {name for name in board.Tags()["scalars"] if name.startswith("bpipe-")}
    assert set(lines[-1]["metrics"]) == names
    assert {"bpipe-evictions/stage-0", "bpipe-bubble/stage-3", "bpipe-link-gb-per-s/stage-0"} <= names
    assert lines[-1]["metrics"]["bpipe-evictions/stage-0"] == 3
    for name in names:
        # TensorBoard keeps 32 bits.
        last = {event.step: event.value for event in board.Scalars(name)}
        for line in lines:
            if name in line["metrics"]:
                assert line["metrics"][name] == pytest.approx(last[line["step"]], rel=1e-6)


@pytest.mark.timeout(300)
def test_telling_changes_no_bit(told: Outcome) -> None:
    for rank in range(4):
        assert told.record("told", rank) == told.record("stock", rank)


@pytest.mark.timeout(300)
def test_mlflow_alone_is_told(run_cases: Callable[..., Outcome]) -> None:
    alone = run_cases(4, [Case("alone", f"{BATCH} {BPIPE}")])
    lines = [json.loads(line) for line in (alone.folder / "told.rank2.mlflow").read_text().splitlines()]
    # Megatron's --tensorboard-log-interval is 1 by default.
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["metrics"]["bpipe-moved-bytes/stage-0"] > 0
