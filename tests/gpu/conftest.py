"""scripts/gpu_check.py for tests on a GPU.

In: nothing. Out: the script as a module; everything here skips without a CUDA device.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="session")
def check() -> ModuleType:
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    import gpu_check

    return gpu_check
