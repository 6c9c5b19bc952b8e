"""One rank of a test's training runs. In and out: as worker.py, which imports what this need not import twice."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Megatron writes checkpoints with processes that import this file again.
    from tests.gloo import worker

    worker.main(*sys.argv[1:])
