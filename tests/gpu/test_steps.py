"""On one GPU: the steps of scripts/gpu_check.py with moderate sizes. What they say of speed is not judged here, only that they work."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

# A step starts processes and contexts of its own; how long it goes on is bounded below.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LONGEST_S = 60.0


def run(steps: dict[str, Any], name: str) -> Any:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    step = steps[name]
    return step.run(device, step.sizes["moderate"], time.monotonic() + LONGEST_S)


@pytest.mark.parametrize("name", ["peer", "streams", "memory", pytest.param("connections", marks=pytest.mark.slow)])
def test_right(steps: dict[str, Any], name: str) -> None:
    result = run(steps, name)
    assert result.ok is True, result.rows


@pytest.mark.parametrize("name", ["limits", "overhead", "compute_units"])
def test_measures(steps: dict[str, Any], name: str) -> None:
    result = run(steps, name)
    assert result.ok is not False, result.rows
    assert result.skipped is None
    assert result.facts
