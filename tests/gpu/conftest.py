"""Steps of scripts/gpu_check.py for tests on a GPU. In: nothing. Out: the table of steps; everything here skips without a CUDA device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="session")
def steps() -> dict[str, Any]:
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    import gpu_check

    table: dict[str, Any] = gpu_check.STEPS
    return table
