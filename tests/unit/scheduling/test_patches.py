"""The checks of check_*.py, which need the installed Megatron, in processes of their own: importing it takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Runs every `check_` function of the named modules, behind the module's `setup`, if it has one.
RUN = """
import importlib, sys
from megatron.scheduling.start import startup
startup.prepare()
import torch.distributed as dist
from megatron.core import parallel_state
for name in sys.argv[1:]:
    module = importlib.import_module("tests.unit.scheduling." + name)
    getattr(module, "setup", lambda: None)()
    for name, check in list(vars(module).items()):
        if name.startswith("check_"):
            check()
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
"""
# Puts an extension in place of one that is not there, before Megatron is imported.
FUSED = "from tests.gloo.fused import stand_in\nstand_in()\n"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("program", "names"),
    [
        (RUN, ("check_patches", "check_beside", "check_shards", "check_placed", "check_audit", "check_sessions")),
        (FUSED + RUN, ("check_halves",)),
        (RUN, ("check_slices",)),
    ],
    ids=["small", "halves", "slices"],
)
def test_checks_in_a_process_of_their_own(program: str, names: tuple[str, ...]) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", program, *names]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=390, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
