"""scripts/validation/torch_tests.py: torch's own tests, of which no copy is here, so one made up stands in."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/validation/torch_tests.py"

REGISTRY = """
from torch.distributed.pipelining.schedules import Schedule1F1B

class ScheduleUneven(Schedule1F1B):
    pass
"""
# As torch's are written: continuous processes, decorators that want GPUs, classes by name.
MADE_UP = """
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import FORWARD
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest, requires_accelerator_dist_backend, skip_if_lt_x_gpu,
)

class ScheduleTest(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def schedule(self):
        stage = PipelineStage(nn.Linear(8, 8), self.rank, 2, torch.device("cpu", self.rank))
        return Schedule1F1B(stage, 4, loss_fn=nn.MSELoss())

    @requires_accelerator_dist_backend(["nccl"])
    @skip_if_lt_x_gpu(4)
    def test_a_step(self):
        schedule, x = self.schedule(), torch.ones(8, 8)
        losses = []
        schedule.step(x) if self.rank == 0 else schedule.step(target=x, losses=losses)
        self.assertEqual(len(losses), 4 * self.rank)
        torch.distributed.barrier(device_ids=[self.rank])

    @skip_if_lt_x_gpu(4)
    def test_b_of_its_own_functions(self):
        self.schedule().register_custom_function(FORWARD, print)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="torch's own tests need expecttest")
def test_ours_stand_in_the_place_of_torchs(tmp_path: Path) -> None:
    folder = tmp_path / "test/distributed/pipelining"
    folder.mkdir(parents=True)
    (folder / "schedule_registry.py").write_text(REGISTRY)
    (folder / "test_schedule_multiproc.py").write_text(MADE_UP)
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=580
    )
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr
    told = {tuple(line.split(maxsplit=2)[:2]): line.split(maxsplit=2)[2] for line in lines[:-1]}
    # Schedule1F1B's single stage has no functions of its own.
    assert told["torch", "ScheduleTest.test_a_step"] == told["balanced", "ScheduleTest.test_a_step"] == "passed"
    assert told["balanced", "ScheduleTest.test_b_of_its_own_functions"].startswith("refused: functions of one's own")
    assert told["torch", "ScheduleTest.test_b_of_its_own_functions"].startswith("failed: AttributeError")
    assert lines[-1] == "2 tests: torch's schedules pass 1, balanced in their place 1 of these; 0 refused, 0 failed"


def test_a_folder_without_torchs_tests_is_refused(
    load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = load_script("validation.torch_tests")
    monkeypatch.setattr(sys, "argv", ["torch_tests.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        script.main()


def test_the_line_that_says_why_is_told(load_script: Callable[[str], ModuleType]) -> None:
    script = load_script("validation.torch_tests")
    text = "Exception in worker:\nTraceback\n  File x\nValueError: 5 stages on 2 ranks: every rank computes equally many\n\nrun it"
    assert script.why(text).startswith("ValueError: 5 stages")
    assert script.refusal(text) == "ranks have different numbers of stages"
    assert script.refusal("AssertionError: tensors differ") is None
