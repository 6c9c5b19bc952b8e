"""On one GPU: the steps of scripts/gpu_check.py with moderate sizes.

What they say of speed is not judged here, only that they work.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

# A step starts processes and contexts of its own; how long it goes on is bounded below.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LONGEST_S = 200.0


def run(check: ModuleType, name: str) -> Any:
    # In a process of its own, as the script does it: a step may cut the memory that torch has, or leave its device
    # busy.
    result = check.find_out(name, "moderate", LONGEST_S)
    assert result.failure is None, result.failure
    if result.skipped:
        pytest.skip(result.skipped)
    return result


RIGHT = ("counts", "peer", "streams", "memory", "nccl", "megatron", "nearly_full", "side_stream", "abandon")
AGAIN = [pytest.param(name, marks=pytest.mark.slow) for name in ("connections", "allocators")]


@pytest.mark.parametrize("name", [*RIGHT, *AGAIN])
def test_right(check: ModuleType, name: str) -> None:
    result = run(check, name)
    assert result.ok is True, result.rows


@pytest.mark.parametrize("name", ["versions", "queues", "overhead", "overhead_one_queue", "limits", "compute_units"])
def test_measures(check: ModuleType, name: str) -> None:
    result = run(check, name)
    assert result.ok is not False, result.rows
    assert result.facts
