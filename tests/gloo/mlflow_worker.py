"""One rank of a test's training runs, with a module in MLflow's place: of its functions the two that are called.

In and out: as worker.py, and `<folder>/mlflow.rank<r>.jsonl`, what ranks 1 and 2 were told; both have a run.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

if __name__ == "__main__":
    import torch.distributed as dist

    from tests.gloo import worker

    # A case replaces the arguments.
    FOLDER = Path(sys.argv[2])

    def log_metrics(metrics: dict[str, float], step: int) -> None:
        with (FOLDER / f"mlflow.rank{dist.get_rank()}.jsonl").open("a") as told:
            told.write(json.dumps({"step": step, "metrics": metrics}) + "\n")

    stand_in = types.ModuleType("mlflow")
    stand_in.active_run = lambda: "a run" if dist.get_rank() in (1, 2) else None  # type: ignore[attr-defined]
    stand_in.log_metrics = log_metrics  # type: ignore[attr-defined]
    sys.modules["mlflow"] = stand_in
    worker.main(*sys.argv[1:])
