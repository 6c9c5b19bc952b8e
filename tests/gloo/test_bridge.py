"""Megatron-Bridge's own training, balanced by `install` and placed by `place`, if Bridge is installed.

Bridge pins many packages. To install it without a GPU, apart from the environment:

    pip install --target /tmp/bridge "transformers>=5.8,<=5.12.1" omegaconf "hydra-core<1.4" einops "pulp<4.0" \\
        nvidia-ml-py requests datasets
    pip install --target /tmp/bridge --no-deps megatron-bridge==0.6.2 nvidia-modelopt peft accelerate diffusers scipy \\
        ninja importlib_metadata
    rm -rf /tmp/bridge/numpy*      # the environment's own numpy goes with its torch
    PYTHONPATH=/tmp/bridge python -m pytest --slow tests/gloo/test_bridge.py

`transformer_engine`, `nvidia_resiliency_ext` and `megatron.energon` are replaced by empty modules: they need a GPU, or
PyPI does not have all of them, and the recipe uses none of them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.gloo.conftest import ROOT, finish, free_ports, start

# Imports of Bridge that a training uses, so that nothing can stand in for them.
NEEDED = ("megatron.bridge", "transformers", "modelopt", "omegaconf", "hydra")


def missing() -> list[str]:
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(bool(missing()), reason=f"{', '.join(missing())} not installed: this file's docstring says how")
def test_bridges_own_steps_are_balanced(tmp_path: Path) -> None:
    """Bridge's `pretrain` with its own loop, step, model, data and optimizer; the recipe itself compares the bits."""
    port, *ports = free_ports(5)
    script = [str(ROOT / "tests/gloo/bridge_recipe.py"), *map(str, ports)]
    # Stand-ins for packages are installed before Megatron is imported.
    outcome = finish(start(4, script, tmp_path, port, cold=4), tmp_path, 450)
    assert outcome.codes == [0] * 4, outcome.logs[0][-3000:]
    # The second process took the last stage, because Bridge reads the rank that `place` has set.
    for process, rank in enumerate((0, 3, 1, 2)):
        for chunks in (1, 2):
            assert (
                f"rank {rank}, {chunks} chunks: Bridge's steps are equal, balanced and plain" in outcome.logs[process]
            )
    assert "bpipe: 1f1b, 4 stages, 8 micro-batches: at most 3 held; evicting 0 -> 3" in outcome.logs[0]
    assert "bpipe: interleaved-1f1b, 4 stages, 8 micro-batches: at most 9 held; evicting 0 -> 3" in outcome.logs[0]
    assert outcome.logs[0].count("bpipe: stage 0 moves 1.0") == 2, "activations really left"
