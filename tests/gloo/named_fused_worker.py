"""As named_worker, with gradients of weights added up inside their matrix product, as fused_worker has them.

In and out: as there.
"""

from __future__ import annotations

import runpy
from pathlib import Path

# Before Megatron, which looks for the extension when it is imported.
from tests.gloo import fused_worker  # noqa: F401

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("named_worker.py")), run_name="__main__")
