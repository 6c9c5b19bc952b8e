"""One rank of a test's trainings on late devices or, for the expected results, on the CPU.

Takes the kind of device, a file of cases and a folder. Writes the results of tests/gloo/worker.py, a hash of all
gradients of each iteration, and on request the device allocator's counters. A case's `draw` decides the order in which
its devices work. Megatron's stand-ins must be installed before this is imported in a process that forks ranks.
"""

import functools
import gc
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__" and sys.argv[1] == "late":
    from tests.late import stand_in

    stand_in.install()

import torch
from megatron.core import parallel_state

from megatron.scheduling import cpu as cpu_runtime
from tests.gloo import worker
from tests.late import sums
from tests.late.devices import Draw, extension
from tests.late.processes import begin_process
from tests.support.holding import holding as shared_holding


class Recorder(worker.Recorder):
    """Also records gradients."""

    def _observe(self, train_step: Any) -> Any:
        observed = super()._observe(train_step)

        @functools.wraps(train_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = observed(*args, **kwargs)
            self.iterations[-1]["gradients"] = self.gradients()
            return result

        return step

    def gradients(self) -> str:
        digest = hashlib.sha256()
        for chunk in self.model:
            for name, parameter in sorted(chunk.named_parameters()):
                digest.update(name.encode())
                digest.update(parameter.main_grad.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class MemoryRecorder(Recorder):
    """Prints the allocator's counters of each iteration: bytes in segments, segments taken, peak allocated bytes."""

    def _observe(self, train_step: Any) -> Any:
        observed = super()._observe(train_step)

        @functools.wraps(train_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = observed(*args, **kwargs)
            stats = torch.accelerator.memory_stats()
            names = "reserved_bytes.all.current", "num_device_alloc", "allocated_bytes.all.peak"
            numbers = " ".join(str(stats[name]) for name in names)
            print(f"memory of stage: {parallel_state.get_pipeline_model_parallel_rank()} {numbers}", flush=True)
            torch.accelerator.reset_peak_memory_stats()
            return result

        return step


def on_device(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return a stand-in's arguments without CPU initialization, with which Megatron would leave weights on the host."""
    return tuple(argument for argument in arguments if argument != "--use-cpu-initialization")


def holding(device: str) -> dict[str, int]:
    """Return the resources that this process still holds after its trainings, also on a late device.

    Boards of late groups are not counted: they correspond to NCCL's memory."""
    resources = shared_holding()
    if device == "late":
        torch.accelerator.empty_cache()
        free, total = torch.accelerator.get_memory_info()
        lent, opened = extension().holding()
        resources |= {"device_bytes": total - free, "lent": lent, "opened": opened}
    return resources


def main(device: str, cases: str, folder: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    cpu_runtime.ARGUMENTS = on_device(cpu_runtime.ARGUMENTS)
    if device == "cpu":
        sums.install()
    for case in json.loads(Path(cases).read_text()):
        if device == "late":
            begin_process(rank, int(os.environ["LOCAL_RANK"]), Draw(**case["draw"]))
        if case["memory"]:
            # Collections of garbage at random moments would change where small blocks are allocated.
            gc.disable()
        worker.run(case, Path(folder), MemoryRecorder if case["memory"] else Recorder)
        gc.enable()
        print(f"holding: {json.dumps(holding(device))}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
