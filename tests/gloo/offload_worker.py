"""One rank of training runs with Megatron's fine-grained activation offloading, which wants Transformer Engine and a GPU.

In: as `worker.py`. What stands in: the switch by which Transformer Engine's layers are told of offloading, which
layers of Megatron's own parts never ask; no affinity to a GPU; and a CPU for the devices whose tensors it takes. All
else of it is Megatron's: its hooks, its groups, its pool on the host, and when it fetches. It writes
`<folder>/<case>.offloaded.rank<r>`: how often it took something to the host and fetched it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# isort: split
import torch
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import fine_grained_activation_offload as offloading
from megatron.core.pipeline_parallel import utils

from tests.gloo import worker


def stand_in(counts: list[int]) -> None:
    """Let offloading run here; `counts` is how often it took something, and how often it fetched it."""
    transformer_engine.cpu_offload = SimpleNamespace(CPUOffloadEnabled=False)
    utils.set_ideal_affinity_for_current_gpu = lambda: None
    handler: Any = offloading.ChunkOffloadHandler
    handler._can_manage_tensor_for_offload = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
    for place, name in enumerate(("offload", "reload")):
        setattr(handler, name, _counted(getattr(handler, name), counts, place))


def _counted(plain: Any, counts: list[int], place: int) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        counts[place] += 1
        return plain(*args, **kwargs)

    return run


def main(cases: str, folder: str) -> None:
    torch.set_num_threads(1)
    counts = [0, 0]
    stand_in(counts)
    for case in worker.cases_of(cases):
        counts[:] = 0, 0
        worker.run(case, Path(folder))
        offloading.PipelineOffloadManager.reset_instance()
        (Path(folder) / f"{case['name']}.offloaded.rank{worker.LAUNCH_RANK}").write_text(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
