"""Names that are used from torch, and records of runs in its loop."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bpipe.build import ScheduleConfig, build
from bpipe.record.format import RECORD, SUMMARY
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.meter import Meter
from bpipe.torch import upstream
from bpipe.torch.record import StepRecord
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import MeasuredLink


def test_the_installed_torch_lacks_nothing() -> None:
    assert upstream.lacking() == []
    assert torch.__version__.startswith(tuple(version.rpartition(".")[0] for version in upstream.RUN_VERSIONS))


def test_a_torch_without_a_name_or_a_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    row = upstream.NAMES[0]
    changed = (row._replace(name="_Gone.method"), row._replace(parameters="schedule_name rank"))
    monkeypatch.setattr(upstream, "NAMES", changed)
    assert upstream.lacking() == ["_Gone.method", "get_schedule_class(rank)"]
    with pytest.raises(
        upstream.UnfitTorch,
        match=r"torch 2\.\S+ cannot be used by bpipe\.torch: torch\.distributed\.pipelining has no _Gone\.method, "
        r"get_schedule_class\(rank\)\. Install one of torch 2\.11\.0, .*, or use its own schedules",
    ):
        upstream._require(upstream.lacking())


def test_a_stage_without_an_attribute_is_refused() -> None:
    schedule = SimpleNamespace(**dict.fromkeys(upstream.OF_SCHEDULE))
    stages = [SimpleNamespace(**dict.fromkeys((*upstream.OF_STAGE, name))) for name in upstream.FORWARDS]
    upstream.require_attributes(schedule, stages)
    del stages[0].submod, stages[1].fwd_cache, schedule._internal_losses
    with pytest.raises(
        upstream.UnfitTorch,
        match=r"no _internal_losses, stage\.submod, stage\._forward_chunk_states or stage\.fwd_cache\.",
    ):
        upstream.require_attributes(schedule, stages)


def test_what_a_forward_made_and_took_is_read_of_every_torch() -> None:
    """Torch 2.15 has no `fwd_cache`, so a step ended with an AttributeError."""
    before = SimpleNamespace(fwd_cache={3: (("made",), ["taken"])})
    state = SimpleNamespace(live_outputs=["made"], input_values=["taken"])
    since = SimpleNamespace(_forward_chunk_states={3: state})
    for stage in (before, since):
        outputs, taken = upstream.ran_forward(stage, 3)
        assert [*outputs, *taken] == ["made", "taken"]


def test_what_has_no_buffer_is_passed_over() -> None:
    """In torch 2.11 a pipeline's own arguments lack even the attribute, so a step ended with an AttributeError."""
    buffer = torch.ones(2)
    infos = [SimpleNamespace(meta=torch.ones(2, device="meta")), SimpleNamespace(buffer=None)]
    assert upstream.receive_buffers([*infos, SimpleNamespace(buffer=buffer)]) == [buffer]


def test_a_handshake_that_sends_from_a_rank_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 ended with gloo's "Pair is not connected", which does not show the cause."""
    v, loop = ([SimpleNamespace(stage_index=index) for index in indices] for indices in ((4, 3), (0, 4)))
    cpu = torch.device("cpu")
    monkeypatch.setattr(upstream, "_SENDS_TO_ITSELF", False)
    upstream.refuse_sends_to_itself(v, cpu)
    monkeypatch.setattr(upstream, "_SENDS_TO_ITSELF", True)
    upstream.refuse_sends_to_itself(loop, cpu)
    upstream.refuse_sends_to_itself(v, torch.device("cuda"))
    with pytest.raises(ValueError, match=r"stages 3 and 4 are on one rank: torch 2\.\S+ sends .* Use torch 2\.12"):
        upstream.refuse_sends_to_itself(v, cpu)


CPU = torch.device("cpu")


@dataclass
class Stage:
    """The attributes that are read from torch's stages."""

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
    """It was computed and written after every step, although most steps say the same as the one before."""
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
    links = [MeasuredLink((0, 3), "peer", {}), MeasuredLink((1, 2), "gloo", {})]
    for peak in (9, 5, 5, 5, 4, 7, 7):
        with record.step(engine, meter, links, None):
            if engine.recorder is not None:
                engine.recorder.begin()
            meter.peak_bytes, meter.each_bytes = peak, {(0, 0): peak}
    # The first step does not count once there is another; the third is recorded; the sixth held more.
    assert written == [1, 2, 3, 6]
    header = json.loads(RECORD.path(tmp_path / "record", 0).read_text().splitlines()[0])
    assert (header["transport"], header["partner"]) == ("peer", 3), "of its own links"
    assert json.loads(SUMMARY.path(tmp_path / "record", 0).read_text())["peak_bytes"] == 7
    assert len((tmp_path / "record" / "iterations.jsonl").read_text().splitlines()) == 7
