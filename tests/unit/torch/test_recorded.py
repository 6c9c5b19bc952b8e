"""`bpipe.torch.record`: a rank's summary is written where it says something new."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bpipe.build import ScheduleConfig, build
from bpipe.record.format import SUMMARY
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.meter import Meter
from bpipe.torch.record import StepRecord
from bpipe.transport.config import TransferConfig

CPU = torch.device("cpu")


@dataclass
class Stage:
    """What is read of one of torch's stages."""

    submod: nn.Module = field(default_factory=lambda: nn.Linear(2, 2))
    group_rank: int = 0
    is_last: bool = True


@pytest.fixture
def record(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield StepRecord(tmp_path / "record", (3, 3), ScheduleConfig("1f1b", 1, 2), [(0,)], [Stage()], CPU)
    dist.destroy_process_group()


def test_a_summary_is_written_where_a_step_is_recorded_or_it_says_something_new(
    record: StepRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was computed and written behind every step, and most steps say what the one before said."""
    meter = Meter()
    engine = Engine(
        build(ScheduleConfig("1f1b", 1, 2)),
        0,
        None,
        EngineConfig("rank 0", CPU, TransferConfig(minimum_bytes=1, timeout_s=1.0)),
        meter,
    )
    written: list[int] = []
    summarize = record._record.summarize

    def noted(summary: Any) -> None:
        written.append(record._number)
        summarize(summary)

    monkeypatch.setattr(record._record, "summarize", noted)
    for peak in (9, 5, 5, 5, 4, 7, 7):
        with record.step(engine, meter, [], None):
            if engine.recorder is not None:
                engine.recorder.begin()
            meter.peak_bytes, meter.saved_bytes = peak, {0: peak}
    # The first step does not count once there is another; the third is recorded; the sixth held more.
    assert written == [1, 2, 3, 6]
    assert json.loads(SUMMARY.path(tmp_path / "record", 0).read_text())["peak_bytes"] == 7
    assert len((tmp_path / "record" / "iterations.jsonl").read_text().splitlines()) == 7
